"""The real CuPy on host memory, without a driver and a GPU: CUDA's runtime, kernels and cuBLAS in its place.

What is proven with it: every call of CuPy's own code, the order of streams and of memory that is used again, and the
values of all kernels. What is not: CUDA itself, and speed.

`install()` before CuPy is imported; `python tests/gpu/host_runtime/__main__.py PROGRAM ARGUMENT...` for programs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from tests.gpu.host_runtime import cublas, driver, nccl, runtime, streams


def why_not() -> str | None:
    """Return the reason why CuPy cannot run here on host memory."""
    if importlib.util.find_spec("cupy") is None:
        return "needs CuPy"
    return None if driver.COMPILER else "needs g++"


def install() -> None:
    """Make CuPy run on host memory in this process. CuPy must not be imported yet."""
    if "cupy" in sys.modules:
        raise RuntimeError("CuPy is imported already")
    # CuPy's own kernels, whose sources are templates of CUB, cannot be compiled by g++; those of accelerators neither.
    os.environ["CUPY_ACCELERATORS"] = ""
    # The user's cache has binaries for GPUs.
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    runtime.install()
    cublas.install()
    driver.install()
    importlib.import_module("cupy")
    driver.replace_compiler()
    cublas.replace_thrust()
    nccl.replace_nccl()
    devices: Any = importlib.import_module("mpidist.cluster.devices.names")
    devices._installed_gpus = lambda _: streams.COUNT
