"""The front of every collective: checks, conversions, shapes and the call log around one backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.agreement import require_same
from mpidist.comm.arithmetic.combine import add_halves, combined_dtype, half_dtype
from mpidist.comm.arithmetic.slices import even_sizes, in_bytes, slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.collective import (
    check_axis,
    check_gatherable,
    check_in_place,
    check_parts,
    check_reducible,
    check_root,
)
from mpidist.comm.communicator import Communicator
from mpidist.comm.front.call_log import HINT, CallLog
from mpidist.comm.resource import Resource, end_all
from mpidist.options import CommunicationOptions, ReduceOp

# Up to this size copying the array and reducing the copy in place is faster than reducing into a new array: MPI has one
# argument less to examine.
_COPIED_BYTES = 1 << 14
# Looking up a member of an enumeration takes 70 ns, a name of the module 10 ns.
_MEAN = ReduceOp.MEAN


class CollectiveFront(Resource):
    """The library's `Collective`: a backend behind checks, conversions and the call log. It closes the backend.

    Args:
        backend: Gets contiguous one-dimensional arrays of native dtypes, after all checks.
        options: `check` compares the ranks' calls each time, `timeout_seconds` limits the wait for late ranks, and
            `wire_dtype` halves the bytes that are sent.

    Attributes:
        communicator: The ranks.
        backend: As given.
        log: The calls so far.
    """

    def __init__(self, backend: Backend, options: CommunicationOptions) -> None:
        self.communicator: Communicator = backend.communicator
        self.backend = backend
        self.log = CallLog(backend.communicator, options)
        # Bound once: looking up attributes takes most of the time of a small call.
        self._enter = self.log.enter
        self._backend_all_reduce = backend.all_reduce
        self._wire_dtype = None if options.wire_dtype is None else half_dtype(options.wire_dtype)

    def _is_whole(self) -> bool:
        return self.communicator.is_whole() and not self.log.is_broken()

    def _end(self, *, is_collective: bool) -> None:
        self.log.refuse_calls()
        end_all([self.backend], is_collective=is_collective)

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        """Collective. See `Collective.all_reduce`."""
        if type(array) is not np.ndarray:
            lent = self.lend(array)
            result = self._all_reduce_any(lent, op, in_place)
            return array if in_place else arrays.give_back(result, array)
        dtype = array.dtype
        # The common case first, without further calls: a small sum must take little longer than the backend itself.
        # "fdlqiILQ" are float32 and 64 and the integers of 32 and 64 bits, which every backend combines as they are.
        if (
            dtype.char in "fdlqiILQ" and op is not _MEAN and self._wire_dtype is None
            and array.flags.c_contiguous and dtype.isnative and array.size
        ):
            self._enter("all_reduce", op, array)
            if in_place:
                check_in_place(array, op)
                result = array
            elif array.nbytes <= _COPIED_BYTES:
                result = array.copy()
            else:
                result = np.empty(array.shape, dtype)
                self._backend_all_reduce(array.reshape(-1), result.reshape(-1), op)
                return result
            total = result if result.ndim == 1 else result.reshape(-1)
            self._backend_all_reduce(total, total, op)
            return result
        return self._all_reduce_any(array, op, in_place)

    def _all_reduce_any(self, array: AnyArray, op: ReduceOp, in_place: bool) -> AnyArray:
        self._enter("all_reduce", op, array)
        check_reducible(array, op)
        if in_place:
            check_in_place(array, op)
        xp = arrays.namespace(array)
        dtype = self.dtype_combined(array.dtype, op)
        converts = dtype != array.dtype
        is_copy = converts or not array.flags.c_contiguous
        source = (xp.ascontiguousarray(array, dtype) if is_copy else array).reshape(-1)
        # A converted or contiguous copy is our own, so it may take the result.
        total = source if is_copy or in_place else xp.empty_like(source)
        if array.size:
            if self._wire_dtype is not None and op in (ReduceOp.SUM, ReduceOp.MEAN) and array.dtype.kind == "f":
                self._all_reduce_in_wire_dtype(source, total, self._wire_dtype)
            else:
                self._backend_all_reduce(source, total, op)
        result: AnyArray = self._divided(total, op).reshape(array.shape)
        if op is ReduceOp.MEAN and array.dtype.kind in "iu":
            return result
        if in_place:
            if is_copy:
                array[...] = result.astype(array.dtype)
            return array
        return result.astype(array.dtype) if converts else result

    # A value too large for the wire dtype becomes an infinity in silence. A warning would come on one rank only.
    @np.errstate(over="ignore", invalid="ignore")
    def _all_reduce_in_wire_dtype(self, source: AnyArray, total: AnyArray, wire_dtype: np.dtype[Any]) -> None:
        """Send in the wire dtype: each rank gets its slice of all arrays, adds them in float32, and sends the sum."""
        xp, size, rank = arrays.namespace(source), self.communicator.size, self.communicator.rank
        counts = even_sizes(source.size, size)
        byte_counts = in_bytes(counts, wire_dtype.itemsize)
        got = xp.empty(counts[rank] * size, wire_dtype)
        self.backend.all_to_all(
            as_bytes(source.astype(wire_dtype)), byte_counts, as_bytes(got), [byte_counts[rank]] * size
        )
        mine = add_halves(got.reshape(size, counts[rank]))
        gathered = xp.empty(source.size, wire_dtype)
        self.backend.all_gather(as_bytes(mine.astype(wire_dtype)), as_bytes(gathered), byte_counts)
        # This rank, too, takes its own slice rounded to the wire dtype: all ranks get the same bits.
        total[...] = gathered

    def reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> AnyArray | None:
        """Collective. See `Collective.reduce`."""
        array, like = self.lend(array), array
        self._enter(f"reduce {op.name} to rank", root, array)
        check_root(root, self.communicator.size)
        check_reducible(array, op)
        xp = arrays.namespace(array)
        source = xp.ascontiguousarray(array, self.dtype_combined(array.dtype, op)).reshape(-1)
        is_root = self.communicator.rank == root
        total = xp.empty_like(source) if is_root else source
        if array.size:
            self.backend.reduce(source, total, op, root)
        if not is_root:
            return None
        return cast(AnyArray, arrays.give_back(self.finished(total.reshape(array.shape), op, array.dtype), like))

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. See `Collective.broadcast`."""
        array, like = self.lend(array), array
        self._enter("broadcast from rank", root, array)
        check_root(root, self.communicator.size)
        xp = arrays.namespace(array)
        is_root = self.communicator.rank == root
        dtype = array.dtype.newbyteorder("=")
        result = xp.ascontiguousarray(array, dtype).reshape(array.shape) if is_root else xp.empty(array.shape, dtype)
        if array.size:
            self.backend.broadcast(result.reshape(-1), root)
        return like if is_root else cast(AnyArray, arrays.give_back(result, like))

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        """Collective. See `Collective.all_gather`."""
        array, like = self.lend(array), array
        self.log.note("all_gather", axis, array)
        calls = self.communicator.all_gather_object(("all_gather", array.shape, array.dtype.name, axis))
        require_same([call[0] for call in calls], "the collective call", HINT)
        axis = check_gatherable([call[1:] for call in calls])
        xp = arrays.namespace(array)
        dtype = array.dtype.newbyteorder("=")
        mine = xp.ascontiguousarray(xp.moveaxis(array, axis, 0), dtype)
        lengths = [call[1][axis] for call in calls]
        gathered = xp.empty((sum(lengths), *mine.shape[1:]), dtype)
        if gathered.size:
            row_bytes = gathered.nbytes // gathered.shape[0]
            self.backend.all_gather(as_bytes(mine), as_bytes(gathered), in_bytes(lengths, row_bytes))
        return cast(AnyArray, arrays.give_back(xp.moveaxis(gathered, 0, axis), like))

    def reduce_scatter(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM) -> AnyArray:
        """Collective. See `Collective.reduce_scatter`."""
        array, like = self.lend(array), array
        self._enter("reduce_scatter", op, array)
        check_axis(array.shape, 0)
        check_reducible(array, op)
        xp = arrays.namespace(array)
        source = xp.ascontiguousarray(array, self.dtype_combined(array.dtype, op)).reshape(-1)
        rows = even_sizes(array.shape[0], self.communicator.size)
        row_size = array.size // array.shape[0] if array.shape[0] else 0
        mine = xp.empty(rows[self.communicator.rank] * row_size, source.dtype)
        if array.size:
            self.backend.reduce_scatter(source, mine, [count * row_size for count in rows], op)
        mine = mine.reshape((rows[self.communicator.rank], *array.shape[1:]))
        return cast(AnyArray, arrays.give_back(self.finished(mine, op, array.dtype), like))

    def all_to_all(self, parts: Sequence[AnyArray]) -> list[AnyArray]:
        """Collective. See `Collective.all_to_all`."""
        like, parts = parts, [self.lend(part) for part in parts]
        size = self.communicator.size
        described = (
            (len(parts), parts[0].dtype.name, parts[0].shape[1:], tuple(part.shape[:1] for part in parts))
            if parts else (0, "", (), ())
        )
        self.log.note("all_to_all", None, parts[0] if parts else np.empty(0))
        calls = self.communicator.all_gather_object(("all_to_all", *described))
        require_same([call[0] for call in calls], "the collective call", HINT)
        require_same(
            [call[1:4] for call in calls], "all_to_all: number of parts, dtype and shape apart from the first size",
            "Only first sizes may differ.",
        )
        check_parts(parts, size)
        xp = arrays.namespace(parts[0])
        dtype = parts[0].dtype.newbyteorder("=")
        sent = xp.concatenate([xp.asarray(part, dtype) for part in parts])
        lengths = [call[4][self.communicator.rank][0] for call in calls]
        got = xp.empty((sum(lengths), *sent.shape[1:]), dtype)
        row_bytes = dtype.itemsize * int(np.prod(sent.shape[1:], dtype=np.int64))
        self.backend.all_to_all(
            as_bytes(sent), [len(part) * row_bytes for part in parts], as_bytes(got), in_bytes(lengths, row_bytes)
        )
        return [arrays.give_back(got[piece], like[0]) for piece in slices_of(lengths)]

    def allocate(self, shape: Sequence[int], dtype: Any = np.float32) -> AnyArray:
        """Collective. Allocate zeros on each rank, placed where the backend combines arrays with the fewest copies.

        Where ranks share memory, reducing such an array in place (the whole array, or the same slice of it on all
        ranks) is faster than reducing other arrays. In everything else it is an array like any other.

        Args:
            shape: The same on every rank.
            dtype: The same on every rank.

        Returns:
            This rank's array.

        Raises:
            OSError: There is no room; on every rank.
        """
        shape, dtype = tuple(shape), np.dtype(dtype)
        allocated = self.backend.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return np.zeros(shape, dtype) if allocated is None else allocated.view(dtype).reshape(shape)

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        self.log.wait("barrier")
        self.communicator.barrier()

    def dtype_combined(self, dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
        """Local. The dtype in which the backend combines arrays of the dtype `dtype`."""
        return combined_dtype(dtype, op, combines_halves=self.backend.combines_halves)

    def _divided(self, total: Any, op: ReduceOp) -> Any:
        if op is not _MEAN or self.backend.divides_means:
            return total
        return arrays.namespace(total).divide(total, self.communicator.size, out=total)

    def finished(self, total: AnyArray, op: ReduceOp, dtype: np.dtype[Any]) -> AnyArray:
        """Local. The result for the caller from a backend's: divided under MEAN, and converted back to `dtype`."""
        total = self._divided(total, op)
        keeps = total.dtype == dtype or (op is ReduceOp.MEAN and dtype.kind in "iu")
        return total if keeps else total.astype(dtype)

    def lend(self, array: Any) -> AnyArray:
        """Local. A NumPy or CuPy view of an array of any library.

        Raises:
            TypeError: `array` is not an array, or lies in memory that the backend does not reach.
        """
        lent = array if type(array) is np.ndarray else arrays.lend(array)
        if arrays.is_cupy(lent) and not self.backend.takes_device_arrays:
            raise TypeError(
                f"{self!r} combines arrays in host memory, got one in GPU memory: choose the implementation AUTO, "
                "STAGED or NCCL, or pass a copy in host memory: array.get()"
            )
        return lent

    def __repr__(self) -> str:
        return f"CollectiveFront({self.backend!r})"
