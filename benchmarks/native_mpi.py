"""The C loop over MPI_Allreduce: built with the wrapper of the MPI that is loaded, and called in this process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measure import WORLD
from mpi4py import MPI

SOURCE = Path(__file__).parent / "native" / "allreduce.c"

# source, total (the same array: in place), elements of a chunk, calls
NativeAllReduce = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32], int, int], None]


def open_native() -> tuple[NativeAllReduce | None, str]:
    """Collective. The loop and the compiler it was built with; or None and why it cannot be had, on every rank."""
    built = WORLD.bcast(_build() if WORLD.rank == 0 else None)
    if isinstance(built, str):
        return None, built
    content, compiler = built
    before = _mpi_libraries()
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        library = ctypes.CDLL(file.name)
    # A second MPI library in the process would see an MPI that was never initialised, and end the job.
    is_other = WORLD.allreduce(int(_mpi_libraries() != before), MPI.MAX)
    if is_other:
        return None, f"{compiler} links another MPI library than the one that mpi4py has loaded"
    function = library.all_reduce_floats
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_int,
    ]
    communicator = MPI._addressof(WORLD)  # noqa: SLF001 - mpi4py's documented way to the handle

    def all_reduce(source: npt.NDArray[Any], total: npt.NDArray[Any], chunk: int, calls: int) -> None:
        code = function(communicator, source.ctypes.data, total.ctypes.data, total.size, chunk, calls)
        if code:
            raise RuntimeError(f"MPI_Allreduce in C returned {code}")

    return all_reduce, compiler


def _build() -> tuple[bytes, str] | str:
    beside = Path(sys.executable).parent / "mpicc"
    compiler = str(beside) if beside.exists() else shutil.which("mpicc")
    if compiler is None:
        return "there is no mpicc"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "allreduce.so"
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(target), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler}: {error}"
        if done.returncode:
            return f"{compiler} failed: {done.stderr.strip()[-300:]}"
        return target.read_bytes(), compiler


def _mpi_libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/libmpi" in line}
