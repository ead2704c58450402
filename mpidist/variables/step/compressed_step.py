"""A step of one part whose gradients are compressed: they are summed variable by variable, small ones as they are.

Where an optimizer skips a step because some sum is not finite, what was sent of the other variables is lost with it.
What steps leave out is part of the training's state, for a checkpoint to hold (`CompressionErrors`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.agreement import together
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.compression.compression import ERROR, Compression, CompressionState
from mpidist.errors import CheckpointError
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.step.bundle import Bundle, Update
from mpidist.variables.step.bundle_step import BundleStep, update_all
from mpidist.variables.sync_on_read import SyncOnReadVariable
from mpidist.variables.variable import Variable

logger = logging.getLogger("mpidist")


class CompressedStep(BundleStep):
    """What one rank does in a step for one private part and one selection of its variables.

    Args:
        part: Of a plan.
        gradients: This rank's, by the numbers of the variables, increasing; in their shapes.
        compression: Sums gradients that are worth it.
        memories: What was left out earlier, by number; kept up to date.
    """

    def __init__(
        self,
        part: Bundle,
        gradients: Mapping[int, AnyArray],
        compression: Compression,
        memories: dict[int, CompressionState],
    ) -> None:
        super().__init__(part, list(gradients))
        self._compression = compression
        self._compressed = [
            (gradient, memories.setdefault(number, {})) for number, gradient in gradients.items()
            if compression.compresses(gradient.shape, gradient.dtype)
        ]
        exact = [n for n, g in gradients.items() if not compression.compresses(g.shape, g.dtype)]
        self._exact = BundleStep(part, exact) if exact else None

    def apply(self, update: Update) -> None:
        """Collective. Reduce the gradients and apply `update`."""
        self.reduce()
        for _, blocks in self._chunks:
            update_all(blocks, update)

    def reduce(self) -> None:
        """Collective. Put the sums into this rank's gradients."""
        if self._exact is not None:
            self._exact.reduce()
        for gradient, memory in self._compressed:
            self._compression.all_reduce(self._arena.collective, gradient, memory)


class CompressionErrors:
    """What the steps of a plan have left out of compressed gradients, as a checkpoint holds it.

    The errors of n ranks are saved one by one. On as many ranks each gets its own back, and training goes on bit for
    bit. On m ranks, rank r takes the sum of those of the ranks r, r + m, ...: gradients are summed, so it is the sum of
    the errors that is still to be applied, and this is kept. Where a program makes means of the sums, by dividing its
    gradients by the number of ranks, what they left out is divided already, and the sum is right as it is.

    A variable may be compressed no more: on one rank, by other options. Then its error is added to its next gradient.

    Args:
        variables: Of the plan; their places there number them.
        memories: Of its compressed steps, by the numbers of the variables; read, and replaced by `load`.
    """

    def __init__(self, variables: Sequence[MirroredVariable], memories: dict[int, CompressionState]) -> None:
        self._variables = variables
        self._arena = variables[0].arena
        self._memories = memories
        # Errors of variables whose gradients are not compressed here.
        self._owed: dict[int, AnyArray] = {}

    def state(self) -> dict[str, dict[int, Variable | AnyArray]]:
        """Local. By name and number: errors as variables with a component on each rank, all else as arrays."""
        tree: dict[str, dict[int, Variable | AnyArray]] = {}
        for number, memory in [*self._memories.items(), *((n, {ERROR: error}) for n, error in self._owed.items())]:
            for name, array in memory.items():
                is_error = name == ERROR
                tree.setdefault(name, {})[number] = _Error(self._variables[number], array) if is_error else array
        return tree

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Collective. Replace what was left out by what `state` once gave, on any number of ranks.

        Args:
            saved: As `state` gave it, numbers as strings, of arrays of a checkpoint; errors have the ranks as their
                first dimension.

        Raises:
            CheckpointError: An error of another shape, or of no variable.
        """
        group = self._arena.communicator
        loaded = together(group, "reading what compressed gradients had left out", lambda: self._read(saved))
        for memory in self._memories.values():
            # Emptied and not replaced: steps hold them.
            memory.clear()
        self._owed.clear()
        for number, memory in loaded.items():
            if self._is_compressed(number):
                self._memories.setdefault(number, {}).update(memory)
            elif ERROR in memory:
                self._owed[number] = memory[ERROR]
        savers = max((int(array.shape[0]) for array in saved.get(ERROR, {}).values()), default=group.size)
        if group.rank == 0 and (savers != group.size or self._owed):
            logger.warning(
                "%d ranks saved what each had left out of compressed gradients, %d restore: of n errors, rank r of m "
                "takes the sum of those of ranks r, r + m, ...; %d of %d are not compressed now and added to the next "
                "gradient", savers, group.size, len(self._owed), len(saved[ERROR]),
            )

    def pay(self, numbers: Iterable[int], gradients: Sequence[AnyArray]) -> None:
        """Local. Add the errors of variables that are not compressed to their gradients, which are then summed.

        Args:
            numbers: Of the variables of this step.
            gradients: This rank's, of all variables of the plan.
        """
        for number in self._owed.keys() & set(numbers) if self._owed else ():
            gradient = gradients[number]
            error = arrays.move(self._owed.pop(number), arrays.namespace(gradient))
            with np.errstate(over="ignore", invalid="ignore"):
                gradient[...] = (gradient + error).astype(gradient.dtype)

    def _is_compressed(self, number: int) -> bool:
        variable = self._variables[number]
        compression = cast("Compression | None", self._arena.options.compression)
        # One rank has nothing to send.
        return (
            compression is not None and self._arena.communicator.size > 1
            and compression.compresses(variable.shape, variable.dtype)
        )

    def _read(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[int, CompressionState]:
        memories: dict[int, CompressionState] = {}
        for name, entries in saved.items():
            for key, array in entries.items():
                memory = memories.setdefault(int(key), {})
                memory[name] = self._error(int(key), array) if name == ERROR else array.numpy()
        return memories

    def _error(self, number: int, array: Any) -> AnyArray:
        """The sum of the saved errors that fall to this rank; only these are read."""
        variable = self._variables[number] if number < len(self._variables) else None
        if variable is None or variable.sparse_gradient or tuple(array.shape[1:]) != variable.shape:
            expected = "no such variable" if variable is None else f"shape {variable.shape} and a dense gradient"
            raise CheckpointError(
                f"what was left out of the gradient of variable {number} of an optimizer needs {expected}, got shape "
                f"{tuple(array.shape[1:])} on each of {array.shape[0]} ranks. Build the optimizer on the variables "
                "that it was saved with"
            )
        total = np.zeros(variable.size, np.float32 if is_half(variable.dtype) else variable.dtype)
        group = self._arena.communicator
        for rank in range(group.rank, array.shape[0], group.size):
            total += array.read(rank * total.size, (rank + 1) * total.size)
        return total.reshape(variable.shape)


class _Error(SyncOnReadVariable):
    """What each rank has left out of one gradient, for a checkpoint: a component on each rank.

    Local. Args:
        variable: Whose gradient it is.
        error: This rank's.
    """

    def __init__(self, variable: MirroredVariable, error: AnyArray) -> None:
        # Not the parent's, which is collective: shape and dtype are those of the variable on every rank.
        self.arena = variable.arena
        self.name = f"{variable.name}/{ERROR}"
        self.shape, self.dtype, self.trainable = error.shape, error.dtype, False
        self.synchronization, self.aggregation = VariableSynchronization.ON_READ, VariableAggregation.NONE
        self._component = error
