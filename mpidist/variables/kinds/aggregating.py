"""The aggregating variable: a mirrored variable with the rules of tf.distribute's central storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context
from mpidist.arrays import AnyArray
from mpidist.errors import mark_shared
from mpidist.options import VariableAggregation
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.device_copies import DeviceCopies
from mpidist.variables.variable import Read


class AggregatingVariable(MirroredVariable):
    """A variable of `CentralStorageStrategy`: there is one on each node, and replicas aggregate what they write.

    Args:
        arguments: The arguments of `MirroredVariable`.
        copies: This rank's copies, where it computes on a GPU and the variable is in host memory; else None.
        keywords: The keyword arguments of `MirroredVariable`.
    """

    def __init__(self, *arguments: Any, copies: DeviceCopies | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._copies = copies

    def value(self) -> AnyArray:
        """Local. See `MirroredVariable.value`.

        Inside `run`, on a rank that computes on a GPU, it is a CuPy array, which is valid until the next write or step
        and must not be changed.
        """
        if self._copies is None or not context.in_replica():
            return super().value()
        return self._copies.value(self.address, self.shape)

    def numpy(self) -> AnyArray:
        """Local. A copy of the value in host memory. In another thread it waits for the end of a step or a write."""
        if self._copies is None:
            return super().numpy()
        with self.arena.guard:
            return np.array(super().value())

    def read_rows(self, rows: AnyArray) -> AnyArray:
        """Local. See `Scatter.read_rows`; only these rows are copied to a GPU."""
        if self._copies is None:
            return super().read_rows(rows)
        with self.arena.guard:
            found: AnyArray = super().value()[arrays.to_host(rows)]
        return arrays.move(found, arrays.gpu_namespace()) if context.in_replica() else found

    def coerce(self, value: npt.ArrayLike) -> AnyArray:
        """Local. See `BaseVariable.coerce`; an array on a GPU is copied to where the variable is."""
        given = arrays.as_array(value)
        return super().coerce(given if self._copies is None else arrays.to_host(given))

    @property
    def is_loaded_beside_others(self) -> bool:
        """Local. See `LoadedInBlocks.is_loaded_beside_others`."""
        return self._copies is None

    def load(self, read: Read) -> None:
        """Collective. See `MirroredVariable.load`."""
        if self._copies is None:
            super().load(read)
            return
        with self._copies.renewed():
            super().load(read)

    def _change(
        self, name: str, array: AnyArray, change: Callable[[AnyArray, AnyArray], object],
        prepare: Callable[[AnyArray], AnyArray] | None = None,
    ) -> None:
        if self.aggregation is VariableAggregation.NONE and context.in_replica():
            raise mark_shared(ValueError(
                "You must specify an aggregation method to update a AggregatingVariable in Replica Context: variable "
                f"{self.name!r} is written inside `run`, and was made with aggregation NONE. Make it with "
                "aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA', or write it outside `run`"
            ))
        super()._change(name, array, change, prepare)
