"""The NCCL backend, for CuPy arrays where every rank has a GPU of its own.

Calls are put on the program's current stream and return at once. Work that the program starts on that stream afterwards
can read their results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import FUNCTIONS, is_half
from mpidist.comm.arithmetic.ordered import from_ordered, to_ordered
from mpidist.comm.arithmetic.slices import slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.gpu.nccl_ranks import open_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.options import ReduceOp

_OPERATIONS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.MEAN: "NCCL_SUM",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
    ReduceOp.PROD: "NCCL_PROD",
}
_TYPES = {
    "bool": "NCCL_UINT8",
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}
# Wider dtypes for those that NCCL lacks. Sums and products of integers stay right modulo 2**16.
_WIDER = {"int16": np.dtype(np.int32), "uint16": np.dtype(np.uint32), "bfloat16": np.dtype(np.float32)}


class NcclBackend(Backend):
    """Collective. NCCL's collective operations on the current stream.

    Backends over the same communicator and GPUs share one communicator of NCCL; see `nccl_ranks.open_ranks`.

    NCCL adds float16 and bfloat16 in that precision. The option `wire_dtype` adds large
    ones of its dtype in float32.

    Args:
        communicator: The ranks, each with a GPU of its own, which is current.
        cuda: The module `mpidist.comm.gpu.cuda`, which needs CuPy.

    Raises:
        RuntimeError: NCCL cannot start on some rank, or has not started after 120 s; on every rank.
    """

    combines_halves = True
    takes_device_arrays = True

    def __init__(self, communicator: Communicator, cuda: Any) -> None:
        self.communicator = communicator
        self._cuda = cuda
        self._nccl: Any = cuda.load_nccl()
        self._shared = open_ranks(communicator, cuda)
        self._ranks: Any = self._shared.ranks

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        if source.dtype.kind == "c" and op is ReduceOp.PROD:
            self._multiply_gathered(source, total)
            return
        wide, out, kind = self._in_nccls_type(source, total, op)
        operation = getattr(self._nccl, _OPERATIONS[op])
        self._ranks.allReduce(self._address(wide), self._address(out), wide.size, kind, operation, self._stream())
        _write_back(out, total)

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        if source.dtype.kind == "c" and op is ReduceOp.PROD:
            self._multiply_gathered(source, total if self.communicator.rank == root else source.copy())
            return
        wide, out, kind = self._in_nccls_type(source, total, op)
        operation = getattr(self._nccl, _OPERATIONS[op])
        self._ranks.reduce(
            self._address(wide), self._address(out), wide.size, kind, operation, root, self._stream()
        )
        if self.communicator.rank == root:
            _write_back(out, total)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        slices = slices_of(counts)
        if source.dtype.kind == "c" and op is ReduceOp.PROD:
            total = source.copy()
            self._multiply_gathered(source, total)
            mine[...] = total[slices[self.communicator.rank]]
            return
        wide, out, kind = self._in_nccls_type(source, mine, op)
        operation = getattr(self._nccl, _OPERATIONS[op])
        # A complex number is a pair of elements here.
        factor = wide.size // source.size
        if len(set(counts)) == 1:
            self._ranks.reduceScatter(
                self._address(wide), self._address(out), out.size, kind, operation, self._stream()
            )
        else:
            with self._group():
                for root, one in enumerate(slices):
                    piece = wide[one.start * factor : one.stop * factor]
                    if piece.size:
                        # NCCL writes to the second array on the root only.
                        into = out if root == self.communicator.rank else piece
                        self._ranks.reduce(
                            self._address(piece), self._address(into), piece.size, kind, operation, root,
                            self._stream(),
                        )
        _write_back(out, mine)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        data = as_bytes(data)
        address = self._address(data)
        self._ranks.broadcast(address, address, data.size, self._nccl.NCCL_UINT8, root, self._stream())

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        kind, stream = self._nccl.NCCL_UINT8, self._stream()
        if len(set(counts)) == 1:
            self._ranks.allGather(self._address(mine), self._address(gathered), mine.size, kind, stream)
            return
        with self._group():
            for root, one in enumerate(slices_of(counts)):
                if counts[root]:
                    into = self._address(gathered[one])
                    sent = self._address(mine) if root == self.communicator.rank else into
                    self._ranks.broadcast(sent, into, counts[root], kind, root, stream)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        kind, stream, rank = self._nccl.NCCL_UINT8, self._stream(), self.communicator.rank
        outgoing, incoming = slices_of(sent_counts), slices_of(got_counts)
        # Raises for an array that NCCL cannot reach, before the group begins.
        self._address(sent)
        got[incoming[rank]] = sent[outgoing[rank]]
        with self._group():
            for other in range(self.communicator.size):
                if other == rank:
                    continue
                if sent_counts[other]:
                    self._ranks.send(self._address(sent[outgoing[other]]), sent_counts[other], kind, other, stream)
                if got_counts[other]:
                    self._ranks.recv(self._address(got[incoming[other]]), got_counts[other], kind, other, stream)

    def _in_nccls_type(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> tuple[AnyArray, AnyArray, int]:
        """The source and an array for the result in a type that NCCL has, and the number of that type."""
        if op in (ReduceOp.MIN, ReduceOp.MAX) and (source.dtype.kind == "f" or is_half(source.dtype)):
            # NCCL's own operations on these drop a NaN if some rank has a number.
            source = to_ordered(source.astype(np.float32) if is_half(source.dtype) else source, op)
            total = arrays.namespace(source).empty(total.size, source.dtype)
        if source.dtype.kind == "c":
            half = np.dtype(f"f{source.itemsize // 2}")
            source, total = source.view(half), total.view(half)
        name = source.dtype.name
        kind = getattr(self._nccl, _TYPES.get(name, ""), None)
        if kind is not None:
            return source, total, int(kind)
        if name not in _WIDER:
            raise TypeError(
                f"NCCL has no type for arrays of dtype {source.dtype}: convert them to another dtype, for instance "
                "float32"
            )
        wide = source.astype(_WIDER[name])
        out = arrays.namespace(source).empty(total.size, wide.dtype)
        return wide, out, int(getattr(self._nccl, _TYPES[wide.dtype.name]))

    def _multiply_gathered(self, source: AnyArray, total: AnyArray) -> None:
        # NCCL multiplies no complex numbers.
        rows = arrays.namespace(source).empty((self.communicator.size, source.size), source.dtype)
        counts = [source.nbytes] * self.communicator.size
        self.all_gather(as_bytes(source), as_bytes(rows), counts)
        multiply = FUNCTIONS[ReduceOp.PROD]
        total[...] = rows[0]
        for row in rows[1:]:
            multiply(total, row, out=total)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Calls that NCCL makes at the same time. One after another, sends and receives would wait for each other."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _stream(self) -> int:
        return int(self._cuda.current_stream())

    def _address(self, array: AnyArray) -> int:
        current = self._cuda.current_device()
        if current != self._shared.device:
            raise ValueError(
                f"NCCL was started on GPU {self._shared.device} and GPU {current} is current: make GPU "
                f"{self._shared.device} current again, or build another strategy for GPU {current}"
            )
        return int(self._cuda.device_address(array))

    def _end(self, *, is_collective: bool) -> None:
        if is_collective:
            self._shared.close()
        # Without other users it is destroyed when the ranks next create a communicator.
        del self._shared


def _write_back(out: AnyArray, total: AnyArray) -> None:
    if out.dtype.kind == "i" and total.dtype.kind in "fV":
        total[...] = from_ordered(out, np.dtype(f"f{out.itemsize}")).astype(total.dtype, copy=False)
    elif out.dtype.itemsize > total.dtype.itemsize and total.dtype.kind != "c":
        total[...] = out.astype(total.dtype)
