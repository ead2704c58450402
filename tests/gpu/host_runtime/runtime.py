"""CUDA's runtime as far as CuPy uses it here, over `streams`; names and arguments are those of CuPy's own module."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from tests.gpu.host_runtime import streams as on_host
from tests.gpu.host_runtime.capsules import replace
from tests.gpu.host_runtime.streams import enqueue, is_pageable, memory, pinned, thread

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_NOT_READY = 600
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class Functions:
    """What replaces the functions of the same names."""

    @staticmethod
    def getDevice() -> int:
        return thread.device

    @staticmethod
    def setDevice(device: int) -> None:
        if not 0 <= device < on_host.COUNT:
            raise ValueError(f"there is no GPU {device}")
        thread.device = device

    @staticmethod
    def getDeviceCount() -> int:
        return on_host.COUNT

    @staticmethod
    def deviceGetAttribute(attribute: int, device: int) -> int:
        # A compute capability of 8.0.
        return {75: 8, 76: 0}.get(attribute, 0)

    @staticmethod
    def driverGetVersion() -> int:
        return 12090

    @staticmethod
    def runtimeGetVersion() -> int:
        return 12090

    @staticmethod
    def deviceSynchronize() -> None:
        on_host.run_all()

    @staticmethod
    def malloc(size: int) -> int:
        return memory.allocate(size)

    @staticmethod
    def free(address: int) -> None:
        if address:
            memory.free(address)

    @staticmethod
    def hostAlloc(size: int, flags: int) -> int:
        address = int(_libc.malloc(size or 1))
        pinned[address] = size
        return address

    @staticmethod
    def freeHost(address: int) -> None:
        on_host.run_all()
        pinned.pop(address, None)
        _libc.free(address)

    @staticmethod
    def hostRegister(address: int, size: int, flags: int) -> None:
        if not is_pageable(address):
            raise ValueError(f"the memory at {address:#x} is page-locked already, or a GPU's")
        pinned[address] = size

    @staticmethod
    def hostUnregister(address: int) -> None:
        on_host.run_all()
        del pinned[address]

    @staticmethod
    def memGetInfo() -> tuple[int, int]:
        return 1 << 33, 1 << 34

    @staticmethod
    def streamCreate() -> int:
        return on_host.new_stream(is_blocking=True)

    @staticmethod
    def streamCreateWithFlags(flags: int) -> int:
        return on_host.new_stream(is_blocking=not flags & 1)

    @staticmethod
    def streamCreateWithPriority(flags: int, priority: int) -> int:
        return on_host.new_stream(is_blocking=not flags & 1)

    @staticmethod
    def streamDestroy(handle: int) -> None:
        """CUDA still does the stream's work."""

    @staticmethod
    def streamSynchronize(handle: int) -> None:
        on_host.enqueue(handle, lambda: None)
        on_host.stream_of(handle).run()

    @staticmethod
    def streamQuery(handle: int) -> int:
        return _NOT_READY if on_host.stream_of(handle).waiting else 0

    @staticmethod
    def streamGetFlags(handle: int) -> int:
        return int(not on_host.stream_of(handle).is_blocking)

    @staticmethod
    def streamIsCapturing(handle: int) -> int:
        return 0

    @staticmethod
    def streamWaitEvent(handle: int, event: int, flags: int = 0) -> None:
        on_host.make_wait(handle, event)

    @staticmethod
    def eventCreate() -> int:
        return on_host.new_event()

    @staticmethod
    def eventCreateWithFlags(flags: int) -> int:
        return on_host.new_event()

    @staticmethod
    def eventDestroy(event: int) -> None:
        """Streams keep what they need of it."""

    @staticmethod
    def eventRecord(event: int, handle: int) -> None:
        on_host.record(event, handle)

    @staticmethod
    def eventSynchronize(event: int) -> None:
        on_host.wait_for(event)

    @staticmethod
    def eventQuery(event: int) -> int:
        return 0 if on_host.is_done(event) else _NOT_READY

    @staticmethod
    def memcpyAsync(target: int, source: int, size: int, kind: int, handle: int) -> None:
        if kind == _HOST_TO_DEVICE and is_pageable(source):
            # CUDA has read pageable memory when the call returns.
            data = ctypes.string_at(source, size)
            enqueue(handle, lambda: ctypes.memmove(target, data, size))
            return
        enqueue(handle, lambda: ctypes.memmove(target, source, size))
        if kind == _DEVICE_TO_HOST and is_pageable(target):
            on_host.stream_of(handle).run()

    @staticmethod
    def memcpy(target: int, source: int, size: int, kind: int) -> None:
        enqueue(0, lambda: ctypes.memmove(target, source, size))
        on_host.stream_of(0).run()

    @staticmethod
    def memsetAsync(target: int, value: int, size: int, handle: int) -> None:
        enqueue(handle, lambda: ctypes.memset(target, value, size))

    @staticmethod
    def memset(target: int, value: int, size: int) -> None:
        enqueue(0, lambda: ctypes.memset(target, value, size))

    @staticmethod
    def deviceGetPCIBusId(device: int) -> str:
        return f"0000:{device + 1:02x}:00.0"

    @staticmethod
    def getDeviceProperties(device: int) -> dict[str, Any]:
        return {
            "uuid": bytes([device + 1] * 16), "name": b"a simulated GPU", "warpSize": 32, "maxThreadsPerBlock": 1024,
            "multiProcessorCount": 4, "sharedMemPerBlock": 49152, "maxThreadsPerMultiProcessor": 2048, "major": 8,
            "minor": 0,
        }

    @staticmethod
    def deviceCanAccessPeer(device: int, peer: int) -> int:
        return 0

    @staticmethod
    def pointerGetMemoryType(address: int) -> int:
        return 2

    @staticmethod
    def _ensure_context() -> None:
        """There is nothing to make."""


def install() -> None:
    """Put the functions in their places."""
    module = importlib.import_module("cupy_backends.cuda.api.runtime")

    for name, function in vars(Functions).items():
        if isinstance(function, staticmethod):
            replace(module, function.__func__, name)
