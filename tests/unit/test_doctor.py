"""What the doctor finds on this machine, and where something is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpidist.cli import doctor, doctor_packages
from mpidist.cli.finding import STATES, Finding
from mpidist.cli.main import main


def findings(text: str) -> dict[str, dict[str, str]]:
    return {one["subject"]: one for one in json.loads(text)["findings"]}


def test_a_page_for_people_and_one_for_programs() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    found = findings(result.output)
    assert {"mpidist", "launcher", "cores", "node memory", "GPUs", "packages", "Slurm"} <= set(found)
    assert {"HDF5", "compiled steps"} <= set(found)
    assert all(one["state"] in STATES for one in found.values())
    # Whatever is wrong has the line that mends it, and is the exit code.
    assert all(one["mend"] for one in found.values() if one["state"] == "wrong")
    assert result.exit_code == int(any(one["state"] == "wrong" for one in found.values()))


# CuPy as the doctor's child finds it: a GPU, libraries of CUDA, and what is broken.
BROKEN_CUPY = """
import os
from types import SimpleNamespace
import numpy

def properties(index):
    return {"uuid": bytes(range(16)), "name": b"NVIDIA H200"}

def broken(*arguments):
    raise RuntimeError("libnvrtc.so.12: cannot open shared object file\\nmore")

runtime = SimpleNamespace(getDeviceCount=lambda: 1, getDeviceProperties=properties)
nccl = SimpleNamespace(get_version=lambda: 22703)
cuda = SimpleNamespace(runtime=runtime, nccl=nccl, nvrtc=SimpleNamespace(getVersion=lambda: (12, 4)))
ElementwiseKernel, ones, zeros = broken, numpy.ones, numpy.zeros
"""


def test_what_cupy_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(BROKEN_CUPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {one.subject: one for one in doctor_packages.look_at_packages(["0"])}
    assert found["GPU UUIDs"].text == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f NVIDIA H200"
    assert (found["NVRTC"].state, found["NVRTC"].text) == (
        "wrong", "RuntimeError: libnvrtc.so.12: cannot open shared object file"
    )
    assert "cupy-cuda12x[ctk]" in found["NVRTC"].mend
    assert [found[name].state for name in ("CUDA", "cuBLAS", "NCCL", "HDF5")] == ["ok"] * 4
    # Without a GPU nobody asks.
    assert "CUDA" not in {one.subject for one in doctor_packages.look_at_packages([])}


def test_a_cupy_that_ends_the_process_ends_the_child_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("import os, sys\nprint('no driver', file=sys.stderr, flush=True)\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {one.subject: one for one in doctor_packages.look_at_packages(["0"])}
    assert (found["CUDA"].state, found["CUDA"].text) == ("wrong", "CuPy cannot be used: no driver")
    assert "nvidia-smi" in found["CUDA"].mend


def test_too_little_node_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", str(tmp_path / "missing"))
    (found,) = doctor._shared_memory()
    assert (found.state, found.subject) == ("wrong", "node memory")
    assert "--shm-size" in found.mend
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", "/proc")
    (found,) = doctor._shared_memory()
    assert found.state == "wrong"


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    (found,) = doctor._cores()
    assert (found.state, found.mend) == ("note", f"export OMP_NUM_THREADS={len(os.sched_getaffinity(0))}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [one.state for one in doctor._cores()] == ["ok"]


def test_a_launcher_of_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mpirun on the PATH is Intel's, say, and mpi4py has loaded another library."""
    other = tmp_path / "mpirun"
    # The library that this environment does not have.
    name = "HYDRA build details" if "Open MPI" in str(list(doctor._mpi())) else "mpirun (Open MPI) 5.0.7"
    other.write_text(f"#!/bin/sh\necho '{name}'\n")
    other.chmod(0o755)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    found = {one.subject: one for one in doctor._mpi()}
    assert found["MPI library"].state == "wrong", found
    assert "each rank would be a program of its own" in found["MPI library"].text


def test_srun_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert [one.state for one in doctor._slurm()] == ["ok"]
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    (found,) = doctor._slurm()
    assert (found.state, found.mend.startswith("srun --mpi=pmix")) == ("wrong", True)
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    assert [one.state for one in doctor._slurm()] == ["ok"]


def test_how_a_finding_is_shown() -> None:
    assert str(Finding("cores", "ok", "2")).split() == ["ok", "cores", "2"]
    assert "mend: export A=1" in str(Finding("cores", "wrong", "2", "export A=1")).splitlines()[1]
