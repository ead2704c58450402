"""Packing: small arrays are reduced together in one call, large ones alone, and neighbors in memory without a copy.

The packs and the order of calls follow from the number, shapes and dtypes of the arrays alone, which all ranks share.
Before neighbors are reduced as one array, the ranks agree on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays, tree
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import slices_of
from mpidist.comm.collective import check_in_place, check_reducible
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.sparse import reduce_slices
from mpidist.comm.memory.shared_buffers import address_of
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp

# The default size of a pack.
PACK_BYTES = 1 << 20
# From this size on, copying an array into a pack and back takes longer than a call of its own.
ALONE_BYTES = 1 << 16


def all_reduce_nest(
    collective: CollectiveFront,
    nest: Any,
    op: ReduceOp = ReduceOp.SUM,
    *,
    in_place: bool = False,
    bytes_per_pack: int = 0,
) -> Any:
    """Collective. Combine a nest of arrays over all ranks, each of them as `Collective.all_reduce` does.

    Every rank gets the same bits. With two ranks, or where sums are exact, they are also the bits of one call for each
    array. Otherwise they may differ from those under MPI and RING, whose order of adding depends on the place of an
    element in the array.

    Args:
        collective: The collective of these ranks.
        nest: The arrays and `IndexedSlices` in lists, tuples and dicts; structure, shapes and dtypes are the same on
            every rank.
        op: The operation.
        in_place: Whether to write results into the arrays, each of which must be C-contiguous. Arrays of one allocation
            that are neighbors in the nest as well as in memory are reduced without any copy. IndexedSlices are not
            changed.
        bytes_per_pack: The size up to which small arrays of one dtype are packed; 0 takes 1 MiB.

    Returns:
        The same structure: the given arrays if `in_place`, otherwise new ones. Small arrays may share one allocation,
        which lives as long as one of them.

    Raises:
        MismatchError: Structures, shapes or dtypes differ between ranks; compared as in `Collective.all_reduce`.
        TypeError, ValueError: See `Collective.all_reduce`. No array has changed then.
    """
    leaves, spec = tree.flatten(nest)
    return tree.unflatten(
        spec,
        all_reduce_list(
            collective, leaves, op, in_place=in_place, bytes_per_pack=bytes_per_pack, keys=tree.keys(spec)
        ),
    )


def all_reduce_list(
    collective: CollectiveFront,
    leaves: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    *,
    in_place: bool = False,
    bytes_per_pack: int = 0,
    keys: tuple[str, ...] = (),
) -> list[Any]:
    """Collective. Combine a list of arrays and IndexedSlices over all ranks; see `all_reduce_nest`.

    Args:
        collective: See `all_reduce_nest`.
        leaves: The arrays and IndexedSlices.
        op: See `all_reduce_nest`.
        in_place: See `all_reduce_nest`.
        bytes_per_pack: See `all_reduce_nest`.
        keys: Further values that must be the same on all ranks, where there are several leaves; see `tree.keys`.
    """
    if len(leaves) == 1 or collective.communicator.size == 1:
        return [_one(collective, leaf, op, in_place=in_place) for leaf in leaves]
    results = list(leaves)
    lent = {n: arrays.lend(leaf) for n, leaf in enumerate(leaves) if not isinstance(leaf, IndexedSlices)}
    for array in {array.dtype: array for array in lent.values()}.values():
        check_reducible(array, op)
    if in_place:
        for array in lent.values():
            check_in_place(array, op)
    # The collective compares packs only, in which different shapes can look alike.
    described = op.name, *keys, *(
        (lent[n].shape, lent[n].dtype.name) if n in lent else type(leaf).__name__ for n, leaf in enumerate(leaves)
    )
    with collective.log.begin("arrays reduced together:", described, None, meets=False):
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, IndexedSlices):
                results[n] = reduce_slices(collective, op, leaf)
        numbers = list(lent)
        given = list(lent.values())
        if in_place:
            _reduce_in_place(collective, _joined(collective, given), op, bytes_per_pack or PACK_BYTES)
            return results
        for pack in _packs(given, bytes_per_pack or PACK_BYTES):
            reduced = _reduce_pack(collective, [given[index] for index in pack], op)
            for index, one in zip(pack, reduced, strict=True):
                number = numbers[index]
                results[number] = arrays.give_back(one, leaves[number])
    return results


def _one(collective: CollectiveFront, leaf: Any, op: ReduceOp, *, in_place: bool) -> Any:
    if isinstance(leaf, IndexedSlices):
        return reduce_slices(collective, op, leaf)
    return collective.all_reduce(leaf, op, in_place=in_place)


def _packs(given: Sequence[AnyArray], limit: int) -> list[list[int]]:
    """The packs as lists of indices, in the order of calls: full packs and large arrays as they come, then the rest."""
    packs: list[list[int]] = []
    open_packs: dict[tuple[np.dtype[Any], int | None], list[int]] = {}
    room: dict[tuple[np.dtype[Any], int | None], int] = {}
    alone = min(ALONE_BYTES, limit)
    for index, array in enumerate(given):
        byte_count, dtype = array.nbytes, array.dtype
        # A pack would return arrays of another byte order in this machine's order.
        if byte_count >= alone or not dtype.isnative:
            packs.append([index])
            continue
        key = (dtype, None if type(array) is np.ndarray else arrays.device_index(array))
        if byte_count > room.get(key, limit):
            packs.append(open_packs.pop(key))
        if key not in open_packs:
            open_packs[key], room[key] = [], limit
        open_packs[key].append(index)
        room[key] -= byte_count
    return packs + list(open_packs.values())


def _reduce_pack(collective: CollectiveFront, pack: list[AnyArray], op: ReduceOp) -> list[AnyArray]:
    if len(pack) == 1:
        return [collective.all_reduce(pack[0], op)]
    packed = arrays.namespace(pack[0]).concatenate([array.reshape(-1) for array in pack])
    is_kept = op is not ReduceOp.MEAN or packed.dtype.kind not in "iu"
    total = collective.all_reduce(packed, op, in_place=is_kept)
    slices = slices_of([array.size for array in pack])
    return [total[one].reshape(array.shape) for one, array in zip(slices, pack, strict=True)]


def _reduce_in_place(collective: CollectiveFront, given: Sequence[AnyArray], op: ReduceOp, limit: int) -> None:
    # All packs use the same memory. New memory, which the system provides page by page, takes longer than the copies.
    memory: AnyArray | None = None
    for pack in _packs(given, limit):
        targets = [given[index] for index in pack]
        if len(pack) == 1:
            collective.all_reduce(targets[0], op, in_place=True)
            continue
        flat = [target.reshape(-1) for target in targets]
        if arrays.is_cupy(flat[0]):
            packed = arrays.namespace(flat[0]).concatenate(flat)
        else:
            memory = np.empty(limit, np.uint8) if memory is None else memory
            packed = memory[: sum(target.nbytes for target in targets)].view(flat[0].dtype)
            np.concatenate(flat, out=packed)
        collective.all_reduce(packed, op, in_place=True)
        for target, one in zip(flat, slices_of([target.size for target in flat]), strict=True):
            target[...] = packed[one]


def _joined(collective: CollectiveFront, given: list[AnyArray]) -> list[AnyArray]:
    """The arrays, with each run of neighbors in memory as one flat array; the same runs on every rank."""
    if sum(array.nbytes for array in given) < ALONE_BYTES:
        # Packing so few bytes takes no longer than agreeing on neighbors.
        return given
    # Memory differs from rank to rank. Two arrays count as neighbors if they are neighbors on every rank.
    owners = [_owner(array) for array in given]
    apart = np.array([
        # Adjacent arrays of two allocations are no neighbors: a view over both would keep only the first one alive.
        first[1] is not second[1] or not _is_next(first[0], second[0])
        for first, second in itertools.pairwise(zip(given, owners, strict=True))
    ], np.uint8)
    apart = collective.all_reduce(apart, ReduceOp.MAX)
    if apart.all():
        return given
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(given)]
    return [_as_one(given[first:end]) for first, end in itertools.pairwise(edges)]


def _owner(array: AnyArray) -> object:
    """The object that owns the memory of an array."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _is_next(first: AnyArray, second: AnyArray) -> bool:
    """Whether an array of the same dtype begins where another one ends."""
    is_alike = type(first) is type(second) is np.ndarray and first.dtype == second.dtype
    return is_alike and address_of(first) + first.nbytes == address_of(second)


def _as_one(run: list[AnyArray]) -> AnyArray:
    if len(run) == 1:
        return run[0]
    size = sum(array.size for array in run)
    return np.lib.stride_tricks.as_strided(run[0], (size,), (run[0].itemsize,))
