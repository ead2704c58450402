"""The installed CuPy has all that is called of it, with these arguments. No GPU is needed."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

# Methods of NCCL's communicator, and what they are called with.
NCCL = {
    "allReduce": "sendbuf recvbuf count datatype op stream", "reduce": "sendbuf recvbuf count datatype op root stream",
    "reduceScatter": "sendbuf recvbuf recvcount datatype op stream",
    "broadcast": "sendbuf recvbuf count datatype root stream",
    "allGather": "sendbuf recvbuf count datatype stream", "send": "sendbuf count datatype peer stream",
    "recv": "recvbuf count datatype peer stream", "abort": "", "destroy": "", "device_id": "", "check_async_error": "",
}
RUNTIME = {
    "memcpyAsync": 5, "getDeviceCount": 0, "free": 1, "getDeviceProperties": 1, "deviceGetPCIBusId": 1,
    "deviceGetAttribute": 2,
}


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="needs CuPy")


@pytest.fixture
def nccl(cupy: Any) -> Any:
    module: Any = importlib.import_module("cupy.cuda.nccl")
    return getattr(module, "real", module)


@pytest.mark.parametrize("name", NCCL)
def test_nccls_methods(nccl: Any, name: str) -> None:
    found = _parameters(getattr(nccl.NcclCommunicator, name))
    assert [one.replace("buff", "buf") for one in found] == NCCL[name].split()


def test_nccls_functions_and_numbers(nccl: Any) -> None:
    assert nccl.available
    for name in ("get_unique_id", "groupStart", "groupEnd", "NcclCommunicator"):
        assert callable(getattr(nccl, name))
    backend: Any = importlib.import_module("mpidist.comm.gpu.nccl")
    for name in {*backend._OPERATIONS.values(), *backend._TYPES.values()} - {"NCCL_BFLOAT16"}:
        assert isinstance(getattr(nccl, name), int), name


@pytest.mark.parametrize("name", RUNTIME)
def test_functions_of_the_runtime(cupy: Any, name: str) -> None:
    assert len(_parameters(getattr(cupy.cuda.runtime, name))) == RUNTIME[name]


def test_names_of_cuda(cupy: Any) -> None:
    cuda = cupy.cuda
    for name in ("memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice"):
        assert isinstance(getattr(cuda.runtime, name), int)
    assert issubclass(cuda.runtime.CUDARuntimeError, Exception)
    wanted = {
        "Stream": "record synchronize wait_event null", "Event": "record synchronize",
        "Device": "use synchronize id",
    }
    for owner, names in wanted.items():
        assert [name for name in names.split() if not hasattr(getattr(cuda, owner), name)] == []
    for name in ("get_current_stream", "alloc_pinned_memory", "Memory"):
        assert callable(getattr(cuda, name))
    kernel = cupy.ElementwiseKernel(
        "raw T x", "raw T y", "y[i] = x[i]", "copy", options=("--fmad=false",), no_return=True
    )
    assert (kernel.no_return, kernel.kwargs["options"]) == (True, ("--fmad=false",))


def _parameters(function: Any) -> list[str]:
    """The names of a compiled function's parameters, without `self`, from its signature or its first line."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        line = (function.__doc__ or "()").splitlines()[0]
        listed = line.partition("(")[2].partition(")")[0]
        names = [one.split("=")[0].split()[-1] for one in listed.split(",") if one.strip()]
    return [name for name in names if name != "self"]
