"""CUDA through CuPy: copiers for the staged backend, the NCCL library, and properties of this rank's GPU.

No other module imports CuPy. It is loaded by name where CuPy arrays or a GPU are in use.
"""

from __future__ import annotations

import functools
import importlib
import logging
import socket
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, cast

import cupy
import numpy as np
from cupy.cuda import runtime

from mpidist.arrays import AnyArray, require_current_device
from mpidist.comm.gpu.staging_copier import Ticket

__all__ = [
    "BucketCopier", "PinnedCopier", "current_device", "current_stream", "device_address", "device_bus",
    "device_count", "device_uuid", "elementwise_kernel", "fetch", "is_exclusive", "load_nccl", "lock_pages",
    "send", "synchronize", "use_device",
]


logger = logging.getLogger("mpidist")

_COMPUTE_MODE = 20


class _CudaCopier:
    """Copies on two streams, one for each direction, that wait for the program's stream and that it waits for."""

    _KIND_IN: int
    _KIND_OUT: int

    def __init__(self, like: AnyArray, *, non_blocking: bool) -> None:
        require_current_device(like)
        self._in = cupy.cuda.Stream(non_blocking=non_blocking)
        self._out = cupy.cuda.Stream(non_blocking=non_blocking)
        self._begun = cupy.cuda.Event(disable_timing=True)
        self._ended = cupy.cuda.Event(disable_timing=True)

    def begin(self) -> None:
        """Local. See `StagingCopier.begin`."""
        self._begun.record(cupy.cuda.get_current_stream())
        self._in.wait_event(self._begun)
        # A target may be in memory that kernels of the program's stream still use: CuPy's pool gives freed memory away
        # at once, since it expects further work on the same stream.
        self._out.wait_event(self._begun)

    def end(self) -> None:
        """Local. See `StagingCopier.end`."""
        self._ended.record(self._out)
        cupy.cuda.get_current_stream().wait_event(self._ended)

    def copy_to_room(self, sources: Sequence[AnyArray], room: AnyArray) -> Ticket:
        """Local. See `StagingCopier.copy_to_room`."""
        at = _address(room)
        for source in sources:
            if source.nbytes:
                require_current_device(source)
                runtime.memcpyAsync(at, _address(source), source.nbytes, self._KIND_IN, self._in.ptr)
                at += source.nbytes
        return _record(self._in)

    def copy_from_room(self, room: AnyArray, targets: Sequence[AnyArray]) -> Ticket:
        """Local. See `StagingCopier.copy_from_room`."""
        at = _address(room)
        for target in targets:
            if target.nbytes:
                require_current_device(target)
                runtime.memcpyAsync(_address(target), at, target.nbytes, self._KIND_OUT, self._out.ptr)
                at += target.nbytes
        return _record(self._out)

    def wait(self, ticket: Ticket) -> None:
        """Local. See `StagingCopier.wait`."""
        ticket.synchronize()


class PinnedCopier(_CudaCopier):
    """Local. Buffers in pinned host memory. Copies between them and a GPU overlap with each other and with host work.

    Args:
        like: A CuPy array on the current device.
    """

    _KIND_IN = runtime.memcpyDeviceToHost
    _KIND_OUT = runtime.memcpyHostToDevice

    def __init__(self, like: AnyArray) -> None:
        super().__init__(like, non_blocking=True)

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. See `StagingCopier.allocate`."""
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(byte_count), np.uint8, byte_count)


class BucketCopier(_CudaCopier):
    """Local. Rooms in GPU memory, for an MPI that takes device pointers.

    Rooms come from cudaMalloc. An asynchronous allocator's memory cannot be shared by CUDA IPC. CuPy's pool would give
    many addresses, and MPI keeps a handle for every address that it has seen.

    Args:
        like: A CuPy array on the current device.
    """

    _KIND_IN = runtime.memcpyDeviceToDevice
    _KIND_OUT = runtime.memcpyDeviceToDevice

    def __init__(self, like: AnyArray) -> None:
        # Blocking streams wait for the default stream, on which MPI may still copy when its call has returned.
        super().__init__(like, non_blocking=False)

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. See `StagingCopier.allocate`."""
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(byte_count), 0)
        room: AnyArray = cupy.ndarray((byte_count,), np.uint8, memptr=pointer)
        return room


