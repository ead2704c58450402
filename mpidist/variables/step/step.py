"""One step over one selection of a plan's variables: the ranks meet, go through its phases, and meet again.

A plan makes a `Step` once for each selection and keeps it, so that a step holds exactly the phases it needs and asks
nothing while it runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn, Protocol

from mpidist.comm.calls.schedule import schedule_of
from mpidist.comm.calls.text import AT_ONCE
from mpidist.comm.group.agreement import same_on_all
from mpidist.errors import mark_shared
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.update.kernel import Update


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
        plan: The number of the plan among those of its arena.

    Attributes:
        checksum: The checksum of all this.
        names: Names of the selected variables by number.
        text: The selection in words.
        nbytes: Bytes of the selected variables.
        is_summed, plan: The constructor's argument.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], numbers: Sequence[int], *, is_summed: bool, plan: int = 0
    ) -> None:
        self.names = {number: variables[number].name for number in numbers}
        self.nbytes = sum(variables[number].size * variables[number].dtype.itemsize for number in numbers)
        self.is_summed = is_summed
        self.plan = plan
        self.checksum = zlib.crc32(repr((plan, is_summed, self.names)).encode())
        lacking = [variable.name for number, variable in enumerate(variables) if number not in self.names]
        having = _few(self.names.values())
        self.text = f"gradients for {len(numbers)} of {len(variables)} variables" + (
            f" ({having}) and none for {_few(lacking)}" if lacking else f": {having}"
        )


class Meeting(NamedTuple):
    """The facts that ranks compare before a step.

    Attributes:
        numbers: The numbers of the step: which one it is, the learning rate, factors.
        selection: The variables.
    """

    numbers: tuple[object, ...]
    selection: Selection

    @property
    def nbytes(self) -> int:
        """Local. Bytes of the gradients, where none of them is sparse; for the timeline."""
        return self.selection.nbytes

    @property
    def subject(self) -> str:
        """Local. The name of all this in errors."""
        return "the step's number, its learning rate and factors, the optimizer and the variables with gradients"

    def __str__(self) -> str:
        summed = ", summed" if self.selection.is_summed else ""
        lacks = self.selection.text.count(" and none for ")
        way_out = " (the optimizer's missing_gradients='zero' counts those of some ranks as 0)" if lacks else ""
        return f"{self.numbers}, {self.selection.text}{way_out}{summed}, by optimizer number {self.selection.plan}"


def _few(names: Iterable[str]) -> str:
    """The names, or some of them."""
    first = [repr(name) for name in names]
    more = f" and {len(first) - 8} more" if len(first) > 8 else ""
    return ", ".join(first[:8]) + more if first else "none"


class StepHeader:
    """Collective. The ranks' meeting before a step, where they compare what they are about to do.

    Args:
        arena: The arena of a plan.
        is_shared: Whether the plan has gradients or state in node memory.
    """

    def __init__(self, arena: ArenaMemory, *, is_shared: bool) -> None:
        self._communicator = communicator = arena.communicator
        self._order, self._owner = communicator.order, arena.strategy_number
        self._arrival = arena.arrival
        self._barrier = arena.barrier if is_shared else None
        # Where no barrier synchronizes all ranks, they compare the first steps before anything is sent.
        meets = communicator.size == 1 or (is_shared and len(communicator.node_sizes) == 1)
        check = arena.options.check
        self._compared = 0 if meets and not check else schedule_of(check=check).first
        self._count = 0

    def meet(self, selection: Selection, numbers: tuple[object, ...]) -> None:
        """Collective. Return when every rank of the node has called, and all are about to do the same.

        Raises:
            MismatchError: The ranks do not pass the same variables or numbers, or are not at the same step.
            CollectiveTimeoutError: Under `timeout_seconds`, some rank did not come in time.
            InterruptedCallError: An earlier call was left in the middle.
        """
        if self._arrival is not None:
            self._arrival.wait("apply_gradients")
        order, barrier, meeting = self._order, self._barrier, Meeting(numbers, selection)
        order.sign_step(
            "apply_gradients", meeting, self._owner, sign=hash((selection.checksum, numbers)),
            meets=barrier is not None,
        )
        if barrier is not None:
            # From here on the others continue without this rank, if an exception takes it away.
            order.is_under_way = AT_ONCE
            barrier()
        if self._compared or order.is_across:
            self._compare(meeting)
        order.is_under_way = True

    def _compare(self, meeting: Meeting) -> None:
        self._count += 1
        if self._count <= self._compared:
            self._order.meet_across()
            same_on_all(
                self._communicator, meeting.subject, (self._count, str(meeting)),
                "Every rank must apply gradients for the same variables, in the same order of calls.",
            )
        self._order.compare_across()


class Step:
    """The work of one rank in a step over one selection of variables, within `CallOrder.during`.

    Args:
        selection: The selection of the variables.
        header: The meeting of the ranks before the step.
        phases: The phases in their order.
        barrier: The barrier of the node at the end of the step; None where no memory is shared.
    """

    def __init__(
        self,
        selection: Selection,
        header: StepHeader,
        phases: Sequence[Phase],
        barrier: Callable[[], None] | None,
    ) -> None:
        self._selection = selection
        self._header = header
        self._phases = phases
        self._barrier = barrier

    def apply(self, update: Update, numbers: tuple[object, ...] = ()) -> None:
        """Collective. Sum the gradients over all ranks and apply `update` to the variables and their state.

        Args:
            update: A function `update(parameter, gradient, slots, scratch)` of flat blocks, in place; it may overwrite
                `gradient`.
            numbers: The numbers on which the update depends, which must be the same on all ranks.

        Raises:
            MismatchError: The ranks do not pass the same variables or numbers, or are not at the same step.
            CollectiveTimeoutError: Under `timeout_seconds`, some rank did not come in time.
            InterruptedCallError: An earlier call was left in the middle.
            ValueError: The step has no variables, on every rank.
        """
        self._header.meet(self._selection, numbers)
        for phase in self._phases:
            phase.apply(update)
        if self._barrier is not None:
            self._barrier()

    def reduce(self, numbers: tuple[object, ...] = ()) -> None:
        """Collective. Sum the gradients over all ranks and change nothing else.

        The sums are then in the first gradient segment of each node, and in the tables, for a `VariablePass`. This
        is the half of a step for updates that must see all gradients before they change a parameter.

        Args:
            numbers: See `apply`.

        Raises:
            MismatchError, CollectiveTimeoutError, InterruptedCallError, ValueError: See `apply`.
        """
        self._header.meet(self._selection, numbers)
        for phase in self._phases:
            phase.reduce()
        if self._barrier is not None:
            self._barrier()


class NoGradients:
    """The only phase of a step without variables: an error, once all ranks are known to have none.

    Args:
        variables: All variables of the plan.
        barrier: The barrier of the node; None where no memory is shared.
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
