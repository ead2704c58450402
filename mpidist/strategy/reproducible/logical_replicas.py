"""Logical replicas: micro-batches whose gradients are added up in a fixed tree, on any number of ranks alike.

A sum of floating-point numbers depends on the order of the additions. Here the order depends only on the number of
logical replicas, so that the sum has the same bits on any number of ranks.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import context, tree
from mpidist.arguments import whole
from mpidist.arrays import AnyArray
from mpidist.comm.calls.schedule import schedule_of
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.agreement import require_same, same_on_all, together
from mpidist.context import Entry
from mpidist.errors import mark_shared
from mpidist.strategy.replica import Owner, ReplicaContext
from mpidist.strategy.values import as_array
from mpidist.variables.memory.slab import ALIGNMENT, aligned_zeros

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

    from mpidist.comm.arithmetic.tree_order import TreeNode, subtrees
    from mpidist.strategy.reproducible.micro_batch_sums import MicroBatchResults, flat_sizes, unpack
    from mpidist.strategy.reproducible.micro_batches import MicroBatches
    from mpidist.strategy.reproducible.numerics import Numerics, NumericsRecord, look
    from mpidist.strategy.reproducible.sums_of_ranks import sum_rows
else:
    # Every strategy has logical replicas, and few programs compute with them.
    ThreadpoolController = at_first_use("threadpoolctl", "ThreadpoolController")
    TreeNode = at_first_use("mpidist.comm.arithmetic.tree_order", "TreeNode")
    subtrees = at_first_use("mpidist.comm.arithmetic.tree_order", "subtrees")
    MicroBatchResults = at_first_use("mpidist.strategy.reproducible.micro_batch_sums", "MicroBatchResults")
    flat_sizes = at_first_use("mpidist.strategy.reproducible.micro_batch_sums", "flat_sizes")
    unpack = at_first_use("mpidist.strategy.reproducible.micro_batch_sums", "unpack")
    MicroBatches = at_first_use("mpidist.strategy.reproducible.micro_batches", "MicroBatches")
    NumericsRecord = at_first_use("mpidist.strategy.reproducible.numerics", "NumericsRecord")
    look = at_first_use("mpidist.strategy.reproducible.numerics", "look")
    sum_rows = at_first_use("mpidist.strategy.reproducible.sums_of_ranks", "sum_rows")

logger = logging.getLogger("mpidist")

# The ranks exchange a sum in chunks of this size.
CHUNK_BYTES = 1 << 22


class LogicalReplicas:
    """The implementation of `Strategy.gradients`; there is one object per strategy.

    Args:
        owner: The strategy.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._calls = 0
        self._controller: ThreadpoolController | None = None
        self._module_count = 0

    @functools.cached_property
    def numerics(self) -> NumericsRecord:
        """Local. The record of everything on which the bits depend besides the program and its input."""
        return NumericsRecord()

    def gradients(self, fn: Callable[[Any], Any], batch: Any, logical_replicas: int, blas_threads: int) -> Any:
        """Collective. See `Strategy.gradients`."""
        communicator = self._owner.communicator
        if self._owner.namespace is not np:
            raise mark_shared(NotImplementedError(
                "gradients of logical replicas are computed and added up in host memory, but this strategy's variables "
                "are on GPUs: compute them in `run`, or use a strategy on CPUs"
            ))
        leaves, spec = tree.flatten(batch)
        with self._owner.replicas.calls.during("gradients"):
            arrays, rows, logical_replicas, blas_threads = together(
                communicator, "gradients", lambda: (*_rows_of(leaves), *_whole_counts(logical_replicas, blas_threads))
            )
            described = [None if one is None else (one.dtype.str, one.shape[1:]) for one in arrays]
            calls = communicator.all_gather_object((rows, (logical_replicas, blas_threads, described)))
        require_same(
            [call[1] for call in calls], "gradients: logical_replicas, blas_threads, dtypes and shapes of the batch",
            "Only the number of rows, the first dimension, may differ.",
        )
        cut = MicroBatches(tuple(call[0] for call in calls), logical_replicas)
        try:
            _check(cut, logical_replicas)
        except ValueError as error:
            raise mark_shared(error) from None
        self._calls += 1
        # Whether the ranks compare the layouts of their results, and their numerics.
        is_checked = schedule_of(check=self._owner.replicas.options.check).has(self._calls)
        controller = self._current_controller()
        if is_checked or self.numerics.present is None or self.numerics.present.blas_threads != blas_threads:
            self._note_numerics(look(controller, blas_threads))
        if not cut.coincides:
            arrays = [None if one is None else self._moved(one, cut) for one in arrays]
        with controller.limit(limits=blas_threads, user_api="blas"):
            results = self._call_all(fn, arrays, spec, cut)
        return self._summed(results, cut, is_checked=is_checked)

    def _moved(self, array: AnyArray, cut: MicroBatches) -> AnyArray:
        """Collective. The rows that this rank computes with, sent by the ranks that have them."""
        communicator = self._owner.communicator
        sent = [array[rows] for rows in cut.sent(communicator.rank)]
        return np.concatenate(self._owner.replicas.collective.all_to_all(sent))

    def _call_all(
        self, fn: Callable[[Any], Any], arrays: list[AnyArray | None], spec: Any, cut: MicroBatches
    ) -> MicroBatchResults:
        """Call `fn` for each micro-batch of this rank."""
        rank = self._owner.communicator.rank
        results = MicroBatchResults()
        begin = cut.wanted(rank).start
        refusal = _why_no_collectives(cut)
        for number in range(cut.owned[rank].start, cut.owned[rank].stop):
            rows = cut.micro_batches[number]
            own = slice(rows.start - begin, rows.stop - begin)
            micro_batch = tree.unflatten(spec, [None if one is None else _aligned(one[own]) for one in arrays])
            replica = ReplicaContext(self._owner, number, replica_count=cut.count)
            context.push(Entry(self._owner, replica, self._owner.home, refusal))
            try:
                result = fn(micro_batch)
            finally:
                context.pop()
            results.add(TreeNode(0, number), result)
        return results

    def _summed(self, results: MicroBatchResults, cut: MicroBatches, *, is_checked: bool) -> Any:
        """Collective. The sum of the results of all ranks."""
        communicator = self._owner.communicator
        layout, spec = results.layout, results.spec
        if cut.count < communicator.size:
            # A rank without a micro-batch does not know the layout of a result. Rank 0 always has a micro-batch.
            layout, spec = communicator.broadcast_object((layout, spec))
        if is_checked:
            same_on_all(
                communicator, "gradients: shapes and dtypes of what `fn` returns",
                [None if one is None else (one[0], one[1].name) for one in layout],
                "`fn` must return the same structure for every micro-batch, whatever its size.",
            )
        nodes = [subtrees(owned.start, owned.stop) for owned in cut.owned]
        sums: dict[np.dtype[Any], AnyArray] = {}
        for dtype, size in flat_sizes(layout).items():
            rows = results.rows(dtype)
            sums[dtype] = aligned_zeros(size, dtype)
            length = max(1, (self._owner.replicas.options.bytes_per_pack or CHUNK_BYTES) // dtype.itemsize)
            for low in range(0, size, length):
                piece = slice(low, min(low + length, size))
                sum_rows(self._owner.replicas.collective, [row[piece] for row in rows], nodes, sums[dtype][piece])
        return tree.unflatten(spec, unpack(layout, sums))

    def _current_controller(self) -> ThreadpoolController:
        # To find the BLAS libraries of the process takes a millisecond. Only an import can add one.
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
                    "rank %d computes with other numerics than rank 0, so the bits of gradients depend on the number "
                    "of ranks: %s. Run on processors of one kind, or set OPENBLAS_CORETYPE and "
                    "NPY_DISABLE_CPU_FEATURES to the same values on all ranks", rank, "; ".join(differences),
                )
                return


