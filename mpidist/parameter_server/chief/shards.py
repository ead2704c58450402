"""Shards of a new variable: their names, and their initial values one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.options import VariableAggregation
from mpidist.parameter_server.heap.new_variables import Drawn
from mpidist.variables.making.creation import initial_array
from mpidist.variables.making.initial import ShardedInitial
from mpidist.variables.making.partitioners import Partitioner, shards_of

_Make = Callable[[], "AnyArray | Drawn"]


class Cell(NamedTuple):
    """A new variable in one place.

    Attributes:
        name: A name for display and errors.
        dtype: The dtype of the variable.
        make: A function that returns its initial value, which may have another dtype, or the way in which its server
            makes it.
    """

    name: str
    dtype: np.dtype[Any]
    make: _Make


def cells_of(
    value: Any, dtype: npt.DTypeLike | None, name: str, aggregation: VariableAggregation,
    partitioner: Partitioner | None, *, has_rows: bool, is_on_read: bool = False,
) -> list[Cell]:
    """Local. The parts of a variable, in their order; one where it is not cut.

    Args:
        value: The initial value, see `initial_array`.
        dtype: The dtype of the variable, see `initial_array`.
        name: The name of the variable.
        aggregation: The aggregation of the variable.
        partitioner: The partitioner; None: the variable is not cut.
        has_rows: Whether its gradients are rows.
        is_on_read: Whether reading it aggregates.

    Raises:
        ValueError: The partitioner returns no numbers of shards; see also `initial_array`.
        TypeError: See `initial_array`.
    """
    def array_of(given: Any) -> AnyArray:
        return np.asarray(initial_array(given, dtype, name, aggregation, has_rows=has_rows, is_on_read=is_on_read))

    if isinstance(value, ShardedInitial) and value.is_partitioned and value.shape and not is_on_read:
        kind = named_dtype(dtype)
        makers = _shard_by_shard(value, kind, name, partitioner, array_of)
    else:
        whole, kind = _unconverted(value, array_of)
        if is_on_read and aggregation is VariableAggregation.SUM and kind.kind in "iu":
            # The same rule as in other strategies: there is one sum for all replicas.
            kind = np.dtype(np.uint64 if kind == np.uint64 else np.int64)
        rows = [] if partitioner is None else shards_of(partitioner, whole.shape, kind, name)
        makers = [_given(whole[part]) for part in rows] if len(rows) > 1 else [_given(whole)]
    if len(makers) == 1:
        return [Cell(name, kind, makers[0])]
    return [Cell(f"{name}/part_{number}", kind, make) for number, make in enumerate(makers)]


def _shard_by_shard(
    initial: ShardedInitial, dtype: np.dtype[Any], name: str, partitioner: Partitioner | None,
    array_of: Callable[[Any], AnyArray],
) -> list[_Make]:
    first, *rest = initial.shape
    rows = [slice(0, first)] if partitioner is None else shards_of(partitioner, initial.shape, dtype, name)
    infos = [((one.stop - one.start, *rest), (one.start, *(0 for _ in rest))) for one in rows]
    if initial.placed is not None:
        # Errors of the value are raised here.
        array_of(np.empty((0, *rest), dtype))
        return [_given(Drawn(initial.placed, *info, dtype)) for info in infos]

    def make(shape: tuple[int, ...], offset: tuple[int, ...]) -> AnyArray:
        return _unconverted(initial.shard(shape, offset), array_of)[0]

    return [functools.partial(make, *info) for info in infos]


def _unconverted(value: Any, array_of: Callable[[Any], AnyArray]) -> tuple[AnyArray, np.dtype[Any]]:
    """A value, and the dtype of its variable: a large array is converted by its receiver, without a copy here."""
    given = value() if callable(value) else value
    if type(given) is np.ndarray and given.ndim:
        return given, array_of(given[:0]).dtype
    array = array_of(given)
    return array, array.dtype


def _given(value: AnyArray | Drawn) -> _Make:
    return lambda: value
