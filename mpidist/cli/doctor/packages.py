"""The doctor's look at packages: HDF5, packages that make steps faster, and CuPy with its libraries on each GPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mpidist.cli.doctor.child import NoAnswerError, ask
from mpidist.cli.doctor.finding import Finding

# Asks CuPy in a process of its own: a library that does not fit the driver may end it, and contexts take memory.
_ASK_GPUS = """
import importlib
import json
import warnings
import cupy

def ask(what):
    try:
        return [True, str(what())]
    except BaseException as error:
        return [False, f"{type(error).__name__}: {error}".splitlines()[0][:200]]

def identify(index):
    found = cupy.cuda.runtime.getDeviceProperties(index)
    text = bytes(found["uuid"]).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]} {bytes(found['name']).decode()}"

def compiled():
    kernel = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x + 1", "mpidist_doctor")
    assert float(kernel(cupy.zeros(3, "float32")).sum()) == 3
    return ".".join(map(str, cupy.cuda.nvrtc.getVersion()))

def multiplied():
    assert float((cupy.ones((2, 2), "float32") @ cupy.ones((2, 2), "float32")).sum()) == 8
    return "a product is right"

def nccl_version():
    # CuPy imports it on request only, and warns where the library is missing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise ImportError("CuPy finds no library of NCCL")
    return nccl.get_version()

count = ask(cupy.cuda.runtime.getDeviceCount)
told = {"CUDA": count}
if count[0]:
    told["GPU UUIDs"] = ask(lambda: ", ".join(map(identify, range(cupy.cuda.runtime.getDeviceCount()))))
    count[1] += " GPU(s)"
    told["NVRTC"] = ask(compiled)
    told["cuBLAS"] = ask(multiplied)
    told["NCCL"] = ask(nccl_version)
print(json.dumps(told), flush=True)
"""
_MEND = {
    "CUDA": "nvidia-smi shows the driver; install the CuPy for it: pip install 'mpidist[cuda12]' (or cuda13)",
    "NVRTC": "pip install 'cupy-cuda12x[ctk]' (or cupy-cuda13x[ctk]), which brings NVIDIA's libraries",
    "cuBLAS": "pip install 'cupy-cuda12x[ctk]' (or cupy-cuda13x[ctk]), which brings NVIDIA's libraries",
    "NCCL": "pip install nvidia-nccl-cu12 (or -cu13)",
}


def look_at_modules() -> Iterator[Finding]:
    """Local. Look at the required packages: there is no finding where they can be imported."""
    for name in ("numpy", "mpi4py"):
        try:
            importlib.import_module(name)
        except Exception as error:
            yield Finding(name, "wrong", f"{name} cannot be imported: {_said(error)}", _reinstall(name))


def _said(error: Exception) -> str:
    """The first line of an error that says something; NumPy's is a page."""
    lines = [line.strip() for line in str(error).splitlines()]
    return f"{type(error).__name__}: {next(filter(None, lines), 'without a reason')}"


def _reinstall(name: str) -> str:
    return f"{sys.executable} -m pip install --force-reinstall {name}"


def look_at_packages(gpus: Sequence[str]) -> Iterator[Finding]:
    """Local. Look at HDF5, at the extra for faster steps, and, where there are GPUs and CuPy, at CuPy's libraries.

    Args:
        gpus: The visible GPUs.
    """
    try:
        # Loaded by name: a broken HDF5 is a finding, whatever it raises.
        hdf5: Any = importlib.import_module("h5py")
        kind = "for MPI" if hdf5.get_config().mpi else "serial, with which all ranks write in parallel, too"
        text = f"{hdf5.version.hdf5_version}, h5py {hdf5.__version__}, {kind}"
    except Exception as error:
        yield Finding("HDF5", "wrong", f"h5py cannot be imported: {_said(error)}", _reinstall("h5py"))
    else:
        yield Finding("HDF5", "ok", text)
    if importlib.util.find_spec("llvmlite") is None:
        yield Finding(
            "compiled steps", "note", "llvmlite is not installed: optimizers use NumPy (several passes over memory)",
            "pip install 'mpidist[fast]'",
        )
    else:
        try:
            importlib.import_module("llvmlite.binding")
        except Exception as error:
            text = f"llvmlite cannot be imported: {_said(error)}"
            yield Finding("compiled steps", "wrong", text, f"{_reinstall('llvmlite')}, or export MPIDIST_COMPILE=0")
        else:
            yield Finding("compiled steps", "ok", "llvmlite is installed")
    if gpus and importlib.util.find_spec("cupy") is not None:
        yield from _cupy()


def _cupy() -> Iterator[Finding]:
    try:
        told: dict[str, tuple[bool, str]] = json.loads(ask(_ASK_GPUS).strip().rpartition("\n")[2])
    except (NoAnswerError, ValueError) as error:
        yield Finding("CUDA", "wrong", f"CuPy cannot be used: {error}", _MEND["CUDA"])
        return
    for subject, (is_right, text) in told.items():
        # Without NCCL another backend is used.
        state = "ok" if is_right else "note" if subject in ("NCCL", "GPU UUIDs") else "wrong"
        yield Finding(subject, state, text, "" if is_right else _MEND.get(subject, ""))
