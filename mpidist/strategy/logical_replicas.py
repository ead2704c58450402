"""Logical replicas: micro-batches whose gradients are added in a fixed tree, the same on any number of ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from mpidist import context, tree
from mpidist.arrays import AnyArray
from mpidist.comm.agreement import require_same, same_on_all, together
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.slices import even_sizes, slices_of
from mpidist.comm.arithmetic.tree_order import Node, combine_pairs, pairing, subtrees
from mpidist.comm.backends.tree import GATHERED_BYTES, TreeBackend
from mpidist.comm.collective import check_reducible
from mpidist.context import Entry
from mpidist.errors import mark_shared
from mpidist.options import ReduceOp
from mpidist.strategy.cut import Cut
from mpidist.strategy.numerics import Numerics, NumericsRecord, look
from mpidist.strategy.replica import Owner, ReplicaContext
from mpidist.strategy.values import as_array
from mpidist.variables.slab import ALIGNMENT, aligned_zeros

logger = logging.getLogger("mpidist")

# Of a sum at a time: what the ranks exchange of it.
CHUNK_BYTES = 1 << 22
# In so many first calls, then at powers of two, ranks compare results and numerics.
_CHECKED_CALLS = 16
# Shape and dtype of each leaf of a result; None is a leaf that is not there.
Layout = list[tuple[tuple[int, ...], np.dtype[Any]] | None]


class LogicalReplicas:
    """What `Strategy.gradients` does; there is one per strategy.

    Args:
        owner: The strategy.

    Attributes:
        numerics: What the bits depend on besides the program and its input.
    """

    def __init__(self, owner: Owner) -> None:
        self.numerics = NumericsRecord()
        self._owner = owner
        self._calls = 0
        self._controller: ThreadpoolController | None = None
        self._module_count = 0

    def gradients(self, fn: Callable[[Any], Any], batch: Any, logical_replicas: int, blas_threads: int) -> Any:
        """Collective. See `Strategy.gradients`."""
        communicator = self._owner.communicator
        if self._owner.arena.namespace is not np:
            raise mark_shared(NotImplementedError(
                "gradients of logical replicas are computed and added up in host memory, and this strategy's variables "
                "lie on GPUs: compute them in `run`, or use a strategy on CPUs"
            ))
        leaves, spec = tree.flatten(batch)
        arrays, rows = together(communicator, "gradients", lambda: _rows_of(leaves))
        described = [None if one is None else (one.dtype.str, one.shape[1:]) for one in arrays]
        calls = communicator.all_gather_object((rows, (logical_replicas, blas_threads, described)))
        require_same(
            [call[1] for call in calls], "gradients: logical_replicas, blas_threads, dtypes and shapes of the batch",
            "Only the first dimension, of rows, may differ.",
        )
        cut = Cut(tuple(call[0] for call in calls), logical_replicas)
        try:
            _check(cut, logical_replicas, blas_threads)
        except ValueError as error:
            raise mark_shared(error) from None
        self._calls += 1
        is_checked = (
            self._owner.arena.options.check or self._calls <= _CHECKED_CALLS or self._calls & (self._calls - 1) == 0
        )
        controller = self._current_controller()
        if is_checked or self.numerics.present is None or self.numerics.present.blas_threads != blas_threads:
            self._note_numerics(look(controller, blas_threads))
        if not cut.coincides:
            arrays = [None if one is None else self._moved(one, cut) for one in arrays]
        with controller.limit(limits=blas_threads, user_api="blas"):
            results = self._call_all(fn, arrays, spec, cut)
        return self._summed(results, cut, is_checked=is_checked)

    def _moved(self, array: AnyArray, cut: Cut) -> AnyArray:
        """The rows that this rank computes with, from the ranks that have them."""
        communicator = self._owner.communicator
        parts = [array[part] for part in cut.sent(communicator.rank)]
        return np.concatenate(self._owner.arena.collective.all_to_all(parts))

    def _call_all(self, fn: Callable[[Any], Any], arrays: list[AnyArray | None], spec: Any, cut: Cut) -> Results:
        """Call `fn` for each micro-batch of this rank; sums of siblings are made as soon as both are there."""
        rank = self._owner.communicator.rank
        results = Results()
        begin = cut.wanted(rank).start
        refusal = _why_no_collectives(cut)
        for number in range(cut.owned[rank].start, cut.owned[rank].stop):
            rows = cut.micro_batches[number]
            own = slice(rows.start - begin, rows.stop - begin)
            micro_batch = tree.unflatten(spec, [None if one is None else _aligned(one[own]) for one in arrays])
            replica = ReplicaContext(self._owner, number, replica_count=cut.count)
            context.push(Entry(self._owner, replica, self._owner.arena, refusal))
            try:
                result = fn(micro_batch)
            finally:
                context.pop()
            results.add(Node(0, number), result)
        return results

    def _summed(self, results: Results, cut: Cut, *, is_checked: bool) -> Any:
        communicator = self._owner.communicator
        layout, spec = results.layout, results.spec
        if cut.count < communicator.size:
            # Ranks without a micro-batch do not know what `fn` returns; the first rank has one.
            layout, spec = communicator.broadcast_object((layout, spec))
        if is_checked:
            same_on_all(
                communicator, "gradients: shapes and dtypes of what `fn` returns",
                [None if one is None else (one[0], one[1].name) for one in layout],
                "`fn` must return the same structure for every micro-batch, whatever its size.",
            )
        nodes = [subtrees(owned.start, owned.stop) for owned in cut.owned]
        sums: dict[np.dtype[Any], AnyArray] = {}
        for dtype, size in _sizes(layout).items():
            rows = results.rows(dtype)
            sums[dtype] = aligned_zeros(size, dtype)
            length = max(1, (self._owner.arena.options.bytes_per_pack or CHUNK_BYTES) // dtype.itemsize)
            for low in range(0, size, length):
                piece = slice(low, min(low + length, size))
                self._sum_piece([row[piece] for row in rows], nodes, sums[dtype][piece])
        return tree.unflatten(spec, _unpacked(layout, sums))

    def _sum_piece(self, rows: list[AnyArray], nodes: list[list[Node]], total: AnyArray) -> None:
        """Combine the ranks' rows, one for each of their nodes, into `total`."""
        communicator, collective = self._owner.communicator, self._owner.arena.collective
        pairs = pairing([node for own in nodes for node in own])
        if communicator.size == 1:
            total[...] = combine_pairs(rows, pairs, ReduceOp.SUM)
            return
        one_each = all(len(own) == 1 for own in nodes)
        if isinstance(collective.backend, TreeBackend) and one_each and pairs == collective.backend.pairs:
            # As with 8 logical replicas on 2, 4 or 8 ranks: what is left of the tree is that of the ranks.
            total[...] = rows[0]
            collective.all_reduce(total, in_place=True)
            return
        row_count = sum(len(own) for own in nodes)
        if total.nbytes * row_count <= GATHERED_BYTES:
            mine = np.concatenate([np.empty(0, total.dtype), *rows])
            gathered = collective.all_gather(mine).reshape(row_count, total.size)
            total[...] = combine_pairs(list(gathered), pairs, ReduceOp.SUM)
            return
        counts = even_sizes(total.size, communicator.size)
        empty = np.empty(0, total.dtype)
        parts = [np.concatenate([empty, *(row[part] for row in rows)]) for part in slices_of(counts)]
        width = counts[communicator.rank]
        received = [
            row for got, own in zip(collective.all_to_all(parts), nodes, strict=True)
            for row in got.reshape(len(own), width)
        ]
        total[...] = collective.all_gather(combine_pairs(received, pairs, ReduceOp.SUM))

    def _current_controller(self) -> ThreadpoolController:
        # Finding the libraries takes a millisecond, and imports are what brings new ones.
        if self._controller is None or self._module_count != len(sys.modules):
            self._controller = ThreadpoolController()
            self._module_count = len(sys.modules)
        return self._controller

    def _note_numerics(self, own: Numerics) -> None:
        records = self._owner.communicator.all_gather_object(own)
        if not self.numerics.note(records[0]) or self._owner.communicator.rank:
            return
        logger.info("gradients of logical replicas: %s", records[0])
        for rank, record in enumerate(records):
            differences = record.differences(records[0])
            if differences:
                logger.warning(
                    "rank %d computes otherwise than rank 0, so bits depend on which rank computes what: %s. Run on "
                    "processors of one kind, or set OPENBLAS_CORETYPE and NPY_DISABLE_CPU_FEATURES alike",
                    rank, "; ".join(differences),
                )
                return


