"""Kernels on the CPU: what CuPy gives to NVRTC is compiled by g++, and every thread of every block runs in turn.

A library is kept by the hash of all that it was made of. Threads that wait for each other (`__syncthreads`) are fibers.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.host_runtime import streams as on_host
from tests.gpu.host_runtime.capsules import replace

COMPILER = shutil.which("g++")
INCLUDE = Path(__file__).resolve().parent / "include"
FOLDER = "MPIDIST_TEST_KERNELS"
_OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-w", "-fpermissive")

_modules: dict[int, Any] = {}
_functions: dict[int, tuple[Any, Any, list[int]]] = {}
launched: list[str] = []


@functools.cache
def _folder() -> Path:
    """The folder of kernels, with the compiled headers."""
    if COMPILER is None:
        raise OSError("kernels need g++ here")
    cupy: Any = importlib.import_module("cupy")

    parts = [path.read_bytes() for path in sorted(INCLUDE.rglob("*")) if path.is_file()]
    told = b"\0".join((*parts, cupy.__file__.encode(), cupy.__version__.encode(), " ".join(_OPTIONS).encode()))
    base = os.environ.get(FOLDER) or f"{tempfile.gettempdir()}/mpidist-kernels-{os.getuid()}"
    folder = Path(base, hashlib.sha256(told).hexdigest()[:16])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make(folder / "host.h.gch", [*_includes(), "-x", "c++-header", str(INCLUDE / "host.h")])
    return folder


def _includes() -> list[str]:
    cupy: Any = importlib.import_module("cupy")

    return [f"-I{INCLUDE}", f"-I{Path(cupy.__file__).parent / '_core' / 'include'}"]


def _make(path: Path, arguments: list[str]) -> None:
    """Run the compiler unless the file is there. Of ranks that want the same, one runs it and the others wait."""
    if path.exists():
        return
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        own = path.with_name(f"{path.name}.{os.getpid()}")
        done = subprocess.run(
            [str(COMPILER), *_OPTIONS, *arguments, "-o", str(own)], capture_output=True, text=True, timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"g++ cannot compile {arguments[-1]}:\n{done.stderr[:4000]}")
        own.replace(path)


def _compile(source: str) -> Path:
    """Return the library of a kernel's source."""
    names = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(\w+\)\s*)?(\w+)\s*\(", source)
    has_barrier = "__sync" in source or "__shfl" in source
    added = "".join(f"MPIDIST_LAUNCHER({name}, {str(has_barrier).lower()})\n" for name in names)
    text = source + "\n" + added
    folder = _folder()
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        # The compiled header is taken only if it lies beside the name that is included.
        written = path.with_suffix(f".{os.getpid()}.cpp")
        written.write_text(text)
        _make(path, ["-shared", "-include", str(folder / "host.h"), *_includes(), str(written)])
        written.unlink()
    return path


class Functions:
    """What replaces the functions of the same names."""

    @staticmethod
    def moduleLoadData(binary: bytes) -> int:
        handle = on_host.new_handle()
        _modules[handle] = ctypes.CDLL(binary.decode())
        return handle

    @staticmethod
    def moduleUnload(module: int) -> None:
        """Libraries stay."""

    @staticmethod
    def moduleGetFunction(module: int, name: str) -> int:
        library = _modules[module]
        sizes = (ctypes.c_size_t * 256)()
        count = getattr(library, f"mpidist_sizes_{name}")(sizes)
        run = getattr(library, f"mpidist_run_{name}")
        run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        handle = on_host.new_handle()
        _functions[handle] = (name, run, list(sizes[:count]))
        return handle

    @staticmethod
    def launchKernel(
        function: int, grid_x: int, grid_y: int, grid_z: int, block_x: int, block_y: int, block_z: int, shared: int,
        stream: int, parameters: int, extra: int,
    ) -> None:
        name, run, sizes = _functions[function]
        addresses = (ctypes.c_void_p * len(sizes)).from_address(parameters) if sizes else ()
        # CUDA copies the arguments in the call.
        values = [ctypes.create_string_buffer(ctypes.string_at(at, size), size)
                  for at, size in zip(addresses, sizes, strict=True)]
        for value in values:
            # Arrays and plain pointers begin with the address.
            if len(value) >= 8:
                device = on_host.memory.device_of(int.from_bytes(value.raw[:8], "little"))
                if device not in (None, on_host.thread.device):
                    raise RuntimeError(f"{name} runs on GPU {on_host.thread.device}, and got memory of GPU {device}")
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
        dimensions = (ctypes.c_uint * 6)(grid_x, grid_y, grid_z, block_x, block_y, block_z)
        launched.append(name)

        def work() -> None:
            run(ctypes.addressof(dimensions), ctypes.addressof(pointers))
            values.clear()

        on_host.enqueue(stream, work)

    @staticmethod
    def ctxGetCurrent() -> int:
        return 1

    @staticmethod
    def ctxGetDevice() -> int:
        return on_host.thread.device

    @staticmethod
    def funcGetAttribute(attribute: int, function: int) -> int:
        return 1024

    @staticmethod
    def occupancyMaxActiveBlocksPerMultiprocessor(function: int, size: int, shared: int) -> int:
        return 1


def install() -> None:
    """Put the functions in their places."""
    module = importlib.import_module("cupy_backends.cuda.api.driver")

    for name, function in vars(Functions).items():
        if isinstance(function, staticmethod):
            replace(module, function.__func__, name)


def replace_compiler() -> None:
    """Let CuPy take its sources for compiled; called when CuPy is loaded."""
    compiler: Any = importlib.import_module("cupy.cuda.compiler")

    def compile_using_nvrtc(
        source: str, options: Any = (), arch: Any = None, filename: str = "", name_expressions: Any = None,
        *others: Any, **more: Any,
    ) -> tuple[bytes, dict[str, str]]:
        return str(_compile(source)).encode(), {name: name for name in name_expressions or ()}

    compiler._compile_using_nvrtc_no_warning = compile_using_nvrtc
    compiler._preprocess = lambda *_, **__: ""