def _rows_of(leaves: list[Any]) -> tuple[list[AnyArray | None], int]:
    """The leaves as arrays, and the number of rows that each of them has."""
    arrays = [None if leaf is None else as_array(leaf) for leaf in leaves]
    shapes = [array.shape for array in arrays if array is not None]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            "gradients: `batch` must hold arrays with a common first dimension, the number of rows, got shapes "
            f"{shapes}"
        )
    return arrays, shapes[0][0]


def _whole_counts(logical_replicas: int, blas_threads: int) -> tuple[int, int]:
    return (
        whole("logical_replicas", logical_replicas, least=1, owner="gradients: "),
        whole("blas_threads", blas_threads, least=1, owner="gradients: "),
    )


def _check(cut: MicroBatches, logical_replicas: int) -> None:
    ranks = len(cut.rows)
    if logical_replicas < ranks:
        raise ValueError(
            f"gradients: {logical_replicas} logical replicas on {ranks} ranks leave some ranks without work. Give at "
            f"least {ranks}, or better the largest number of ranks that you will ever use, since another number gives "
            f"other bits. Or start fewer ranks: mpirun -n {logical_replicas}"
        )
    if not cut.count:
        raise ValueError(
            "gradients: expected at least one row, got empty batches on all ranks. Leave such a step out on every rank"
        )


def _why_no_collectives(cut: MicroBatches) -> str | None:
    """The error text for a collective inside `fn`; None where each rank calls `fn` exactly once, as `run` does."""
    ranks = len(cut.rows)
    if cut.count == ranks:
        return None
    return (
        "collectives, optimizer steps and writes to variables cannot be called inside `gradients` here: "
        f"{ranks} ranks compute {cut.count} micro-batches one after another, so not all of these can take part at the "
        "same time. Return the values to sum from the function and do the rest after `gradients`, or give as many "
        f"logical replicas as there are ranks ({ranks}) and at least as many rows"
    )


def _aligned(array: AnyArray) -> AnyArray:
    """A copy at an aligned address: the last bits of results of BLAS and of vector loops may depend on the address."""
    dtype = array.dtype
    raw: AnyArray = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    copy: AnyArray = raw[begin : begin + array.nbytes].view(dtype).reshape(array.shape)
    copy[...] = array
    return copy