class Results:
    """What `fn` returned for the micro-batches of a rank, flat, one row per dtype; siblings are added up.

    Attributes:
        layout: Shapes and dtypes of a result's leaves.
        spec: Its structure.
    """

    def __init__(self) -> None:
        self.layout: Layout = []
        self.spec: Any = None
        self._nodes: list[Node] = []
        self._rows: list[dict[np.dtype[Any], AnyArray]] = []

    def add(self, node: Node, result: Any) -> None:
        """Local. Take what `fn` returned for a leaf of the tree."""
        leaves, spec = tree.flatten(result)
        arrays = [None if leaf is None else as_array(leaf) for leaf in leaves]
        layout: Layout = [None if one is None else (one.shape, one.dtype.newbyteorder("=")) for one in arrays]
        for array in arrays:
            if array is not None:
                check_reducible(array, ReduceOp.SUM)
        if self._nodes and (layout, spec) != (self.layout, self.spec):
            raise ValueError(
                "gradients: `fn` must return the same structure, shapes and dtypes for every micro-batch, got "
                f"{_described(self.layout)} and then {_described(layout)}; sum over the rows of a micro-batch"
            )
        self.layout, self.spec = layout, spec
        row = {
            dtype: np.concatenate([
                one.reshape(-1).astype(dtype, copy=False) for one in arrays
                if one is not None and _added_in(one.dtype) == dtype
            ])
            for dtype in _sizes(layout)
        }
        self._nodes.append(node)
        self._rows.append(row)
        while len(self._nodes) > 1 and _are_siblings(self._nodes[-2], self._nodes[-1]):
            right, last = self._nodes.pop(), self._rows.pop()
            for dtype, values in self._rows[-1].items():
                combine_pairs([values, last[dtype]], [(0, 1)], ReduceOp.SUM)
            self._nodes[-1] = Node(right.level + 1, right.number // 2)

    def rows(self, dtype: np.dtype[Any]) -> list[AnyArray]:
        """Local. One row for each of this rank's `subtrees`."""
        return [row[dtype] for row in self._rows]


def _rows_of(leaves: list[Any]) -> tuple[list[AnyArray | None], int]:
    """The leaves as arrays, and how many rows each of them has."""
    arrays = [None if leaf is None else as_array(leaf) for leaf in leaves]
    shapes = [array.shape for array in arrays if array is not None]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            f"gradients: `batch` must hold arrays with a common first dimension, that of rows, got shapes {shapes}"
        )
    return arrays, shapes[0][0]


