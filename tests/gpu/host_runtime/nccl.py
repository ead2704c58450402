"""NCCL's calls over MPI on the memory of simulated GPUs, in the place of `cupy.cuda.nccl`.

Counts and types of arguments are checked against those of the installed CuPy. A call waits for the work that its stream
was given before, as NCCL's kernel does, and takes part at once, since NCCL goes on by itself; its result is written as
late as the stream may run. Sums of halves are rounded once.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from tests.gpu.host_runtime import streams as on_host

# NCCL's names of types; bfloat16 is left out, since CuPy has no such arrays.
_TYPES = {
    "INT8": "i1", "UINT8": "u1", "INT32": "i4", "UINT32": "u4", "INT64": "i8", "UINT64": "u8", "FLOAT16": "f2",
    "FLOAT32": "f4", "FLOAT64": "f8",
}
# NCCL drops a NaN if some rank has a number.
_FUNCTIONS = {"NCCL_SUM": np.add, "NCCL_PROD": np.multiply, "NCCL_MAX": np.fmax, "NCCL_MIN": np.fmin}
calls: list[str] = []


class _Group:
    """Calls between `groupStart` and `groupEnd`."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[Callable[[], Any]] = []

    def do(self, call: Callable[[], Any]) -> None:
        """Make a call now, or at the end of the group."""
        if self.depth:
            self.waiting.append(call)
        else:
            request = call()
            assert request is None, "a message outside a group waits for its partner for ever"

    def end(self) -> None:
        """Make the calls at the same time."""
        self.depth -= 1
        if not self.depth:
            waiting, self.waiting = self.waiting, []
            finishes = [finish for call in waiting if (finish := call()) is not None]
            for finish in finishes:
                finish()


class _Ranks:
    """A communicator. Each method is called as CuPy's own says."""

    def __init__(self, module: Any, size: int, identity: tuple[int, ...], rank: int) -> None:
        from mpi4py import MPI  # noqa: PLC0415 - only where ranks communicate

        assert (size, rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank), "only communicators of all ranks"
        assert len(identity) == 128
        self._ranks = MPI.COMM_WORLD.Dup()
        self._module = module
        self._device = on_host.thread.device
        self._dtypes = {getattr(module, f"NCCL_{name}"): np.dtype(one) for name, one in _TYPES.items()}
        self._functions = {getattr(module, name): one for name, one in _FUNCTIONS.items()}
        self.state = "open"

    def __getattr__(self, name: str) -> Any:
        documented = getattr(self._module.real.NcclCommunicator, name).__doc__
        names = [one.split()[-1] for one in re.search(r"\((.*)\)", documented)[1].split(", ")[1:]]  # type: ignore[index]

        def call(*arguments: Any) -> None:
            assert self.state == "open", f"{name} on a communicator that is {self.state}"
            assert on_host.thread.device == self._device, f"{name} with another GPU current than at the start"
            assert len(arguments) == len(names), f"{name} takes {names}, got {arguments}"
            assert all(type(one) is int for one in arguments), f"{name} takes integers, got {arguments}"
            given = {key.replace("buff", "buf"): value for key, value in zip(names, arguments, strict=True)}
            calls.append(name)
            self._module.group.do(lambda: getattr(self, f"_do_{name}")(**given))

        return call

    def device_id(self) -> int:
        return self._device

    def check_async_error(self) -> None:
        assert self.state == "open"

    def abort(self) -> None:
        self.state = "aborted"

    def destroy(self) -> None:
        self.state = "destroyed"
        self._ranks.Free()

    def _read(self, address: int, count: int, datatype: int, stream: int) -> Any:
        on_host.enqueue(stream, lambda: None)
        on_host.stream_of(stream).run()
        dtype = self._dtypes[datatype]
        size = count * dtype.itemsize
        if not size:
            return np.empty(0, dtype)
        assert on_host.memory.device_of(address) == self._device, "not memory of this communicator's GPU"
        assert on_host.memory.device_of(address + size - 1) == self._device
        with on_host.opened_memory():
            return np.frombuffer(ctypes.string_at(address, size), dtype)

    def _write(self, address: int, values: Any, stream: int) -> None:
        data = np.ascontiguousarray(values).tobytes()
        if data:
            assert on_host.memory.device_of(address) == self._device, "not memory of this communicator's GPU"
            assert on_host.memory.device_of(address + len(data) - 1) == self._device
            on_host.enqueue(stream, lambda: ctypes.memmove(address, data, len(data)))

    def _combined(self, mine: Any, op: int) -> Any:
        wide = np.dtype("f4") if mine.dtype == np.float16 else mine.dtype
        parts = np.stack(self._ranks.allgather(mine)).astype(wide)
        return self._functions[op].reduce(parts, axis=0, dtype=wide).astype(mine.dtype)

    def _do_allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._write(recvbuf, self._combined(self._read(sendbuf, count, datatype, stream), op), stream)

    def _do_reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        total = self._combined(self._read(sendbuf, count, datatype, stream), op)
        if self._ranks.rank == root:
            self._write(recvbuf, total, stream)

    def _do_reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        total = self._combined(self._read(sendbuf, recvcount * self._ranks.size, datatype, stream), op)
        self._write(recvbuf, np.split(total, self._ranks.size)[self._ranks.rank], stream)

    def _do_broadcast(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        mine = self._read(sendbuf, count, datatype, stream)
        self._write(recvbuf, self._ranks.bcast(mine, root), stream)

    def _do_allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        mine = self._read(sendbuf, count, datatype, stream)
        self._write(recvbuf, np.concatenate(self._ranks.allgather(mine)), stream)

    def _do_send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> Any:
        return self._ranks.Isend(self._read(sendbuf, count, datatype, stream).view("u1"), peer).Wait

    def _do_recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> Any:
        values = np.empty(count * self._dtypes[datatype].itemsize, np.uint8)
        request = self._ranks.Irecv(values, peer)

        def finish() -> None:
            request.Wait()
            self._write(recvbuf, values, stream)

        return finish


def replace_nccl() -> None:
    """Put the stand-in into the place of `cupy.cuda.nccl`; called when CuPy is loaded."""
    cupy: Any = importlib.import_module("cupy")
    real: Any = importlib.import_module("cupy.cuda.nccl")

    module: Any = ModuleType("cupy.cuda.nccl")
    module.__dict__.update({name: one for name, one in vars(real).items() if name.startswith("NCCL_")})
    if real.available:
        module.get_version = real.get_version
    module.real, module.group, module.available = real, _Group(), real.available
    module.get_unique_id = lambda: tuple(range(128))
    module.NcclCommunicator = lambda size, identity, rank: _Ranks(module, size, identity, rank)

    def start() -> None:
        module.group.depth += 1

    module.groupStart, module.groupEnd = start, module.group.end
    cupy.cuda.nccl = sys.modules["cupy.cuda.nccl"] = module
