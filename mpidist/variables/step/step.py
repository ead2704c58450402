"""One step over one selection of a plan's variables: the ranks meet, go through its phases, and meet again.

A plan makes a `Step` once for each selection and keeps it, so that a step holds exactly the phases it needs and asks
nothing while it runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import numpy as np

from mpidist.comm.agreement import same_on_all
from mpidist.comm.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.variables.arena_memory import ArenaMemory
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.update.kernel import Update

# All ranks of all nodes compare what they do in so many first steps, then in steps 32, 64, 128, ...
_COMPARED_STEPS = 16
# A header has one cache line of int64 for each rank of the node.
_LINE = 8


class Phase(Protocol):
    """One phase of a step: a bundle of dense variables, or all tables."""

    def apply(self, update: Update) -> None:
        """Collective. Sum the gradients over all ranks and apply `update`, between the barriers of the step."""
        ...

    def reduce(self) -> None:
        """Collective. Sum the gradients over all ranks and change nothing else, between the barriers of the step."""
        ...


class Selection:
    """The variables of a step, as the ranks compare them.

    Args:
        variables: All variables of the plan.
        numbers: The numbers of those that have a gradient, increasing.
        is_summed: Whether the gradients are sums over all ranks already.

    Attributes:
        checksum: Of the numbers and of `is_summed`.
        names: Names of the selected variables by number.
        is_summed: As given.
    """

    def __init__(self, variables: Sequence[MirroredVariable], numbers: Sequence[int], *, is_summed: bool) -> None:
        self.checksum = zlib.crc32(np.asarray((is_summed, *numbers), np.int64).tobytes())
        self.names = {number: variables[number].name for number in numbers}
        self.is_summed = is_summed


class StepHeader:
    """The ranks' meeting before a step, where each says which step it begins and for which variables.

    Collective. Args:
        arena: Of a plan.
        is_shared: Whether the plan has gradients or state in node memory.
    """

    def __init__(self, arena: ArenaMemory, *, is_shared: bool) -> None:
        self._communicator = communicator = arena.communicator
        self._node = node = communicator.node
        self._arrival = arena.arrival
        self._barrier = arena.barrier if is_shared else None
        self._is_checked = arena.options.check
        self._count = 0
        self._own: memoryview | None = None
        self._others: list[memoryview] = []
        if is_shared:
            try:
                words = arena.reserve(_LINE * node.size, np.dtype(np.int64), shared=True).writable.data
            except OSError:
                # Node memory is full, on every rank: the ranks compare by messages.
                pass
            else:
                lines = [words[_LINE * rank : _LINE * rank + 2] for rank in range(node.size)]
                self._own = lines.pop(node.rank)
                self._others = lines
        self._crosses_nodes = self._own is None or len(communicator.node_sizes) > 1

    def enter(self, selection: Selection) -> None:
        """Collective. Return when every rank of the node has called, and all are about to do the same.

        Raises:
            MismatchError: The ranks do not pass the same variables, or are not at the same step.
            CollectiveTimeoutError: Under `timeout_seconds`, some rank did not come in time.
        """
        self._count = count = self._count + 1
        if self._arrival is not None:
            self._arrival.wait("apply_gradients")
        own = self._own
        if own is not None:
            # A rank writes its line before the barrier and reads the others' after it. The barrier that ends the step
            # keeps a fast rank from writing its next line while a slow one still reads.
            own[0], own[1] = count, selection.checksum
        if self._barrier is not None:
            self._barrier()
        agrees = True
        for other in self._others:
            if other != own:
                agrees = False
        # Every rank must know from `count` alone whether all ranks compare. In other steps only the ranks of a node
        # that sees a difference compare; the job then ends with their error.
        is_compared = self._is_checked or count <= _COMPARED_STEPS or count & (count - 1) == 0
        if self._crosses_nodes and is_compared:
            self._compare(self._communicator, selection)
        elif not agrees:
            self._compare(self._node, selection)

    def _compare(self, communicator: Communicator, selection: Selection) -> None:
        same_on_all(
            communicator, "the step's number and the variables with gradients",
            (self._count, selection.names, *["summed"] * selection.is_summed),
            "Every rank must apply gradients for the same variables, in the same order of calls.",
        )


class Step:
    """The work of one rank in a step over one selection of variables.

    Args:
        selection: Of the variables.
        header: Where the ranks meet first; None where there is one rank.
        phases: In their order.
        barrier: Of the node, where they meet again; None where no memory is shared.
    """

    def __init__(
        self,
        selection: Selection,
        header: StepHeader | None,
        phases: Sequence[Phase],
        barrier: Callable[[], None] | None,
    ) -> None:
        self._selection = selection
        self._header = header
        self._phases = phases
        self._barrier = barrier

    def apply(self, update: Update) -> None:
        """Collective. Sum the gradients over all ranks and apply `update` to the variables and their state.

        Args:
            update: `update(parameter, gradient, slots, scratch)` on flat blocks, in place; may overwrite `gradient`.

        Raises:
            MismatchError: The ranks do not pass the same variables, or are not at the same step.
            CollectiveTimeoutError: Under `timeout_seconds`, some rank did not come in time.
            ValueError: The step has no variables, on every rank.
        """
        if self._header is not None:
            self._header.enter(self._selection)
        for phase in self._phases:
            phase.apply(update)
        if self._barrier is not None:
            self._barrier()

    def reduce(self) -> None:
        """Collective. Sum the gradients over all ranks and change nothing else.

        The sums then stand in the first gradient segment of each node, and in the tables, for a `VariablePass`. This
        is the half of a step for updates that must see all gradients before they change a parameter.

        Raises:
            MismatchError, CollectiveTimeoutError, ValueError: As `apply`.
        """
        if self._header is not None:
            self._header.enter(self._selection)
        for phase in self._phases:
            phase.reduce()
        if self._barrier is not None:
            self._barrier()


class NoGradients:
    """The only phase of a step without variables: an error, once all ranks are known to have none.

    Args:
        variables: All variables of the plan.
        barrier: Of the node; None where no memory is shared.
    """

    def __init__(self, variables: Sequence[MirroredVariable], barrier: Callable[[], None] | None) -> None:
        self._names = [variable.name for variable in variables]
        self._barrier = barrier

    def apply(self, _update: Update) -> None:
        """Collective. See `Phase.apply`."""
        self._refuse()

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        if self._barrier is not None:
            # The error may be caught: without this barrier a rank could write its next header while another reads.
            self._barrier()
        raise mark_shared(ValueError(f"no gradients for any of {self._names}; all are None"))
