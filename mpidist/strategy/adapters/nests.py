"""Nests of arrays of any library, reduced or sent over the replicas: results are in the library of each leaf."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from mpidist import arrays, tree
from mpidist.arguments import described
from mpidist.arrays import AnyArray
from mpidist.comm.collective import check_axis, check_in_place, check_reducible, require_axis
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.packing import all_reduce_list
from mpidist.comm.front.sparse import check_slices
from mpidist.comm.group.agreement import exchange, require_same
from mpidist.comm.memory.shared_buffers import address_of
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp
from mpidist.strategy.values import as_array

_NUMBERS = (bool, int, float, complex)
_HINT = "Every rank must pass the same structure of arrays, of the same shapes and dtypes, under the same name."


def all_reduce(
    collective: CollectiveFront, op: ReduceOp, nest: Any, *, in_place: bool, name: str, bytes_per_pack: int
) -> Any:
    """Collective. See `AdapterMethods.all_reduce`.

    Args:
        collective: The collective of the replicas.
        op: The operation.
        nest: This rank's component.
        in_place: Whether results are written into the leaves.
        name: The name of the call.
        bytes_per_pack: See `packing.all_reduce_list`.
    """
    if in_place and type(nest) is np.ndarray and _is_simple(nest, op):
        if not name:
            return collective.all_reduce(nest, op, in_place=True)
        with collective.log.begin("all_reduce of", (f"name {name!r}",), None, meets=False).surround():
            return collective.all_reduce(nest, op, in_place=True)
    leaves, spec = tree.flatten(nest)
    try:
        given = [_lent(collective, leaf, op) for leaf in leaves]
        targets = _targets(leaves, given, op) if in_place else given
    except (TypeError, ValueError, OverflowError) as error:
        collective.log.refuse("all_reduce", error)
    keys = tuple(filter(None, (name and f"name {name!r}", _structure(spec))))
    if len(leaves) == 1 and keys:
        with collective.log.begin("all_reduce of", keys, None, meets=False).surround():
            reduced = all_reduce_list(collective, targets, op, in_place=in_place)
    else:
        reduced = all_reduce_list(
            collective, targets, op, in_place=in_place, bytes_per_pack=bytes_per_pack, keys=keys
        )
    if in_place:
        _finish_in_place(leaves, given, reduced)
        return nest
    return tree.unflatten(spec, [_like(leaf, one) for leaf, one in zip(leaves, reduced, strict=True)])


def broadcast(collective: CollectiveFront, nest: Any) -> Any:
    """Collective. See `AdapterMethods.broadcast`.

    Args:
        collective: The collective of the replicas.
        nest: This rank's component; of other ranks than the first one only structure, shapes and dtypes count.
    """
    leaves, spec = tree.flatten(nest)
    given: list[AnyArray] = []
    error: Exception | None = None
    try:
        given = [_sendable(collective, leaf) for leaf in leaves]
    except (TypeError, ValueError, OverflowError) as caught:
        error = caught
    facts = _structure(spec), tuple([(one.shape, one.dtype.name) for one in given])
    require_same(
        exchange(collective.communicator, "broadcast", facts, error), "broadcast: structure, shapes and dtypes", _HINT
    )
    sent = [collective.broadcast(array) for array in given]
    return tree.unflatten(spec, [_like(leaf, one) for leaf, one in zip(leaves, sent, strict=True)])


def all_gather(collective: CollectiveFront, nest: Any, axis: int) -> Any:
    """Collective. See `AdapterMethods.all_gather`.

    Args:
        collective: The collective of the replicas.
        nest: This rank's component.
        axis: The dimension along which to concatenate.
    """
    leaves, spec, given = _agreed_leaves(collective, "all_gather", nest, lambda array: _check_axis(array, axis))
    made = [collective.all_gather(array, axis) for array in given]
    return tree.unflatten(spec, [_like(leaf, one) for leaf, one in zip(leaves, made, strict=True)])


def reduce_scatter(collective: CollectiveFront, op: ReduceOp, nest: Any, axis: int) -> Any:
    """Collective. See `AdapterMethods.reduce_scatter`.

    Args:
        collective: The collective of the replicas.
        op: The operation.
        nest: This rank's component.
        axis: The dimension that is cut.
    """
    def check(array: AnyArray) -> None:
        _check_axis(array, axis)
        check_reducible(array, op)

    leaves, spec, given = _agreed_leaves(collective, "reduce_scatter", nest, check)
    made = []
    for array in given:
        xp = arrays.namespace(array)
        first = xp.ascontiguousarray(xp.moveaxis(array, axis, 0))
        made.append(xp.ascontiguousarray(xp.moveaxis(collective.reduce_scatter(first, op), 0, axis)))
    return tree.unflatten(spec, [_like(leaf, one) for leaf, one in zip(leaves, made, strict=True)])


def _agreed_leaves(
    collective: CollectiveFront, name: str, nest: Any, check: Callable[[AnyArray], object]
) -> tuple[list[Any], Any, list[AnyArray]]:
    """Collective. The leaves, the structure and the leaves as arrays; all ranks agree on the structure."""
    leaves, spec = tree.flatten(nest)
    given: list[AnyArray] = []
    error: Exception | None = None
    try:
        given = [_array_of(collective, leaf) for leaf in leaves]
        for array in given:
            check(array)
    except (TypeError, ValueError, OverflowError) as caught:
        error = caught
    require_same(exchange(collective.communicator, name, _structure(spec), error), f"{name}: the structure", _HINT)
    return leaves, spec, given


def _check_axis(array: AnyArray, axis: int) -> None:
    require_axis(axis)
    check_axis(array.shape, axis)


def _is_simple(array: AnyArray, op: ReduceOp) -> bool:
    """Whether an array can be reduced in place as it is, without a further look."""
    kind, flags = array.dtype.kind, array.flags
    return flags.c_contiguous and flags.writeable and (kind == "f" or (kind in "iu" and op is not ReduceOp.MEAN))


@functools.lru_cache(256)
def _structure(spec: Any) -> str:
    """A structure as text, the same on all ranks; empty for a single leaf."""
    return "" if spec.is_leaf() else "/".join([str(spec.num_leaves), *tree.keys(spec), *_shape_of(spec)])


def _shape_of(spec: Any) -> list[str]:
    """The kinds of containers, from the top down; `str` of a spec may have addresses of the program's objects."""
    if spec.is_leaf():
        return ["*"]
    inside = [text for child in spec.children() for text in _shape_of(child)]
    return [getattr(spec.type, "__name__", str(spec.type)), "(", *inside, ")"]


