"""Compressed gradients: how a bundle's gradients are summed one by one, and the errors that a checkpoint holds.

The error of a gradient is what steps have left out of it so far. It is part of the training's state. Where an
optimizer skips a step because some sum is not finite, the parts of other gradients that were sent in it are lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.compression.compression import ERROR, Compression, CompressionState
from mpidist.comm.group.agreement import together
from mpidist.errors import CheckpointError
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from mpidist.variables.step.bundle import Bundle
from mpidist.variables.step.bundle_step import open_bundle_step
from mpidist.variables.update.options import COMPRESSION
from mpidist.variables.variable import BaseVariable

logger = logging.getLogger("mpidist")


class CompressedReduction:
    """Sums the gradients of some variables of a private bundle, small ones as they are.

    Args:
        bundle: The bundle of a plan.
        gradients: This rank's gradients by the numbers of the variables, increasing; in their shapes.
        compression: The compression, which sums gradients that are large enough.
        states: The errors of earlier steps, by number; kept up to date.
    """

    def __init__(
        self,
        bundle: Bundle,
        gradients: Mapping[int, AnyArray],
        compression: Compression,
        states: dict[int, CompressionState],
    ) -> None:
        self._collective = bundle.arena.collective
        self._compression = compression
        chosen = {n: g for n, g in gradients.items() if compression.compresses(g.shape, g.dtype)}
        self._compressed = [(gradient, states.setdefault(number, {})) for number, gradient in chosen.items()]
        exact = [number for number in gradients if number not in chosen]
        self._exact = open_bundle_step(bundle, exact) if exact else None

    def __call__(self) -> None:
        """Collective. Put the sums into this rank's gradients."""
        if self._exact is not None:
            self._exact.reduce()
        for gradient, state in self._compressed:
            self._compression.all_reduce(self._collective, gradient, state)


class CompressionErrors:
    """The errors of compressed gradients: what steps have left out and later steps still have to apply.

    The errors of n ranks are saved one by one. On as many ranks each rank gets its own back, and training continues bit
    for bit. On m ranks, rank r takes the sum of those of the ranks r, r + m, ...: gradients are summed, therefore the
    sum of the errors is what is still to be applied, and this sum is kept. A program that makes means, by dividing its
    gradients by the number of ranks, has divided the errors, too.

    A variable may no longer be compressed, on one rank or under other options. Then its error is added to its next
    gradient (`pay`).

    Args:
        variables: The variables of the plan, in the order of their numbers.
        states: The states of the compressed gradients, by number; read by `state`, and changed by `load`.

    Attributes:
        owed: Errors of variables whose gradients are not compressed here, by number.
    """

    def __init__(self, variables: Sequence[MirroredVariable], states: dict[int, CompressionState]) -> None:
        self._variables = variables
        self._arena = variables[0].arena
        self._states = states
        self.owed: dict[int, AnyArray] = {}

    def state(self) -> dict[str, dict[int, BaseVariable | AnyArray]]:
        """Local. By name and number: errors as variables with a component on each rank, all else as arrays.

        Names begin with `COMPRESSION`.
        """
        tree: dict[str, dict[int, BaseVariable | AnyArray]] = {}
        states = dict(self._states)
        for number, error in self.owed.items():
            states[number] = {ERROR: error}
        for number, state in states.items():
            for name, array in state.items():
                is_error = name == ERROR
                value = _Error(self._variables[number], array) if is_error else array
                tree.setdefault(COMPRESSION + name, {})[number] = value
        return tree

    def load(self, saved: Mapping[str, Any]) -> None:
        """Collective. Replace the errors by those that `state` once gave, on any number of ranks.

        Args:
            saved: A tree with the entries that `state` returned, with numbers as strings and arrays of a checkpoint; it
                may have others. The first dimension of an error is that of the ranks.

        Raises:
            CheckpointError: An error has another shape, or belongs to no variable.
        """
        saved = {name.removeprefix(COMPRESSION): saved[name] for name in saved if name.startswith(COMPRESSION)}
        group = self._arena.communicator
        loaded = together(group, "reading the errors of compressed gradients", lambda: self._read(saved))
        for state in self._states.values():
            # Emptied and not replaced, because planned steps hold them.
            state.clear()
        self.owed.clear()
        for number, state in loaded.items():
            if self._is_compressed(number):
                self._states.setdefault(number, {}).update(state)
            elif ERROR in state:
                self.owed[number] = state[ERROR]
        savers = max((int(array.shape[0]) for array in saved.get(ERROR, {}).values()), default=group.size)
        if group.rank == 0 and (savers != group.size or self.owed):
            logger.warning(
                "%d ranks saved their errors of compressed gradients, %d restore: of n errors, rank r of m "
                "takes the sum of those of ranks r, r + m, ...; %d of %d are not compressed now and added to the next "
                "gradient", savers, group.size, len(self.owed), len(saved[ERROR]),
            )

    def pay(self, numbers: Iterable[int], gradients: Sequence[AnyArray]) -> None:
        """Local. Add errors that are owed to gradients that are about to be summed.

        Args:
            numbers: The numbers of the variables of this step.
            gradients: This rank's gradients of all variables of the plan.
        """
        for number in self.owed.keys() & set(numbers):
            gradient = gradients[number]
            error = arrays.move(self.owed.pop(number), arrays.namespace(gradient))
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
        states: dict[int, CompressionState] = {}
        for name, entries in saved.items():
            for key, array in entries.items():
                state = states.setdefault(int(key), {})
                state[name] = self._error(int(key), array) if name == ERROR else array.numpy()
        return states

    def _error(self, number: int, array: Any) -> AnyArray:
        """The sum of the saved errors that fall to this rank; only these are read."""
        variable = self._variables[number] if number < len(self._variables) else None
        if variable is None or variable.sparse_gradient or tuple(array.shape[1:]) != variable.shape:
            own = f"{len(self._variables)} variables" if variable is None else (
                f"a variable {number} of shape {variable.shape}{' with sparse gradients' * variable.sparse_gradient}"
            )
            raise CheckpointError(
                f"the checkpoint has an error of compressed gradients for variable {number}, of shape "
                f"{tuple(array.shape[1:])} on each of {array.shape[0]} ranks; the optimizer has {own}. Build it on the "
                "variables that it was saved with, in the same order"
            )
        total = np.zeros(variable.size, np.float32 if is_half(variable.dtype) else variable.dtype)
        group = self._arena.communicator
        for rank in range(group.rank, array.shape[0], group.size):
            total += array.read(rank * total.size, (rank + 1) * total.size)
        return total.reshape(variable.shape)


class _Error(SyncOnReadVariable):
    """Local. The error of one gradient, for a checkpoint: a component on each rank.

    Args:
        variable: The variable of the gradient.
        error: The error on this rank.
    """

    def __init__(self, variable: MirroredVariable, error: AnyArray) -> None:
        # Not the parent's, which is collective: shape and dtype are those of the variable on every rank.
        self.home = self.arena = variable.arena
        self.name = f"{variable.name}/{ERROR}"
        self.shape, self.dtype, self.trainable = error.shape, error.dtype, False
        self.synchronization, self.aggregation = VariableSynchronization.ON_READ, VariableAggregation.NONE
        self.is_per_replica = True
        self._component = error
