"""The collective over MPI on host arrays; loaded by name, since it needs MPI."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from mpidist.comm.agreement import require_same, same_on_all
from mpidist.comm.collective import AnyArray, check_gatherable, check_in_place, check_reducible, check_root
from mpidist.comm.communicator import Communicator
from mpidist.comm.mpi_communicator import MPI
from mpidist.options import CommunicationOptions, ReduceOp

_OPERATIONS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MEAN: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PROD: MPI.PROD,
}
# float32, float64 and the integers of 4 and 8 bytes.
_SENT_AS_THEY_ARE = frozenset("fdiIlLqQ")
# One call of Allreduce on 100 MB takes 1.5 to 4 times as long as the same bytes in chunks of this size (MPICH 5.0.2,
# Open MPI 5.0.11). It also keeps every count far below 2**31 - 1, where Open MPI 5 ends.
CHUNK_BYTES = 1 << 20
# Shapes and dtypes are compared in so many first calls, then at powers of two: whether a check runs may depend only
# on what all ranks share, and the number of calls is that.
CHECKED_CALLS = 16
_HINT = "Give `axis=0` to reduce a batch whose size differs between ranks, and make the same calls on all ranks."


class MpiCollective:
    """MPI_Allreduce, MPI_Bcast and MPI_Allgatherv, in chunks.

    Args:
        communicator: An `MpiCommunicator`.
        options: `bytes_per_pack` is the chunk, `check` compares at every call.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self._mpi: MPI.Intracomm = communicator.mpi
        self._chunk_bytes = options.bytes_per_pack or CHUNK_BYTES
        self._check = options.check
        self._calls = 0

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        """Collective. See `Collective.all_reduce`; half precision is added up in float32."""
        self._enter("all_reduce", op, array)
        if in_place:
            check_in_place(array, op)
        dtype = array.dtype
        is_direct = dtype.char in _SENT_AS_THEY_ARE and dtype.isnative and array.flags.c_contiguous
        # The common case first: a small sum must cost little more than MPI itself.
        if is_direct and op is not ReduceOp.MEAN and array.nbytes <= self._chunk_bytes:
            result = array if in_place else np.empty(array.shape, dtype)
            self._mpi.Allreduce(MPI.IN_PLACE if in_place else array, result, _OPERATIONS[op])
            return result
        check_reducible(array, op)
        return self._all_reduce_converted(array, op, _wire_dtype(dtype, op), in_place)

    def _all_reduce_converted(
        self, array: AnyArray, op: ReduceOp, wire: np.dtype[Any] | None, in_place: bool
    ) -> AnyArray:
        total = array if in_place and wire is None else np.array(array, wire or array.dtype, order="C", copy=True)
        flat = total.reshape(-1)
        chunk = max(1, self._chunk_bytes // flat.itemsize)
        for begin in range(0, flat.size, chunk):
            self._mpi.Allreduce(MPI.IN_PLACE, flat[begin : begin + chunk], _OPERATIONS[op])
        if op is ReduceOp.MEAN:
            np.divide(total, self.communicator.size, out=total)
            if array.dtype.kind in "iu":
                return total
        if in_place and total is not array:
            np.copyto(array, total, casting="unsafe")
            return array
        return total if wire is None else total.astype(array.dtype)

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. See `Collective.broadcast`."""
        self._enter("broadcast from rank", root, array)
        check_root(root, self.communicator.size)
        is_root = self.communicator.rank == root
        dtype = array.dtype.newbyteorder("=")
        result = np.ascontiguousarray(array, dtype).reshape(array.shape) if is_root else np.empty(array.shape, dtype)
        self._broadcast_bytes(_as_bytes(result), root)
        return array if is_root else result

    def _broadcast_bytes(self, data: AnyArray, root: int) -> None:
        # Chunks of 64 MiB: large enough for any pipeline inside MPI, far below its count limit.
        for begin in range(0, data.size, 1 << 26):
            self._mpi.Bcast(data[begin : begin + (1 << 26)], root)

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        """Collective. See `Collective.all_gather`."""
        calls = self.communicator.all_gather_object(("all_gather", array.shape, array.dtype.name, axis))
        require_same([call[0] for call in calls], "the collective call", _HINT)
        axis = check_gatherable([call[1:] for call in calls])
        dtype = array.dtype.newbyteorder("=")
        mine = np.ascontiguousarray(np.moveaxis(array, axis, 0), dtype)
        lengths = [call[1][axis] for call in calls]
        gathered = np.empty((sum(lengths), *mine.shape[1:]), dtype)
        row_bytes = mine.itemsize * int(np.prod(mine.shape[1:], dtype=np.int64))
        counts = [length * row_bytes for length in lengths]
        data = _as_bytes(gathered)
        if data.size < 2**31:
            self._mpi.Allgatherv(_as_bytes(mine), [data, counts, None, MPI.BYTE])
        else:
            self._gather_by_broadcast(mine, data, counts)
        return np.moveaxis(gathered, 0, axis)

    def _gather_by_broadcast(self, mine: AnyArray, data: AnyArray, counts: list[int]) -> None:
        begin = 0
        for root, count in enumerate(counts):
            part = data[begin : begin + count]
            if root == self.communicator.rank:
                np.copyto(part, _as_bytes(mine))
            self._broadcast_bytes(part, root)
            begin += count

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        self._mpi.Barrier()

    def _enter(self, call: str, detail: ReduceOp | int, array: AnyArray) -> None:
        """Compare, now and then, what the ranks are about to do."""
        self._calls = calls = self._calls + 1
        if self._check or calls <= CHECKED_CALLS or calls & (calls - 1) == 0:
            same_on_all(
                self.communicator, "the collective call, its shape and dtype",
                (f"{call} {detail.name if isinstance(detail, ReduceOp) else detail}", array.shape, array.dtype.name),
                _HINT,
            )

    def __repr__(self) -> str:
        return f"MpiCollective({self.communicator!r}, chunk_bytes={self._chunk_bytes})"


def _wire_dtype(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any] | None:
    """What is sent where MPI cannot add the dtype itself, or would add it in half precision."""
    if dtype == np.float16 or dtype.kind == "V":
        return np.dtype(np.float32)
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        # The sum of small integers may not fit their own dtype.
        return np.dtype(np.float64)
    return None if dtype.isnative else dtype.newbyteorder("=")


def _as_bytes(array: AnyArray) -> AnyArray:
    return cast(AnyArray, array.reshape(-1).view(np.uint8))
