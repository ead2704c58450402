"""Arrays that behave as CuPy's towards NumPy, in host memory, so that what uses them is tested where there is no GPU.

They refuse to become NumPy arrays by themselves, and to be mixed with them, as CuPy's do: whatever forgets to say where
its arrays lie fails. Of streams, and of CUDA, they know nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class ndarray:  # noqa: N801 - CuPy's name
    __array_priority__ = 100

    def __init__(self, host: Any) -> None:
        self.host = host

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
        return SimpleNamespace(id=0)

    def get(self, out: Any = None) -> Any:
        if out is None:
            return self.host.copy()
        out[...] = self.host
        return out

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "at":
            target, *others = (_host(value) for value in inputs)
            ufunc.at(target, *others)
            return None
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

    def __bool__(self) -> bool:
        return bool(self.host)

    def __str__(self) -> str:
        return str(self.host)

    def __getattr__(self, name: str) -> Any:
        if name not in ("reshape", "view", "astype", "fill", "copy", "tobytes", "sum", "all", "any", "ravel"):
            raise AttributeError(f"CuPy's arrays, as simulated, have no {name}")
        method = getattr(self.host, name)
        return lambda *args, **options: _wrap(method(*(_host(value) for value in args), **options))


ndarray.__module__ = "cupy"
for _name, _ufunc in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "pow": np.power,
    "matmul": np.matmul, "eq": np.equal, "gt": np.greater, "lt": np.less,
}.items():
    def _binary(self: Any, other: Any, ufunc: np.ufunc = _ufunc) -> Any:
        priority = getattr(other, "__array_priority__", 0)
        if not isinstance(other, (ndarray, np.ndarray)) and priority > self.__array_priority__:
            return NotImplemented
        return ufunc(self, other)

    def _reflected(self: Any, other: Any, ufunc: np.ufunc = _ufunc) -> Any:
        return ufunc(other, self)

    setattr(ndarray, f"__{_name}__", _binary)
    setattr(ndarray, f"__r{_name}__", _reflected)
setattr(ndarray, "__neg__", lambda self: _binary(self, -1, np.multiply))  # noqa: B010


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
        return _wrap(getattr(np, name)(*map(_host, args), **options))

    return function


@contextmanager
def simulated_cupy() -> Iterator[Any]:
    """A module `cupy` of such arrays, for as long as it is entered."""
    module: Any = ModuleType("cupy")
    module.ndarray = ndarray
    for name in (
        "asarray", "ascontiguousarray", "array", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like",
        "concatenate", "stack", "moveaxis", "matmul",
    ):
        setattr(module, name, _make(name))
    for name in ("divide", "add", "multiply", "subtract", "copyto", "sqrt", "square"):
        setattr(module, name, getattr(np, name))
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
