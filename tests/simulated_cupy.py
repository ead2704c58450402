"""Arrays that behave as CuPy's towards NumPy, in host memory, so that what uses them is tested where there is no GPU.

They refuse to become NumPy arrays by themselves, and to be mixed with them, as CuPy's do: whatever forgets to say where
its arrays lie fails. Of streams, and of all of CUDA but the number of the current GPU, they know nothing; that is
`tests/simulated_cuda.py`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class _Current(threading.local):
    """The GPU that is current: in every thread its own, and at first number 0."""

    device = 0


current = _Current()


class ndarray:  # noqa: N801 - CuPy's name
    __array_priority__ = 100

    def __init__(self, host: Any) -> None:
        self.host = host
        self._device = current.device

    # What CuPy's arrays have of NumPy's.
    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    T = property(lambda self: ndarray(self.host.T))

    @property
    def flags(self) -> Any:
        return SimpleNamespace(c_contiguous=self.host.flags.c_contiguous, f_contiguous=self.host.flags.f_contiguous)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "version": 3}

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.host.ctypes.data)

    def get(self, out: Any = None) -> Any:
        if out is None:
            return self.host.copy()
        out[...] = self.host
        return out

    def set(self, host: Any) -> None:
        self.host[...] = host

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise BufferError("device type 2: NumPy can only view memory of the host")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        # CuPy takes `at`, `reduce` and the like by its own functions only.
        if method != "__call__":
            return NotImplemented
        for value in inputs:
            if hasattr(value, "__array_ufunc__") and not isinstance(value, (ndarray, np.ndarray, np.generic)):
                return NotImplemented
        out = options.pop("out", None)
        if out is not None:
            ufunc(*(_host(value) for value in inputs), out=_host(out[0]), **options)
            return out[0]
        return _wrap(ufunc(*(_host(value) for value in inputs), **options))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        host_args = [_host(value) for value in args]
        host_options = {name: _host(value) for name, value in options.items()}
        result = function(*host_args, **host_options)
        return options.get("out", _wrap(result))

    def __getitem__(self, key: Any) -> Any:
        return _wrap(self.host[_key(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[_key(key)] = _host(value)

    def __len__(self) -> int:
        return len(self.host)

    def __float__(self) -> float:
        return float(self.host)

    def __int__(self) -> int:
        return int(self.host)

    def __bool__(self) -> bool:
        return bool(self.host)

    def __str__(self) -> str:
        return str(self.host)

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"CuPy's arrays, as simulated, have no {name}")
        method = getattr(self.host, name)
        return lambda *args, **options: _wrap(method(*(_host(value) for value in args), **options))


# Of the methods that CuPy's arrays have, those that are used; CuPy has no others under these names.
_METHODS = frozenset((
    "reshape", "view", "astype", "fill", "copy", "tobytes", "sum", "all", "any", "ravel", "max", "min", "argmax", "dot",
))
ndarray.__module__ = "cupy"
for _name, _ufunc in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "pow": np.power,
    "matmul": np.matmul, "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "lt": np.less, "ge": np.greater_equal,
    "le": np.less_equal, "and": np.bitwise_and, "or": np.bitwise_or,
}.items():
    def _binary(self: Any, other: Any, ufunc: np.ufunc = _ufunc) -> Any:
        priority = getattr(other, "__array_priority__", 0)
        if not isinstance(other, (ndarray, np.ndarray)) and priority > self.__array_priority__:
            return NotImplemented
        return ufunc(self, other)

    def _reflected(self: Any, other: Any, ufunc: np.ufunc = _ufunc) -> Any:
        return ufunc(other, self)

    def _in_place(self: Any, other: Any, ufunc: np.ufunc = _ufunc) -> Any:
        return ufunc(self, other, out=self)

    setattr(ndarray, f"__{_name}__", _binary)
    setattr(ndarray, f"__r{_name}__", _reflected)
    setattr(ndarray, f"__i{_name}__", _in_place)
for _name, _ufunc in {"neg": np.negative, "invert": np.invert, "abs": np.absolute}.items():
    setattr(ndarray, f"__{_name}__", lambda self, ufunc=_ufunc: ufunc(self))


def _host(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}: a NumPy array among CuPy's")
    return value


def _key(key: Any) -> Any:
    return tuple(map(_host, key)) if isinstance(key, tuple) else _host(key)


def _wrap(result: Any) -> Any:
    # CuPy gives arrays of no dimensions where NumPy gives numbers.
    return ndarray(np.asarray(result)) if isinstance(result, (np.ndarray, np.generic)) else result


def _make(name: str) -> Any:
    def function(*args: Any, **options: Any) -> Any:
        if name in ("asarray", "ascontiguousarray", "array"):
            return ndarray(getattr(np, name)(args[0].host if isinstance(args[0], ndarray) else args[0],
                                             *args[1:], **options))
        if name in ("concatenate", "stack"):
            return ndarray(getattr(np, name)([_host(part) for part in args[0]], *args[1:], **options))
        out = options.pop("out", None)
        if out is not None:
            getattr(np, name)(*map(_host, args), out=_host(out), **options)
            return out
        return _wrap(getattr(np, name)(*map(_host, args), **options))

    return function


class _Scattering:
    """One of the four functions that CuPy can apply `at` indices."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self.ufunc = ufunc

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.ufunc(*args, **options)

    def at(self, target: ndarray, indices: ndarray, values: ndarray) -> None:
        self.ufunc.at(target.host, _host(indices), _host(values))


@contextmanager
def simulated_cupy() -> Iterator[Any]:
    """A module `cupy` of such arrays, for as long as it is entered."""
    module: Any = ModuleType("cupy")
    module.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=current.device))
    module.ndarray = ndarray
    for name in (
        "asarray", "ascontiguousarray", "array", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like",
        "concatenate", "stack", "moveaxis", "matmul", "sum", "argmax", "where", "broadcast_to", "bincount",
        "searchsorted", "take_along_axis", "argsort", "full_like", "take",
    ):
        setattr(module, name, _make(name))
    for name in (
        "may_share_memory",
        "divide", "add", "multiply", "subtract", "copyto", "sqrt", "square", "exp", "log", "maximum", "minimum", "tanh",
    ):
        setattr(module, name, getattr(np, name))
    for name in ("add", "subtract", "maximum", "minimum"):
        setattr(module, name, _Scattering(getattr(np, name)))
    module.asnumpy = lambda array: array.get()
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
