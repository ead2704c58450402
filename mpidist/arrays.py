"""Arrays of any library: those in host memory are lent to NumPy without a copy, those on a GPU stay what they are.

NumPy's come first and cost nothing. CuPy is never imported here: an array of its kind can only exist where the
program has imported it.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import array_api_compat
import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

# DLPack's numbers of devices: kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged.
_HOST_DEVICES = frozenset((1, 3))
_CUDA_DEVICES = frozenset((2, 13))


def is_cupy(array: object) -> bool:
    """Local. Whether this is an array of CuPy, that is in GPU memory."""
    return type(array).__module__.partition(".")[0] == "cupy"


def device_index(array: object) -> int | None:
    """Local. The number of the GPU, among the visible ones, on which a CuPy array lies; None for host memory."""
    return int(cast(Any, array).device.id) if is_cupy(array) else None


def namespace(array: object) -> Any:
    """Local. The module whose functions make and combine such arrays: `numpy`, or `cupy`."""
    return sys.modules["cupy"] if is_cupy(array) else np


def gpu_namespace() -> Any:
    """Local. CuPy, which is loaded where a GPU was bound."""
    return sys.modules["cupy"]


def lend(array: object) -> AnyArray:
    """Local. The array as NumPy's or CuPy's, over the same memory.

    Args:
        array: NumPy's, CuPy's, or any that speaks DLPack (PyTorch, JAX, ...).

    Returns:
        `array` itself, or a view of it. Read-only where its library says so, as JAX does.

    Raises:
        TypeError: Something that is no array, or that NumPy cannot look at: a GPU array of another library, or one
            that records gradients.
    """
    if is_cupy(array):
        return cast(AnyArray, array)
    if isinstance(array, np.ndarray):
        # A matrix or a masked array is taken as the plain array that it holds.
        return array.view(np.ndarray)
    if isinstance(array, np.generic):
        return np.asarray(array)
    device = getattr(array, "__dlpack_device__", None)
    if device is None:
        raise TypeError(
            f"expected an array of NumPy, CuPy or any library that speaks DLPack, got {type(array).__name__}: "
            "use np.asarray(value)"
        )
    kind = int(device()[0])
    if kind in _CUDA_DEVICES:
        cupy = sys.modules.get("cupy")
        if cupy is None:
            raise TypeError(
                f"{type(array).__module__}.{type(array).__name__} lies in GPU memory, which is reached through CuPy: "
                "`import cupy` first, or move it to the host"
            )
        return cast(AnyArray, cupy.from_dlpack(array))
    if kind not in _HOST_DEVICES:
        raise TypeError(f"{type(array).__name__} lies on a device of DLPack's kind {kind}; move it to the host")
    try:
        return np.from_dlpack(cast(Any, array))
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"{type(array).__module__}.{type(array).__name__} of dtype {getattr(array, 'dtype', '?')} cannot be seen "
            f"by NumPy without a copy: {error}"
        ) from error


def give_back(result: AnyArray, like: object) -> Any:
    """Local. A result as an array of the library of `like`, over the same memory unless it is read-only."""
    if type(result) is type(like) or isinstance(like, (np.ndarray, np.generic)):
        return result
    # Before its version 1 DLPack cannot say that memory must not be written to, and NumPy refuses.
    if not getattr(result.flags, "writeable", True):
        result = result.copy()
    return array_api_compat.array_namespace(like).from_dlpack(result)


def as_array(value: Any) -> AnyArray:
    """Local. NumPy's or CuPy's array of a value: `np.asarray`, which refuses CuPy's."""
    return cast(AnyArray, value) if is_cupy(value) else np.asarray(value)


def as_bytes(array: AnyArray) -> AnyArray:
    """Local. The bytes of a C-contiguous array as a flat uint8 array over the same memory."""
    return cast(AnyArray, array.reshape(-1).view(np.uint8))


def to_host(array: AnyArray) -> AnyArray:
    """Local. The array itself, or a copy in host memory of one that lies on a GPU, when the GPU is done with it."""
    return cast(AnyArray, cast(Any, array).get()) if is_cupy(array) else array


def move(array: AnyArray, xp: Any) -> AnyArray:
    """Local. An array where those of the namespace `xp` lie: itself, or a copy on the current GPU.

    Raises:
        TypeError: It lies on a GPU and `xp` is NumPy: a copy that waits for the GPU is for the program to ask for.
    """
    if is_cupy(array) == (xp is not np):
        return array
    if xp is np:
        raise TypeError(
            f"an array of shape {array.shape} lies in GPU memory, and what takes it lies in host memory: move it with "
            ".get(), or make the variables under a strategy on GPUs"
        )
    return cast(AnyArray, xp.asarray(array))


def wait_for_device(array: object) -> None:
    """Local. Return when the kernels that were started on the current stream, and so the array, are done.

    MPI knows nothing of streams: it must not be given a pointer before.
    """
    if is_cupy(array):
        sys.modules["cupy"].cuda.get_current_stream().synchronize()
