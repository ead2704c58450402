"""Shards of a new variable: their names, and their initial values one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.options import VariableAggregation
from mpidist.variables.making.creation import initial_array
from mpidist.variables.making.initial import ShardedInitial
from mpidist.variables.making.partitioners import Partitioner, shards_of


class Cell(NamedTuple):
    """A variable in one place that is to be made.

    Attributes:
        name: For people.
        make: Gives its initial value.
    """

    name: str
    make: Callable[[], AnyArray]


def cells_of(
    value: Any, dtype: npt.DTypeLike | None, name: str, aggregation: VariableAggregation,
    partitioner: Partitioner | None, *, has_rows: bool, is_on_read: bool = False,
) -> list[Cell]:
    """Local. The parts of a variable, in their order; one where it is not cut.

    Args:
        value: The initial value, as of `initial_array`.
        dtype: Likewise.
        name: The name of the variable.
        aggregation: The aggregation of the variable.
        partitioner: None leaves it whole.
        has_rows: Whether its gradients are rows.
        is_on_read: Whether reading it aggregates.

    Raises:
        ValueError: The partitioner gives no numbers of shards; or as `initial_array`.
        TypeError: As `initial_array`.
    """
    def array_of(given: Any) -> AnyArray:
        return np.asarray(initial_array(given, dtype, name, aggregation, has_rows=has_rows, is_on_read=is_on_read))

    if partitioner is not None and isinstance(value, ShardedInitial) and value.is_partitioned:
        initial: ShardedInitial = value
        rows = shards_of(partitioner, initial.shape, named_dtype(dtype), name)
        shapes = [(one.stop - one.start, *initial.shape[1:]) if initial.shape else () for one in rows]
        offsets = [(one.start, *(0 for _ in initial.shape[1:])) if initial.shape else () for one in rows]

        def one_by_one(shape: tuple[int, ...], offset: tuple[int, ...]) -> Callable[[], AnyArray]:
            return lambda: array_of(lambda: initial.shard(shape, offset))

        makers = list(map(one_by_one, shapes, offsets))
    else:
        whole = array_of(value)
        if is_on_read and aggregation is VariableAggregation.SUM and whole.dtype.kind in "iu":
            # As other strategies read it: there is one sum for all replicas.
            whole = whole.astype(np.uint64 if whole.dtype == np.uint64 else np.int64, copy=False)
        if partitioner is None:
            return [Cell(name, lambda: whole)]
        rows = shards_of(partitioner, whole.shape, whole.dtype, name)

        def cut(part: slice) -> Callable[[], AnyArray]:
            return lambda: whole[part]

        makers = list(map(cut, rows)) if len(rows) > 1 else [lambda: whole]
    if len(makers) == 1:
        return [Cell(name, makers[0])]
    return [Cell(f"{name}/part_{number}", make) for number, make in enumerate(makers)]
