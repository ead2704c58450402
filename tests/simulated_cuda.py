"""CUDA as far as mpidist uses it, in host memory: `mpidist.comm.gpu.cuda` itself runs on it where there is no GPU.

Kernels run at once, on the program's own stream. Copies on other streams run as late as CUDA may run them: when
somebody waits. Whoever forgets to wait sees what was in memory before, and whoever fills pinned memory again too early
sends the wrong bytes. Kernels are compiled for the CPU by a C++ compiler.

As a program it runs another one with such GPUs: `python tests/simulated_cuda.py train.py --device gpu`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests.simulated_cupy import current, ndarray, simulated_cupy

COMPILER = shutil.which("g++") or shutil.which("c++")
COUNT = 8
LOCK = threading.RLock()


class Stream:
    """What was given to it and has not run yet; the program's own has nothing waiting."""

    all: dict[int, Stream] = {}  # noqa: RUF012 - by handle

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0 if null else len(Stream.all) + 1
        self.waiting: list[Callable[[], object]] = []
        self.given = 0
        Stream.all[self.ptr] = self

    def add(self, work: Callable[[], object]) -> None:
        with LOCK:
            self.given += 1
            if self.ptr == 0:
                work()
            else:
                self.waiting.append(work)

    def run(self, until: int) -> None:
        with LOCK:
            for _ in range(until - (self.given - len(self.waiting))):
                self.waiting.pop(0)()

    def wait_event(self, event: Event) -> None:
        # What was recorded until now counts; the event may be recorded anew.
        stream, place = event.stream, event.place
        self.add(lambda: stream.run(place))

    def synchronize(self) -> None:
        self.run(self.given)


class Event:
    def __init__(self, **_: Any) -> None:
        self.stream, self.place = NULL, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or NULL
        self.place = self.stream.given

    def synchronize(self) -> None:
        self.stream.run(self.place)


NULL = Stream(null=True)


class Device:
    def __init__(self, index: int | None = None) -> None:
        self.id = current.device if index is None else index

    def use(self) -> Device:
        current.device = self.id
        return self

    def synchronize(self) -> None:
        for stream in Stream.all.values():
            stream.synchronize()


class PinnedMemory(bytearray):
    """Page-locked memory, and the GPU that was current in the thread that asked for it."""

    device = 0


def alloc_pinned_memory(byte_count: int) -> PinnedMemory:
    memory = PinnedMemory(byte_count)
    memory.device = current.device
    return memory


class CUDARuntimeError(RuntimeError):
    pass


def memcpy_async(to: int, source: int, byte_count: int, kind: int, stream: int) -> None:
    Stream.all[stream].add(lambda: ctypes.memmove(to, source, byte_count))


class ElementwiseKernel:
    """CUDA C++ of one element, compiled for the CPU."""

    def __init__(self, inputs: str, outputs: str, body: str, name: str, **_: Any) -> None:
        self.parameters = [one.split() for one in (*inputs.split(","), *outputs.split(",")) if one.strip()]
        self.body = body
        self.compiled: dict[np.dtype[Any], Any] = {}

    def __call__(self, *arguments: Any, size: int) -> None:
        dtype = next(one.dtype for one in arguments if isinstance(one, ndarray))
        if dtype not in self.compiled:
            self.compiled[dtype] = self.compile({"f": "float", "d": "double"}[dtype.char])
        scalar: Any = ctypes.c_float if dtype.char == "f" else ctypes.c_double
        self.compiled[dtype](ctypes.c_long(size), *(
            ctypes.c_void_p(one.data.ptr) if isinstance(one, ndarray) else scalar(one) for one in arguments
        ))

    def compile(self, real: str) -> Any:
        if COMPILER is None:
            raise OSError("needs a C++ compiler")
        listed = ", ".join(f"T {'*' if kind == 'raw' else ''}{rest[-1]}" for kind, *rest in self.parameters)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.cpp")
            source.write_text(
                f"#include <cmath>\nusing namespace std;\ntypedef {real} T;\n"
                f'extern "C" void run(long n, {listed}) {{\nfor (long i = 0; i < n; i++) {{\n{self.body}\n}}\n}}\n'
            )
            library = source.with_suffix(".so")
            command = [COMPILER, "-O1", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            return ctypes.CDLL(str(library)).run


def make_cuda() -> ModuleType:
    """A module `cupy.cuda`."""
    cuda: Any = ModuleType("cupy.cuda")
    cuda.Stream, cuda.Event, cuda.Device = Stream, Event, Device
    cuda.get_current_stream = lambda: NULL
    cuda.alloc_pinned_memory = alloc_pinned_memory
    cuda.nccl = SimpleNamespace(available=False)
    cuda.runtime = SimpleNamespace(
        memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyDeviceToDevice=3, memcpyAsync=memcpy_async,
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: COUNT, free=lambda _: None,
        getDeviceProperties=lambda index: {"uuid": bytes([index])}, deviceGetPCIBusId=lambda index: f"0000:0{index}",
        deviceGetAttribute=lambda _attribute, _index: 0,
    )
    module: ModuleType = cuda
    return module


@contextmanager
def simulated_gpus() -> Iterator[Any]:
    """CuPy on GPUs that are visible to `mpidist.cluster.gpu`, for as long as it is entered."""
    with simulated_cupy() as cupy:
        cupy.cuda = make_cuda()
        cupy.ElementwiseKernel = ElementwiseKernel
        visible = mock.patch("mpidist.cluster.gpu.visible_gpus", return_value=[str(n) for n in range(COUNT)])
        # What was loaded with another CuPy, or none, is put back afterwards; the package holds it, too.
        package: Any = importlib.import_module("mpidist.comm")
        attribute = package.__dict__.pop("cuda", None)
        fused: Any = importlib.import_module("mpidist.variables.update.fused")
        fused._compile.cache_clear()
        device = current.device
        modules = {"cupy.cuda": cupy.cuda, "cupy.cuda.nccl": cupy.cuda.nccl}
        with visible, mock.patch.dict(sys.modules, modules):
            sys.modules.pop("mpidist.comm.gpu.cuda", None)
            try:
                yield cupy
            finally:
                current.device = device
                package.__dict__.pop("cuda", None)
                if attribute is not None:
                    package.cuda = attribute
                fused._compile.cache_clear()


if __name__ == "__main__":
    # No library tells that it knows such memory, and the probe would ask CUDA.
    os.environ.setdefault("MPIDIST_GPU_TRANSPORT", "staged")
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    with simulated_gpus():
        runpy.run_path(sys.argv[0], run_name="__main__")
