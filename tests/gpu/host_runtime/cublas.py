"""Products of matrices and sorting by NumPy, in the place of cuBLAS and Thrust."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

from tests.gpu.host_runtime import streams as on_host
from tests.gpu.host_runtime.capsules import replace

# The numbers of cudaDataType.
_TYPES = {0: "f4", 1: "f8", 2: "f2", 4: "c8", 5: "c16"}
_streams: dict[int, int] = {}
_libraries: list[object] = []


def _view(address: int, dtype: Any, count: int) -> Any:
    memory: Any = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def _matrix(address: int, dtype: Any, rows: int, columns: int, leading: int, transposed: int) -> Any:
    """A matrix of columns one behind another; `transposed` is cuBLAS's N, T or C."""
    if transposed:
        rows, columns = columns, rows
    found = _view(address, dtype, leading * columns).reshape(columns, leading).T[:rows]
    return found if not transposed else found.T if transposed == 1 else found.T.conj()


def _multiply(
    handle: int, dtypes: tuple[str, str, str], trans: tuple[int, int], sizes: tuple[int, int, int],
    scales: tuple[int, int], a: tuple[int, int], b: tuple[int, int], c: tuple[int, int],
) -> None:
    m, n, k = sizes
    # The factors are numbers of float32 for products of float16.
    kind = np.dtype("f4") if dtypes[2] == "f2" else np.dtype(dtypes[2])
    alpha, beta = (np.frombuffer(ctypes.string_at(one, kind.itemsize), kind)[0] for one in scales)

    def work() -> None:
        left = _matrix(a[0], dtypes[0], m, k, a[1], trans[0])
        right = _matrix(b[0], dtypes[1], k, n, b[1], trans[1])
        out = _matrix(c[0], dtypes[2], m, n, c[1], 0)
        product = alpha * (left.astype(kind) @ right.astype(kind))
        out[...] = product if beta == 0 else product + beta * out

    on_host.enqueue(_streams.get(handle, 0), work)


class Functions:
    """What replaces the functions of the same names."""

    @staticmethod
    def create() -> int:
        return on_host.new_handle()

    @staticmethod
    def destroy(handle: int) -> None:
        """There is nothing to destroy."""

    @staticmethod
    def setStream(handle: int, stream: int) -> None:
        _streams[handle] = stream

    @staticmethod
    def getStream(handle: int) -> int:
        return _streams.get(handle, 0)

    @staticmethod
    def setPointerMode(handle: int, mode: int) -> None:
        """Factors are in host memory here."""

    @staticmethod
    def getPointerMode(handle: int) -> int:
        return 0

    @staticmethod
    def setMathMode(handle: int, mode: int) -> None:
        """There are no tensor cores."""

    @staticmethod
    def getMathMode(handle: int) -> int:
        return 0

    @staticmethod
    def gemmEx(
        handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int, lda: int,
        b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, compute: int, algorithm: int,
    ) -> None:
        dtypes = (_TYPES[a_type], _TYPES[b_type], _TYPES[c_type])
        _multiply(handle, dtypes, (transa, transb), (m, n, k), (alpha, beta), (a, lda), (b, ldb), (c, ldc))

    @staticmethod
    def sgemm(
        handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, lda: int, b: int, ldb: int,
        beta: int, c: int, ldc: int,
    ) -> None:
        _multiply(handle, ("f4",) * 3, (transa, transb), (m, n, k), (alpha, beta), (a, lda), (b, ldb), (c, ldc))

    @staticmethod
    def dgemm(
        handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, lda: int, b: int, ldb: int,
        beta: int, c: int, ldc: int,
    ) -> None:
        _multiply(handle, ("f8",) * 3, (transa, transb), (m, n, k), (alpha, beta), (a, lda), (b, ldb), (c, ldc))

    @staticmethod
    def sdot(handle: int, n: int, x: int, incx: int, y: int, incy: int, result: int) -> None:
        _dot(handle, "f4", n, x, y, result)

    @staticmethod
    def ddot(handle: int, n: int, x: int, incx: int, y: int, incy: int, result: int) -> None:
        _dot(handle, "f8", n, x, y, result)


def _dot(handle: int, dtype: str, n: int, x: int, y: int, result: int) -> None:
    def work() -> None:
        _view(result, dtype, 1)[0] = _view(x, dtype, n) @ _view(y, dtype, n)

    on_host.enqueue(_streams.get(handle, 0), work)


def install() -> None:
    """Put the functions in their places."""
    pathfinder = importlib.import_module("cuda.pathfinder")

    # CuPy's module is linked against it.
    _libraries.append(pathfinder.load_nvidia_dynamic_lib("cublas"))
    module = importlib.import_module("cupy_backends.cuda.libs.cublas")

    for name, function in vars(Functions).items():
        if isinstance(function, staticmethod):
            replace(module, function.__func__, name)


def replace_thrust() -> None:
    """Let NumPy sort; called when CuPy is loaded."""
    cupy: Any = importlib.import_module("cupy")
    thrust: Any = importlib.import_module("cupy.cuda.thrust")

    def argsort(dtype: Any, indices: int, data: int, keys: int, shape: Any) -> None:
        count = int(np.prod(shape))

        def work() -> None:
            values = _view(data, dtype, count).reshape(shape)
            _view(indices, np.int64, count).reshape(shape)[...] = np.argsort(values, axis=-1, kind="stable")

        on_host.enqueue(cupy.cuda.get_current_stream().ptr, work)

    thrust.argsort = argsort