def _check(cut: Cut, logical_replicas: int, blas_threads: int) -> None:
    for name, value in (("logical_replicas", logical_replicas), ("blas_threads", blas_threads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"gradients: `{name}` must be an integer of at least 1, got {value!r}")
    ranks = len(cut.rows)
    if logical_replicas < ranks:
        raise ValueError(
            f"gradients: {logical_replicas} logical replicas on {ranks} ranks leave some without work: give at least "
            f"{ranks} (more than you will ever have ranks, as another number gives other bits), or start fewer ranks: "
            f"mpirun -n {logical_replicas}"
        )
    if not cut.count:
        raise ValueError("gradients: the batches of all ranks are empty; leave such a step out on every rank")


def _why_no_collectives(cut: Cut) -> str | None:
    """None where each rank calls the function exactly once, as `run` does."""
    ranks = len(cut.rows)
    if cut.count == ranks:
        return None
    return (
        f"inside `gradients`: {cut.count} micro-batches are computed by {ranks} ranks, one after another, so replicas "
        "cannot meet in a collective. Return what is to be summed from the function, do the rest after `gradients`, "
        f"or give as many logical replicas as there are ranks ({ranks}) and at least as many rows"
    )


def _are_siblings(left: Node, right: Node) -> bool:
    return left.level == right.level and left.number % 2 == 0 and right.number == left.number + 1


def _added_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Half precision is added up in float32, and rounded once."""
    return np.dtype(np.float32) if is_half(dtype) else dtype.newbyteorder("=")


def _sizes(layout: Layout) -> dict[np.dtype[Any], int]:
    """The dtypes in which leaves are added up, in their order, and how many elements they have."""
    sizes: dict[np.dtype[Any], int] = {}
    for leaf in layout:
        if leaf is not None:
            dtype = _added_in(leaf[1])
            sizes[dtype] = sizes.get(dtype, 0) + int(np.prod(leaf[0], dtype=np.int64))
    return sizes


def _unpacked(layout: Layout, sums: dict[np.dtype[Any], AnyArray]) -> list[Any]:
    places = dict.fromkeys(sums, 0)
    leaves: list[Any] = []
    for leaf in layout:
        if leaf is None:
            leaves.append(None)
            continue
        shape, dtype = leaf
        low = places[_added_in(dtype)]
        places[_added_in(dtype)] = high = low + int(np.prod(shape, dtype=np.int64))
        with np.errstate(over="ignore"):
            leaves.append(sums[_added_in(dtype)][low:high].reshape(shape).astype(dtype, copy=False)[()])
    return leaves


def _aligned(array: AnyArray) -> AnyArray:
    """A copy on an aligned address: what BLAS and vector loops compute may depend on it."""
    dtype = array.dtype
    raw: AnyArray = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    copy: AnyArray = raw[begin : begin + array.nbytes].view(dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _described(layout: Layout) -> str:
    return ", ".join("None" if leaf is None else f"{leaf[1]}{list(leaf[0])}" for leaf in layout) or "nothing"