def _lent(collective: CollectiveFront, leaf: Any, op: ReduceOp) -> Any:
    """A leaf as an array that the collective takes: a view, except of numbers and variables."""
    if isinstance(leaf, IndexedSlices):
        check_slices(leaf, op)
        return leaf
    array = _array_of(collective, leaf)
    check_reducible(array, op)
    return array


def _array_of(collective: CollectiveFront, leaf: Any) -> AnyArray:
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        # All digits of Python's numbers count.
        array = np.asarray(leaf)
        if array.dtype.kind not in "bifc":
            raise ValueError(
                f"expected a Python int of -2**63 to 2**63 - 1, got one of {int(leaf.real).bit_length()} bits"
            )
        return array
    if isinstance(leaf, (np.ndarray, np.generic)) or not hasattr(type(leaf), "__dlpack__"):
        return as_array(leaf)
    if getattr(leaf, "requires_grad", False):
        # A tensor of PyTorch that records gradients, a parameter for instance: its numbers count.
        leaf = leaf.detach()
    if type(leaf).__module__.partition(".")[0] == "torch" and leaf.device.type == "cpu" and leaf.dtype.itemsize != 2:
        # The same memory as by DLPack, in a tenth of the time; but not of bfloat16.
        return cast(AnyArray, leaf.numpy())
    wait = getattr(leaf, "block_until_ready", None)
    if wait is not None:
        # An array of JAX may be computed by a program that makes calls itself.
        wait()
    return collective.lend(leaf)


def _targets(leaves: Sequence[Any], given: Sequence[Any], op: ReduceOp) -> list[AnyArray]:
    """The arrays that are reduced in place of these: themselves, or contiguous copies."""
    targets: list[AnyArray] = []
    places: list[tuple[int, int]] = []
    for leaf, array in zip(leaves, given, strict=True):
        if type(leaf) is not np.ndarray and _is_no_array(leaf):
            raise TypeError(f"in_place=True writes into arrays, got {described(leaf)}. Leave it out for such values")
        if not getattr(array.flags, "writeable", True):
            raise TypeError(
                f"in_place=True needs arrays that can be written, got a {type(leaf).__module__}."
                f"{type(leaf).__qualname__} of shape {array.shape}, which is read-only, as arrays of JAX are. Leave "
                "it out, and use the result"
            )
        target = array if array.flags.c_contiguous else array.copy(order="C")
        check_in_place(target, op)
        targets.append(target)
        if type(array) is np.ndarray and array.nbytes:
            begin = address_of(array)
            whole = target is array
            places.append((begin, begin + array.nbytes) if whole else np.lib.array_utils.byte_bounds(array))
    places.sort()
    for (_, end), (begin, _) in itertools.pairwise(places):
        if begin < end:
            raise ValueError(
                "in_place=True was given two arrays that share memory, whose values would be combined twice. Pass each "
                "array once"
            )
    return targets


def _is_no_array(leaf: Any) -> bool:
    return isinstance(leaf, (*_NUMBERS, np.generic, IndexedSlices)) or not hasattr(type(leaf), "__dlpack__")


def _finish_in_place(leaves: Sequence[Any], given: Sequence[Any], reduced: Sequence[Any]) -> None:
    tensors = []
    for leaf, array, one in zip(leaves, given, reduced, strict=True):
        if one is not array and not array.flags.c_contiguous:
            array[...] = one
        if type(leaf) is np.ndarray:
            continue
        # The framework may use another stream.
        arrays.wait_for_device(array)
        if hasattr(leaf, "_version"):
            tensors.append(leaf)
    if tensors:
        # PyTorch's graphs notice then that what they have saved has changed.
        sys.modules["torch"].autograd.graph.increment_version(tensors)


def _sendable(collective: CollectiveFront, leaf: Any) -> AnyArray:
    if isinstance(leaf, IndexedSlices):
        raise TypeError("broadcast does not support IndexedSlices. Make them dense with `to_dense()`")
    array = _array_of(collective, leaf)
    # The first rank's result is a new array, too.
    return array.copy() if collective.communicator.rank == 0 else array


def _like(leaf: Any, result: Any) -> Any:
    """A result in the library of a leaf; a Python number where one was given."""
    if type(leaf) in _NUMBERS:
        return result.item()
    if isinstance(result, IndexedSlices):
        return result
    if hasattr(type(leaf), "__dlpack__") and not isinstance(leaf, (np.ndarray, np.generic)):
        return arrays.give_back(result, leaf)
    return result[()]
