"""Values of replicas, and the arithmetic of their reductions."""

from __future__ import annotations

import pickle
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from mpidist import arrays, tree
from mpidist.arguments import described
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.exact import is_checked, parts_along
from mpidist.comm.collective import check_reducible
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.sparse import check_slices, reduce_slices
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp
from mpidist.variables.coercion import default_array
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from mpidist.variables.variable import BaseVariable

if TYPE_CHECKING:
    from mpidist.comm.front.packing import all_reduce_list
else:
    all_reduce_list = at_first_use("mpidist.comm.front.packing", "all_reduce_list")

T = TypeVar("T")


class DistributedValues(ABC):  # noqa: B024  (for isinstance and annotations only: a plain array is a component)
    """The type, for `isinstance` and annotations, of values that `run` takes and returns.

    A plain array is this rank's component.
    """


DistributedValues.register(np.ndarray)
DistributedValues.register(np.generic)  # type: ignore[type-abstract]  # register takes abstract classes, too
DistributedValues.register(BaseVariable)  # type: ignore[type-abstract]


@dataclass(frozen=True)
class ValueContext:
    """The number of a replica, for `experimental_distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: This replica's number.
        num_replicas_in_sync: Number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"mpidist.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f" total replicas in sync: {self.num_replicas_in_sync})"
        )


def as_array(leaf: Any) -> AnyArray:
    """Local. A component as an array. Python floats become float32 and ints int64, arrays are returned unchanged.

    Raises:
        TypeError: `leaf` does not hold numbers.
        ValueError: It is a Python int that int64 does not hold.
    """
    if isinstance(leaf, SyncOnReadVariable):
        return leaf.component
    if isinstance(leaf, BaseVariable):
        leaf = leaf.value()
    # A matrix or another subclass of NumPy's arrays counts as its numbers only, without its own arithmetic.
    array = arrays.as_array(leaf) if isinstance(leaf, np.ndarray) else default_array(leaf)
    if isinstance(leaf, int) and array.dtype.kind in "uO":
        raise ValueError(
            f"expected a Python int of -2**63 to 2**63 - 1, got one of {leaf.bit_length()} bits. Pass an array of "
            "another dtype, np.uint64(value) or float(value) for instance"
        )
    if array.dtype.hasobject or array.dtype.kind in "SU":
        raise TypeError(f"expected arrays or numbers, got {described(leaf)}")
    # Variables have int32 of small ones. Here the dtype must not depend on the value: ranks have different ones, whose
    # sum may need more bits.
    return array.astype(np.int64) if array.dtype == np.int32 and not hasattr(leaf, "dtype") else array


_LOCAL: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.sum,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
    ReduceOp.PROD: np.prod,
}


# Looked up once: a small sum takes 2 us.
_NUMBERS = (np.floating, np.integer)


def reduce_leaf(collective: CollectiveFront, op: ReduceOp, leaf: Any, axis: int | Sequence[int] | None) -> Any:
    """Collective. Combine an array or a number over all replicas; see `Strategy.reduce`.

    Args:
        collective: The collective of the replicas.
        op: The operation.
        leaf: This rank's component.
        axis: Dimensions that are reduced within the component first, or None.

    Returns:
        An array, or a NumPy scalar if no dimension is left.
    """
    if type(leaf) is np.ndarray and leaf.dtype.kind in "fi":
        array = leaf
    elif isinstance(leaf, _NUMBERS):
        array = np.asarray(leaf)
    else:
        (array,) = _components(collective, op, [leaf], axis)
        if isinstance(array, IndexedSlices):
            return reduce_slices(collective, op, array)
    if axis is None:
        return collective.all_reduce(array, op)[()]
    _components(collective, op, [array], axis)
    axes = _axes(array, axis)
    # The rest may have the same shape on ranks that reduce along other dimensions.
    with collective.log.begin("reduce along axes", axes, None, meets=False).surround():
        if op is ReduceOp.MEAN:
            return _mean(collective, array, axes)
        if is_checked(array.dtype, op) and not collective.backend.wraps_integers:
            return collective.all_reduce_parts(parts_along(array, op, axes), array.dtype.newbyteorder("="), op)[()]
        total = collective.all_reduce(arrays.as_array(_reduce_locally(array, op, axes)), op)
    with np.errstate(over="ignore"):
        return (total.astype(array.dtype) if is_half(array.dtype) else total)[()]


def reduce_nest(
    collective: CollectiveFront, op: ReduceOp, value: Any, axis: int | Sequence[int] | None, bytes_per_pack: int = 0
) -> Any:
    """Collective. Combine a nest of arrays and numbers over all replicas; see `Strategy.reduce`.

    Args:
        collective: The collective of the replicas.
        op: The operation.
        value: This rank's component.
        axis: Dimensions that are reduced within the components first. With None, small arrays are packed.
        bytes_per_pack: See `packing.all_reduce_nest`.

    Returns:
        The same structure.
    """
    # Most often the value is one array or NumPy scalar.
    if isinstance(value, (np.ndarray, np.generic)):
        return reduce_leaf(collective, op, value, axis)
    leaves, spec = tree.flatten(value)
    # All of them before the first one is moved: a call that is left in the middle ends all others.
    components = _components(collective, op, leaves, axis)
    if axis is not None or len(leaves) == 1:
        with signed(collective, spec):
            return tree.unflatten(spec, [reduce_leaf(collective, op, one, axis) for one in components])
    reduced = all_reduce_list(collective, components, op, bytes_per_pack=bytes_per_pack, keys=tree.keys(spec))
    return tree.unflatten(spec, [one if isinstance(one, IndexedSlices) else one[()] for one in reduced])


def _components(
    collective: CollectiveFront, op: ReduceOp, leaves: Sequence[Any], axis: int | Sequence[int] | None
) -> list[Any]:
    """The leaves as arrays that can be combined so. If one is refused, the others get the error in their reduction."""
    try:
        return [_component(op, leaf, axis) for leaf in leaves]
    except (TypeError, ValueError) as error:
        collective.log.refuse("all_reduce" if axis is None else "reduce along axes", error)


def _component(op: ReduceOp, leaf: Any, axis: int | Sequence[int] | None) -> Any:
    if isinstance(leaf, IndexedSlices):
        if axis is not None:
            raise ValueError(
                f"IndexedSlices are reduced with axis=None, got axis={axis!r}: reduce their `to_dense()` instead"
            )
        check_slices(leaf, op)
        return leaf
    array = as_array(leaf)
    check_reducible(array, op)
    if axis is not None:
        _axes(array, axis)
    return array


def _mean(collective: CollectiveFront, array: AnyArray, axes: tuple[int, ...]) -> Any:
    dtype = np.dtype(np.float64) if array.dtype.kind in "iu" else array.dtype
    # The sum may be too large for half precision where the mean is not.
    wide = wide_dtype(dtype)
    count = int(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    total = collective.all_reduce(arrays.as_array(array.sum(axes, dtype=wide)))
    elements = int(collective.all_reduce(np.array(count)))
    with np.errstate(invalid="ignore", divide="ignore"):
        return arrays.as_array(np.true_divide(total, elements, dtype=wide)).astype(dtype, copy=False)[()]


def gather_nest(collective: CollectiveFront, value: Any, axis: int, method: str) -> Any:
    """Collective. Concatenate a nest of arrays over all replicas; see `Strategy.gather`.

    Args:
        collective: The collective of the replicas.
        value: This rank's component.
        axis: The dimension along which to concatenate.
        method: The name of the caller's method, for errors.

    Returns:
        The same structure.
    """
    leaves, spec = tree.flatten(value)
    given = together(collective.communicator, method, lambda: [_gatherable(leaf, method) for leaf in leaves])
    with signed(collective, spec):
        return tree.unflatten(spec, [collective.all_gather(array, axis) for array in given])


def signed(collective: CollectiveFront, spec: Any) -> AbstractContextManager[object]:
    """Local. Inside, leaves are combined in their order; keys are compared, since others would be combined by position.

    Args:
        collective: The collective of the calls.
        spec: The spec of the structure, as `tree.flatten` gives it.
    """
    keys = tree.keys(spec)
    return collective.log.begin("values of the keys", keys, None, meets=False).surround() if keys else nullcontext()


def gather_object(communicator: Communicator, value: T) -> list[T]:
    """Collective. The values of all ranks, in the order of the ranks. Pickling errors are raised on every rank."""
    mine = together(communicator, "pickling this rank's object", lambda: pickle.dumps(value))
    everyone = communicator.all_gather_object(mine)
    return together(communicator, "unpickling the ranks' objects", lambda: [pickle.loads(one) for one in everyone])


def _gatherable(leaf: Any, method: str) -> AnyArray:
    if isinstance(leaf, IndexedSlices):
        raise NotImplementedError(
            f"{method} does not support IndexedSlices: use all_reduce or reduce, which put the rows of all replicas "
            "together"
        )
    return as_array(leaf)


def _reduce_locally(array: AnyArray, op: ReduceOp, axes: tuple[int, ...]) -> Any:
    # A replica without data, of a batch smaller than the number of replicas, gives the identity of the operation.
    if op is ReduceOp.SUM or op is ReduceOp.PROD:
        # Half precision stays in float32 until all replicas are combined: a sum of ones in bfloat16 ends at 256.
        return _LOCAL[op](array, axis=axes, dtype=wide_dtype(array.dtype))
    if array.size:
        # In native order, as the identity below: what is left of an array may keep its own.
        return arrays.as_array(_LOCAL[op](array, axis=axes)).astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind in "fV":
        identity: Any = np.inf if op is ReduceOp.MIN else -np.inf
    elif array.dtype.kind == "b":
        identity = op is ReduceOp.MIN
    else:
        limits = np.iinfo(array.dtype)
        identity = limits.max if op is ReduceOp.MIN else limits.min
    left = [n for axis, n in enumerate(array.shape) if axis not in axes]
    return np.full_like(array, identity, dtype=array.dtype.newbyteorder("="), shape=left)


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Local. The dtype in which elements are added up: float32 for half precision, else their own in native order.

    Args:
        dtype: The dtype of the elements.
    """
    return np.dtype(np.float32) if is_half(dtype) else dtype.newbyteorder("=")


def _axes(array: AnyArray, axis: int | Sequence[int]) -> tuple[int, ...]:
    # An iterator can be read only once, and axes are asked for several times.
    is_one = isinstance(axis, (int, np.integer, Iterator)) or not isinstance(axis, Iterable)
    axes = (cast(int, axis),) if is_one else tuple(cast("Sequence[int]", axis))
    for one in axes:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)):
            raise TypeError(f"`axis` must be None, an int or a sequence of ints, got {axis!r}")
        if not -array.ndim <= one < array.ndim:
            wanted = f"{-array.ndim} to {array.ndim - 1}" if array.ndim else "None"
            raise ValueError(
                f"`axis` is out of range: expected {wanted} for a component of shape {array.shape}, got {axis!r}"
            )
    if len({one % array.ndim for one in axes}) < len(axes):
        raise ValueError(f"`axis` names a dimension twice, of a component of shape {array.shape}: {axis!r}")
    return tuple(int(one) % array.ndim for one in axes)
