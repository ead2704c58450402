"""The NCCL backend, for CuPy arrays where every rank has a GPU of its own.

Calls are put on the program's current stream and return at once. Work that the program starts on that stream afterwards
sees their results.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.agreement import together
from mpidist.comm.arithmetic.combine import FUNCTIONS, is_half
from mpidist.comm.arithmetic.ordered import from_ordered, to_ordered
from mpidist.comm.arithmetic.slices import slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.communicator import Communicator
from mpidist.comm.farewell import LAST
from mpidist.comm.resource import Claim, Identity, new_identity
from mpidist.observe.output import say
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
    """NCCL's collective operations on the current stream.

    NCCL adds float16 and bfloat16 in that precision. The option `wire_dtype` adds large
    ones of its dtype in float32.

    Collective. Args:
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
        rank, size = communicator.rank, communicator.size
        unique = together(
            communicator, "starting NCCL", lambda: self._nccl.get_unique_id() if rank == 0 else None
        )
        unique, identity = communicator.broadcast_object((unique, new_identity()))
        # One NCCL communicator for each backend: all ranks must make their calls on a communicator in one order.
        self._ranks: Any = together(
            communicator, "starting NCCL", lambda: _start(cuda, communicator, size, unique, rank)
        )
        _open[identity] = (self._ranks, cuda)
        if end_all not in LAST:
            LAST.append(end_all)
        # Destroying it is a collective call, which the garbage collector must not make.
        self._claim = Claim(self, identity, size, functools.partial(_destroy, identity))

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
        return int(self._cuda.device_address(array))

    def _end(self, *, is_collective: bool) -> None:
        if is_collective:
            self._claim.give_back()
        else:
            self._claim.drop()


# NCCL's communicators of this process, and the module that made each.
_open: dict[Identity, tuple[Any, Any]] = {}
# A rank on which NCCL fails does not come to its start, and the others would wait there for ever.
START_SECONDS = 120.0
# At the end of the program all ranks have made their calls. What is not done after this time has no partner.
END_SECONDS = 30.0


def _in_background(name: str, cuda: Any, work: Callable[[], Any], turn: Callable[[], bool]) -> tuple[bool, Any]:
    """Do work in a thread of its own, on this thread's GPU, for as long as `turn`, called again and again, allows.

    Returns:
        Whether it is done, and its result.
    """
    done, results, errors = threading.Event(), [], []
    device = cuda.current_device()

    def run() -> None:
        try:
            cuda.use_device(device)
            results.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    # A daemon, since it may never end; named so that the end of the program does not wait for it.
    threading.Thread(target=run, name=name, daemon=True).start()
    pause = 0.001
    while not done.wait(pause):
        if not turn():
            return False, None
        pause = min(pause * 2, 0.1)
    if errors:
        raise errors[0]
    return True, results[0]


def _start(cuda: Any, communicator: Communicator, size: int, unique: Any, rank: int) -> Any:
    end = time.monotonic() + START_SECONDS

    def turn() -> bool:
        communicator.require_whole("the start of NCCL")
        return time.monotonic() < end

    def start() -> Any:
        return cuda.load_nccl().NcclCommunicator(size, unique, rank)

    is_done, ranks = _in_background("mpidist-nccl-start", cuda, start, turn)
    if not is_done:
        raise RuntimeError(
            f"NCCL has not started after {START_SECONDS:g} s: it may have failed on another rank, or its network may "
            "be blocked. Set NCCL_DEBUG=INFO to see why, or MPIDIST_GPU_TRANSPORT=staged to do without"
        )
    return ranks


def _is_done(ranks: Any, cuda: Any, seconds: float = math.inf) -> bool:
    """Wait until a GPU has done its work, at most for a time.

    Raises:
        Exception: NCCL reports an error, for example of the network.
    """
    end = time.monotonic() + seconds
    index = ranks.device_id()

    def turn() -> bool:
        ranks.check_async_error()
        return time.monotonic() < end

    return _in_background("mpidist-nccl-end", cuda, functools.partial(cuda.synchronize, index), turn)[0]


def _destroy(identity: Identity) -> None:
    """Collective. Destroy a communicator after the last results have been sent."""
    ranks, cuda = _open.pop(identity, (None, None))
    if ranks is not None and _is_done(ranks, cuda):
        ranks.destroy()


def end_all() -> None:
    """Collective. Destroy all communicators at the end of the program, when all ranks have come to it."""
    for identity in sorted(_open):
        ranks, cuda = _open.pop(identity)
        try:
            is_done = _is_done(ranks, cuda, END_SECONDS)
        except Exception as error:
            say(f"NCCL has failed, and results are lost: {error}")
            is_done = False
        else:
            if not is_done:
                say(f"a call of NCCL has found no partner in {END_SECONDS:g} s: other ranks have made fewer calls")
        if is_done:
            ranks.destroy()
        else:
            # The other ranks need not take part.
            ranks.abort()


def _write_back(out: AnyArray, total: AnyArray) -> None:
    if out.dtype.kind == "i" and total.dtype.kind in "fV":
        total[...] = from_ordered(out, np.dtype(f"f{out.itemsize}")).astype(total.dtype, copy=False)
    elif out.dtype.itemsize > total.dtype.itemsize and total.dtype.kind != "c":
        total[...] = out.astype(total.dtype)
