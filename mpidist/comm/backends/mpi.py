"""The MPI backend, for arrays in host memory and, with a CUDA-aware library, in GPU memory. Loading it starts MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.slices import cut_by_length, slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.backends.extremes import Extremes
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_communicator import MPI
from mpidist.options import CommunicationOptions, ReduceOp

_OPERATIONS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MEAN: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PROD: MPI.PROD,
}
# Looking up a member of an enumeration takes 70 ns, a name of the module 10 ns.
_MIN, _MAX = ReduceOp.MIN, ReduceOp.MAX
# One call of Allreduce on 100 MB takes 1.5 to 4 times as long as the same bytes in chunks of this size (MPICH 5.0.2,
# Open MPI 5.0.11). Chunks also keep every count far below 2**31 - 1, the limit of Open MPI 5.
CHUNK_BYTES = 1 << 20
# Above this size it is faster to copy an array and reduce the copy in place than to reduce the array into another one:
# 31 against 46 us at 256 KB (Open MPI 5.0.11, 2 ranks). If the other array is new memory, the difference is larger.
_COPIED_BYTES = 1 << 16
# The size of a message where nothing is combined: large enough for any pipeline inside MPI, and far below the limit of
# counts.
_MOVED_BYTES = 1 << 26


class MpiBackend(Backend):
    """MPI_Allreduce, MPI_Bcast and so on, in chunks.

    Args:
        communicator: An `MpiCommunicator`.
        options: The options, of which `bytes_per_pack` is the size of a chunk.
    """

    compares_calls = True

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self._mpi: MPI.Intracomm = communicator.mpi
        self._chunk_bytes = options.bytes_per_pack or CHUNK_BYTES
        self._whole_bytes = min(self._chunk_bytes, _COPIED_BYTES)
        self._look_ahead, self._show_call = communicator.order.look_ahead, communicator.order.show_call
        self._extremes = Extremes(communicator.mpi)

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        self._look_ahead()
        if (op is _MIN or op is _MAX) and source.dtype.kind == "f":
            if source.nbytes <= self._chunk_bytes:
                self._extremes.all_reduce(source, total, op)
                return
            for one in self._chunks(source):
                self._extremes.all_reduce(source[one], total[one], op)
            return
        operation = _OPERATIONS[op]
        # MPI forbids the same array as both arguments (MPI 4.1, section 2.3): IN_PLACE says it.
        if source.nbytes <= self._whole_bytes:
            self._mpi.Allreduce(MPI.IN_PLACE if total is source else source, total, operation)
            return
        chunk = self._chunk_bytes // source.itemsize or 1
        # On a GPU the copy below would still be in progress when MPI reads the piece.
        is_copied = total is not source and type(source) is np.ndarray
        for begin in range(0, source.size, chunk):
            piece = total[begin : begin + chunk]
            if is_copied:
                piece[...] = source[begin : begin + chunk]
            is_in_place = is_copied or total is source
            self._mpi.Allreduce(MPI.IN_PLACE if is_in_place else source[begin : begin + chunk], piece, operation)

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        self._look_ahead()
        for one in self._chunks(source):
            if _is_extreme(source, op):
                self._extremes.reduce(source[one], total[one], op, root)
            else:
                self._mpi.Reduce(source[one], total[one], _OPERATIONS[op], root)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        self._look_ahead()
        if source.nbytes <= self._chunk_bytes:
            self._reduce_scatter_at_once(source, mine, counts, op)
            return
        # A chunk holds a piece of every rank's slice, side by side.
        starts = [one.start for one in slices_of(counts)]
        length = max(1, self._chunk_bytes // source.itemsize // len(counts))
        packed = arrays.namespace(source).empty(length * len(counts), source.dtype)
        for begin in range(0, max(counts), length):
            sizes = [min(length, max(0, count - begin)) for count in counts]
            at = 0
            for start, size in zip(starts, sizes, strict=True):
                packed[at : at + size] = source[start + begin : start + begin + size]
                at += size
            own = sizes[self.communicator.rank]
            self._reduce_scatter_at_once(packed[:at], mine[begin : begin + own], sizes, op)

    def _reduce_scatter_at_once(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        if _is_extreme(source, op):
            self._extremes.reduce_scatter(source, mine, counts, op)
        else:
            self._mpi.Reduce_scatter(source, mine, counts, _OPERATIONS[op])

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        self._look_ahead()
        # As bytes, since MPI has no type for bfloat16.
        data = as_bytes(data)
        for begin in range(0, data.size, _MOVED_BYTES):
            self._mpi.Bcast(data[begin : begin + _MOVED_BYTES], root)

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        self._show_call()
        # Counts and displacements are C ints before MPI 4's large-count functions, which Open MPI 5 lacks.
        if gathered.size < 2**31:
            self._mpi.Allgatherv(mine, [gathered, counts, None, MPI.BYTE])
            return
        for root, one in enumerate(slices_of(counts)):
            data = gathered[one]
            if root == self.communicator.rank:
                data[...] = mine
            self.broadcast(data, root)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        self._show_call()
        # All ranks must use the same algorithm, and a rank with few bytes may have a partner with many.
        if self.communicator.all_reduce_max(max(sent.size, got.size)) < 2**31:
            self._mpi.Alltoallv([sent, sent_counts, None, MPI.BYTE], [got, got_counts, None, MPI.BYTE])
            return
        self._exchange_in_pieces(sent, sent_counts, got, got_counts)

    def _chunks(self, array: AnyArray) -> list[slice]:
        return cut_by_length(array.size, self._chunk_bytes // array.itemsize or 1)

    def _exchange_in_pieces(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        size, rank = self.communicator.size, self.communicator.rank
        outgoing_slices, incoming_slices = slices_of(sent_counts), slices_of(got_counts)
        for step in range(size):
            to, source = (rank + step) % size, (rank - step) % size
            outgoing, incoming = sent[outgoing_slices[to]], got[incoming_slices[source]]
            for begin in range(0, max(outgoing.size, incoming.size), _MOVED_BYTES):
                # Both begin before either is waited for: ranks that all send first would wait for each other.
                requests: list[Any] = []
                if begin < incoming.size:
                    requests.append(self._mpi.Irecv(incoming[begin : begin + _MOVED_BYTES], source))
                if begin < outgoing.size:
                    requests.append(self._mpi.Isend(outgoing[begin : begin + _MOVED_BYTES], to))
                MPI.Request.Waitall(requests)


def _is_extreme(array: AnyArray, op: ReduceOp) -> bool:
    return (op is _MIN or op is _MAX) and array.dtype.kind == "f"