def device_count() -> int:
    """Local. Number of visible GPUs, 0 if there is no driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def current_device() -> int:
    """Local. Number of the current GPU among the visible ones."""
    return int(cupy.cuda.Device().id)


def use_device(index: int) -> None:
    """Local. Make a GPU current and create its context, before MPI can choose another GPU."""
    cupy.cuda.Device(index).use()
    # Frees nothing, but it is a call that needs a context, and so it creates one.
    runtime.free(0)


def device_uuid(index: int) -> str:
    """Local. A name for a GPU that is the same on every rank and different from those of all other GPUs."""
    uuid = runtime.getDeviceProperties(index).get("uuid")
    # The bus alone does not identify a GPU: instances of one GPU (MIG) share it, and every host counts from 0.
    return f"{uuid.hex() if uuid else socket.gethostname()}/{runtime.deviceGetPCIBusId(index)}"


def device_bus(index: int) -> str:
    """Local. The place of a GPU on its host; instances of one GPU (MIG) have the same."""
    return str(runtime.deviceGetPCIBusId(index))


def is_exclusive(index: int) -> bool:
    """Local. Whether a GPU takes one process at a time. No CUDA context is created."""
    # cudaDevAttrComputeMode: 1 and 3 are the exclusive modes.
    return int(runtime.deviceGetAttribute(_COMPUTE_MODE, index)) in (1, 3)


def current_stream() -> int:
    """Local. The address of the program's current stream."""
    return int(cupy.cuda.get_current_stream().ptr)


def synchronize(index: int) -> None:
    """Local. Return when all work on a GPU is done."""
    cupy.cuda.Device(index).synchronize()


@functools.cache
def load_nccl() -> Any:
    """Local. CuPy's module for NCCL. Its `available` is False where the library is missing.

    The first call loads the library, which takes time and memory.
    """
    with warnings.catch_warnings():
        # CuPy warns where the library is missing; the log of the chosen transport says it once.
        warnings.simplefilter("ignore")
        return importlib.import_module("cupy.cuda.nccl")


def lock_pages(memory: AnyArray) -> None:
    """Local. Page-lock host memory for as long as the array lives, so that the GPU itself copies from and to it.

    Where CUDA refuses, copies are slower, and nothing else changes.

    Args:
        memory: An array that views no other one.
    """
    address = memory.ctypes.data
    try:
        runtime.hostRegister(address, memory.nbytes, 0)
    except runtime.CUDARuntimeError as error:
        logger.info("%d bytes of host memory stay pageable, so copies to the GPU are slower: %s", memory.nbytes, error)
        return
    # Before the memory is freed: the address may be that of other memory afterwards.
    weakref.finalize(memory, runtime.hostUnregister, address).atexit = False


def send(source: AnyArray) -> tuple[AnyArray, Ticket]:
    """Local. A copy of an array on the current GPU, and a ticket to wait for before the source is written again."""
    copy = cupy.empty(source.shape, source.dtype)
    stream = cupy.cuda.get_current_stream()
    # On the program's stream: the copy's memory may be what a kernel of that stream still uses.
    copy.set(source, stream=stream)
    return copy, _record(stream)


def fetch(source: AnyArray, target: AnyArray) -> None:
    """Local. Copy an array of the current GPU into one in host memory, of the same shape and dtype; wait for it."""
    require_current_device(source)
    cast(Any, cupy.ascontiguousarray(source)).get(out=target)


def device_address(array: AnyArray) -> int:
    """Local. The address at which an array begins in the memory of the current GPU.

    Raises:
        TypeError: The array is in host memory.
        ValueError: The array is on another GPU.
    """
    if not isinstance(array, cupy.ndarray):
        raise TypeError(
            "NCCL combines arrays in GPU memory, got one in host memory: choose the implementation AUTO, which uses "
            "NCCL for CuPy arrays and MPI for others, or pass a CuPy array"
        )
    require_current_device(array)
    return _address(array)


def elementwise_kernel(inputs: Sequence[str], outputs: Sequence[str], body: str) -> Any:
    """Local. A kernel over the elements `i` of its arrays; call it with all arguments and `size=`.

    Args:
        inputs: Parameters as CuPy declares them, "T x" or "raw T x".
        outputs: See `inputs`. The caller passes them, and the kernel may read them.
        body: CUDA C++ code for one element. Products and sums are not fused. CuPy's own option `-ftz=true` makes
            subnormal float32 numbers 0.
    """
    return cupy.ElementwiseKernel(
        ", ".join(inputs), ", ".join(outputs), body, "mpidist_update", options=("--fmad=false",), no_return=True
    )


def _address(array: Any) -> int:
    """The address of the array's memory, on the GPU or the host."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _record(stream: Any) -> Ticket:
    event: Ticket = cupy.cuda.Event(disable_timing=True)
    event.record(stream)  # type: ignore[attr-defined]  # a Ticket only to the callers
    return event
