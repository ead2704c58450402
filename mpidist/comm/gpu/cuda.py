"""CUDA through CuPy: rooms and copies for the staged collective, NCCL's library, and which GPU this is.

The only module that imports CuPy; loaded by name, where arrays of CuPy's or a GPU were asked for. Untested on a GPU.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl, runtime

from mpidist.arrays import AnyArray
from mpidist.comm.gpu.staging_copier import Ticket

__all__ = [
    "BucketCopier", "PinnedCopier", "current_device", "current_stream", "device_address", "device_count",
    "device_uuid", "elementwise_kernel", "nccl", "require_current_device", "synchronize", "use_device",
]


class _CudaCarrier:
    """Copies on two streams of our own, one for each direction, ordered after and before the program's stream."""

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
        # A target may lie in memory that the program's stream has only just given up.
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


class PinnedCopier(_CudaCarrier):
    """Rooms in pinned host memory: copies between them and a GPU overlap with each other and with the host's work.

    Local. Args:
        like: A CuPy array on the current device.
    """

    _KIND_IN = runtime.memcpyDeviceToHost
    _KIND_OUT = runtime.memcpyHostToDevice

    def __init__(self, like: AnyArray) -> None:
        super().__init__(like, non_blocking=True)

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. See `StagingCopier.allocate`."""
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(byte_count), np.uint8, byte_count)


class BucketCopier(_CudaCarrier):
    """Rooms in GPU memory of their own, for an MPI that takes device pointers.

    They come from cudaMalloc, not from CuPy's pool nor from an asynchronous allocator: CUDA IPC cannot share the
    latter, and MPI keeps a handle for every address that it has ever seen.

    Local. Args:
        like: A CuPy array on the current device.
    """

    _KIND_IN = runtime.memcpyDeviceToDevice
    _KIND_OUT = runtime.memcpyDeviceToDevice

    def __init__(self, like: AnyArray) -> None:
        # Streams that wait for the default stream, on which an MPI may copy without waiting for the copy's end.
        super().__init__(like, non_blocking=False)

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. See `StagingCopier.allocate`."""
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(byte_count), 0)
        room: AnyArray = cupy.ndarray((byte_count,), np.uint8, memptr=pointer)
        return room


def device_count() -> int:
    """Local. Number of visible GPUs; 0 where there is no driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def current_device() -> int:
    """Local. Number of the GPU, among the visible ones, that is current."""
    return int(cupy.cuda.Device().id)


def use_device(index: int) -> None:
    """Local. Make a GPU current, and create its context, before MPI could choose another one."""
    cupy.cuda.Device(index).use()
    # Frees nothing: the first call that needs a context creates it.
    runtime.free(0)


def device_uuid(index: int) -> str:
    """Local. What names a GPU on every rank, whatever is visible there."""
    uuid = runtime.getDeviceProperties(index).get("uuid")
    # The bus is the same for the parts of a GPU (MIG), and on other hosts there is one of its number, too.
    return f"{uuid.hex() if uuid else socket.gethostname()}/{runtime.deviceGetPCIBusId(index)}"


def current_stream() -> int:
    """Local. The handle of the program's current stream."""
    return int(cupy.cuda.get_current_stream().ptr)


def synchronize(index: int) -> None:
    """Local. Return when all that was started on a GPU is done."""
    cupy.cuda.Device(index).synchronize()


def require_current_device(array: AnyArray) -> None:
    """Local. Raise ValueError where an array lies on another GPU than the current one."""
    lies_on, current = int(array.device.id), current_device()  # type: ignore[attr-defined]  # CuPy: an index
    if lies_on != current:
        raise ValueError(
            f"an array of shape {array.shape} lies on GPU {lies_on} and GPU {current} is current: one rank computes on "
            f"one GPU. Call inside `with cupy.cuda.Device({lies_on}):`, or make the array on GPU {current}"
        )


def device_address(array: AnyArray) -> int:
    """Local. Where an array begins in the memory of the current GPU.

    Raises:
        TypeError: It lies in host memory.
        ValueError: It lies on another GPU.
    """
    if not isinstance(array, cupy.ndarray):
        raise TypeError(
            "NCCL combines arrays in GPU memory, got one in host memory: choose the implementation AUTO, which takes "
            "NCCL for CuPy arrays and MPI for others, or make it a CuPy array"
        )
    require_current_device(array)
    return _address(array)


def elementwise_kernel(inputs: Sequence[str], outputs: Sequence[str], body: str) -> Any:
    """Local. A kernel over the elements number `i` of its arrays; called with all arguments and `size=`.

    Args:
        inputs: Parameters of CuPy's form, "T x" or "raw T x".
        outputs: As `inputs`; they are given by the caller, and may be read.
        body: CUDA C++ for one element. Products and sums are not contracted: the bits are those of a CPU.
    """
    return cupy.ElementwiseKernel(
        ", ".join(inputs), ", ".join(outputs), body, "mpidist_update", options=("--fmad=false",), no_return=True
    )


def _address(array: Any) -> int:
    """Where the array's memory begins, on the GPU or the host."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _record(stream: Any) -> Ticket:
    event: Ticket = cupy.cuda.Event(disable_timing=True)
    event.record(stream)  # type: ignore[attr-defined]  # a Ticket only to the callers
    return event
