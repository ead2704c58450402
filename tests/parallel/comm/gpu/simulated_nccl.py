"""NCCL's interface over MPI on host memory, so that what is asked of NCCL can be tested where there is no GPU.

It takes the same arguments (addresses, counts, types) and gives the same results; of streams it knows nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator

TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
# NCCL drops a NaN if some rank has a number.
FUNCTIONS: dict[int, np.ufunc] = {0: np.add, 1: np.multiply, 2: np.fmax, 3: np.fmin}


def at(address: int, count: int, kind: int) -> AnyArray:
    dtype = np.dtype(TYPES[kind])
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    values: AnyArray = np.frombuffer(memory, dtype)
    return values


class SimulatedCuda:
    """What `mpidist.comm.gpu.cuda` offers the collective, for host arrays."""

    def __init__(self, communicator: Communicator) -> None:
        self.nccl = SimulatedNccl(communicator, self)
        self.device = 0

    def load_nccl(self) -> SimulatedNccl:
        return self.nccl

    def current_stream(self) -> int:
        return 42

    def device_address(self, array: AnyArray) -> int:
        assert array.flags.c_contiguous
        return array.ctypes.data

    def current_device(self) -> int:
        return self.device

    def use_device(self, index: int) -> None:
        assert index == self.device

    def synchronize(self, index: int) -> None:
        assert index in {one.device_id() for one in self.nccl.made}
        self.nccl.finished.wait(60)


class SimulatedNccl:
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)

    def __init__(self, communicator: Communicator, cuda: SimulatedCuda) -> None:
        self.communicator = communicator
        self.cuda = cuda
        self.made: list[SimulatedRanks] = []
        # A call that has no partner is never done.
        self.finished = threading.Event()
        self.finished.set()
        self.is_broken = False
        self.fails_at_start = False
        self.waits_at_start: threading.Event | None = None
        self.queued: list[Callable[[], object]] | None = None
        for number, name in enumerate(TYPES):
            setattr(self, f"NCCL_{name.upper()}", number)

    def get_unique_id(self) -> tuple[int, ...]:
        return tuple(range(128))

    def NcclCommunicator(self, size: int, identity: tuple[int, ...], rank: int) -> SimulatedRanks:
        assert (size, rank) == (self.communicator.size, self.communicator.rank)
        assert identity == self.get_unique_id()
        if self.fails_at_start:
            raise OSError("NCCL has found no network")
        if self.waits_at_start is not None:
            self.waits_at_start.wait(60)
        self.made.append(SimulatedRanks(self, self.cuda.device))
        return self.made[-1]

    def groupStart(self) -> None:
        assert self.queued is None
        self.queued = []

    def groupEnd(self) -> None:
        queued, self.queued = self.queued or [], None
        requests = [request for call in queued if (request := call()) is not None]
        for request in requests:
            request.Wait()  # type: ignore[attr-defined]

    def do(self, call: Callable[[], object]) -> None:
        if self.queued is None:
            assert call() is None, "a message outside a group waits for its partner for ever"
        else:
            self.queued.append(call)


class SimulatedRanks:
    def __init__(self, nccl: SimulatedNccl, device: int) -> None:
        self.nccl = nccl
        self.mpi: Any = nccl.communicator.mpi
        self.rank = nccl.communicator.rank
        self.is_aborted = False
        self.is_destroyed = False
        self.device = device

    def device_id(self) -> int:
        return self.device

    def check_async_error(self) -> None:
        if self.nccl.is_broken:
            raise RuntimeError("NCCL_ERROR_SYSTEM")

    def abort(self) -> None:
        self.is_aborted = True

    def destroy(self) -> None:
        assert not self.is_destroyed
        self.mpi.Barrier()
        self.is_destroyed = True

    def combined(self, sent: AnyArray, op: int) -> AnyArray:
        total: AnyArray = FUNCTIONS[op].reduce(np.stack(self.mpi.allgather(sent)), axis=0, dtype=sent.dtype)
        return total

    def allReduce(self, sent: int, got: int, count: int, kind: int, op: int, stream: int) -> None:
        assert stream == 42
        self.nccl.do(lambda: _put(at(got, count, kind), self.combined(at(sent, count, kind), op)))

    def reduce(self, sent: int, got: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        def call() -> None:
            total = self.combined(at(sent, count, kind), op)
            if self.rank == root:
                _put(at(got, count, kind), total)

        self.nccl.do(call)

    def reduceScatter(self, sent: int, got: int, count: int, kind: int, op: int, stream: int) -> None:
        def call() -> None:
            total = self.combined(at(sent, count * self.mpi.size, kind), op)
            _put(at(got, count, kind), total[self.rank * count : (self.rank + 1) * count])

        self.nccl.do(call)

    def broadcast(self, sent: int, got: int, count: int, kind: int, root: int, stream: int) -> None:
        self.nccl.do(lambda: _put(at(got, count, kind), self.mpi.bcast(at(sent, count, kind).copy(), root)))

    def allGather(self, sent: int, got: int, count: int, kind: int, stream: int) -> None:
        def call() -> None:
            gathered = np.concatenate(self.mpi.allgather(at(sent, count, kind).copy()))
            _put(at(got, count * self.mpi.size, kind), gathered)

        self.nccl.do(call)

    def send(self, sent: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.nccl.do(lambda: self.mpi.Isend(at(sent, count, kind), peer))

    def recv(self, got: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.nccl.do(lambda: self.mpi.Irecv(at(got, count, kind), peer))


def _put(into: AnyArray, values: AnyArray) -> None:
    into[...] = values
