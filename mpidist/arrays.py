"""Arrays of any library: in host memory they are viewed as NumPy arrays without a copy, on a GPU as CuPy arrays.

NumPy arrays are recognized first, at almost no cost. This module never imports CuPy, which takes seconds and needs a
driver: a CuPy array can only exist where the program has imported CuPy already.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

import array_api_compat
import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

# DLPack's device types: kDLCPU and kDLCUDAHost; kDLCUDA and kDLCUDAManaged.
_HOST_DEVICES = frozenset((1, 3))
_CUDA_DEVICES = frozenset((2, 13))


def is_cupy(array: object) -> bool:
    """Local. Whether this is a CuPy array, which is in GPU memory."""
    return type(array).__module__.partition(".")[0] == "cupy"


def device_index(array: object) -> int | None:
    """Local. The number of the GPU that holds the array, among the visible ones; None for host memory."""
    return int(cast(Any, array).device.id) if is_cupy(array) else None


def require_current_device(array: AnyArray) -> None:
    """Local. Raise ValueError if an array of CuPy is on another GPU than the current one."""
    found_on, current = device_index(array), int(namespace(array).cuda.Device().id)
    if found_on != current:
        raise ValueError(
            f"expected an array on the current GPU, since a rank computes on one GPU: an array of shape {array.shape} "
            f"is on GPU {found_on} and GPU {current} is current. Call inside `with cupy.cuda.Device({found_on}):`, or "
            f"make the array on GPU {current}"
        )


def use_device(index: int | None) -> None:
    """Local. Make a GPU current in this thread, where each new thread begins on number 0; None changes nothing."""
    if index is not None:
        sys.modules["cupy"].cuda.Device(index).use()


def namespace(array: object) -> Any:
    """Local. The module whose functions make and combine such arrays: `numpy` or `cupy`."""
    return sys.modules["cupy"] if is_cupy(array) else np


def gpu_namespace() -> Any:
    """Local. The module `cupy`. It is loaded already where a GPU is bound or a CuPy array exists."""
    if "cupy" not in sys.modules:
        raise RuntimeError(
            "arrays on a GPU need CuPy and a bound GPU, but no GPU is bound: select one with devices=['GPU:0'] or "
            "MPIDIST_DEVICE=gpu"
        )
    return sys.modules["cupy"]


def lend(array: object) -> AnyArray:
    """Local. A NumPy or CuPy array over the memory of any array.

    Args:
        array: An array of NumPy, CuPy, or any library that supports DLPack (PyTorch, JAX, ...).

    Returns:
        `array` itself, or a view of it. The view is read-only where the array's library demands it, as JAX does. Of a
        NumPy scalar, which has no memory to view, it is a read-only copy.

    Raises:
        TypeError: `array` is not an array, or NumPy and CuPy cannot view it: for example a PyTorch tensor that records
            gradients.
    """
    if is_cupy(array):
        return cast(AnyArray, array)
    if isinstance(array, np.ndarray):
        # Subclasses such as matrix and masked array have another meaning of arithmetic; the plain view has not.
        return array.view(np.ndarray)
    if isinstance(array, np.generic):
        # A copy: what is written to it would not reach the scalar.
        copy: AnyArray = np.asarray(array)
        copy.flags.writeable = False
        return copy
    device = getattr(array, "__dlpack_device__", None)
    if device is None:
        raise TypeError(
            f"expected an array of NumPy, CuPy or any library that supports DLPack, got {type(array).__name__}. "
            "Convert it with np.asarray(value)"
        )
    kind = int(device()[0])
    if kind in _CUDA_DEVICES:
        cupy = sys.modules.get("cupy")
        if cupy is None:
            raise TypeError(
                f"{type(array).__module__}.{type(array).__name__} is in GPU memory, and only CuPy can view it there. "
                "Import cupy first, or move the array to the host"
            )
        return cast(AnyArray, cupy.from_dlpack(array))
    if kind not in _HOST_DEVICES:
        raise TypeError(
            f"expected an array in host memory or on a CUDA GPU, got a {type(array).__name__} on a device of DLPack "
            f"type {kind}. Move it to the host"
        )
    try:
        if _is_bfloat16(array):
            return np.from_dlpack(_viewed(array, "int16")).view("bfloat16")
        return np.from_dlpack(cast(Any, array))
    except (BufferError, ImportError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"NumPy cannot view a {type(array).__module__}.{type(array).__name__} of dtype "
            f"{getattr(array, 'dtype', '?')} without a copy: {error}"
        ) from error


def give_back(result: AnyArray, like: object) -> Any:
    """Local. A result as an array of the library of `like`, over the same memory; read-only memory is copied."""
    if type(result) is type(like) or isinstance(like, (np.ndarray, np.generic)):
        return result
    # Before version 1.0 DLPack cannot mark memory as read-only, so NumPy refuses to export such an array.
    if not getattr(result.flags, "writeable", True):
        result = result.copy()
    library = array_api_compat.array_namespace(like)
    if result.dtype.name == "bfloat16":
        return _viewed(library.from_dlpack(result.view(np.int16)), "bfloat16")
    return library.from_dlpack(result)


def _is_bfloat16(array: object) -> bool:
    """Whether an array of another library is of bfloat16, which DLPack does not bring to NumPy."""
    is_it = str(getattr(array, "dtype", "")).rpartition(".")[2] == "bfloat16"
    if is_it:
        # NumPy knows the name bfloat16 only after this import.
        importlib.import_module("ml_dtypes")
    return is_it


def _viewed(array: Any, dtype_name: str) -> Any:
    """The memory of an array of another library as one of another dtype of the same size."""
    return array.view(getattr(array_api_compat.array_namespace(array), dtype_name))


def as_array(value: Any) -> AnyArray:
    """Local. `np.asarray(value)`; of an array that NumPy cannot convert, CuPy's for instance, what `lend` gives.

    Raises:
        TypeError: A masked array hides some of its numbers, which would count here.
    """
    if type(value) is np.ndarray:
        return value
    if is_cupy(value):
        return cast(AnyArray, value)
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray) and masked.is_masked(value):
        raise TypeError(
            f"expected an array without a mask, got one of shape {value.shape} of which {np.sum(value.mask)} numbers "
            "are masked. Say what counts in their place: `array.filled(0)` for instance"
        )
    try:
        array = np.asarray(value)
    except TypeError:
        # NumPy gets PyTorch's bfloat16 by DLPack only.
        if not _is_bfloat16(value):
            raise
        return lend(value)
    # NumPy makes an object array of unknown types.
    is_unknown = array.dtype.hasobject and not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__")
    return lend(value) if is_unknown else array


def as_bytes(array: AnyArray) -> AnyArray:
    """Local. The bytes of a C-contiguous array as a flat uint8 array over the same memory."""
    return cast(AnyArray, array.reshape(-1).view(np.uint8))


def to_host(array: AnyArray) -> AnyArray:
    """Local. The array itself, or a copy in host memory of an array on a GPU; it waits until the GPU has made it."""
    return cast(AnyArray, cast(Any, array).get()) if is_cupy(array) else array


def move(array: AnyArray, xp: Any) -> AnyArray:
    """Local. The array in the memory that the namespace `xp` uses: itself, or a copy on the current GPU.

    Raises:
        TypeError: The array is on a GPU and `xp` is NumPy. Such a copy waits for the GPU, so the program must ask for
            it.
    """
    if is_cupy(array) == (xp is not np):
        return array
    if xp is np:
        raise TypeError(
            f"an array of shape {array.shape} is in GPU memory, but is used with arrays in host memory. Move it with "
            ".get(), or make the variables under a strategy on GPUs"
        )
    return cast(AnyArray, xp.asarray(array))


def wait_for_device(array: object) -> None:
    """Local. Wait until all kernels on the current stream are done, so that the array has its values.

    Call it before MPI gets a pointer to GPU memory: MPI ignores streams, and would send what the memory holds
    before the kernels have run.
    """
    if is_cupy(array):
        sys.modules["cupy"].cuda.get_current_stream().synchronize()
