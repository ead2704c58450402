"""What the doctor finds on this machine, and where something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from mpidist.cli.doctor import cluster, machine, packages
from mpidist.cli.doctor.finding import STATES, Finding
from mpidist.cli.main import main
from mpidist.variables.memory.sharing import SMALL_BYTES


def findings(text: str) -> dict[str, dict[str, str]]:
    return {one["subject"]: one for one in json.loads(text)["findings"]}


def test_a_page_for_people_and_one_for_programs() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    found = findings(result.output)
    assert {"mpidist", "launcher", "cores", "node memory", "GPUs", "packages", "Slurm"} <= set(found)
    assert {"HDF5", "compiled steps"} <= set(found)
    assert all(one["state"] in STATES for one in found.values())
    # Whatever is wrong has the line that fixes it, and is the exit code.
    assert all(one["fix"] for one in found.values() if one["state"] == "wrong")
    assert result.exit_code == int(any(one["state"] == "wrong" for one in found.values()))


# CuPy as the doctor's child finds it: a GPU, libraries of CUDA, and what is broken.
BROKEN_CUPY = """
import os
import sys
from types import ModuleType, SimpleNamespace
import numpy

def properties(index):
    return {"uuid": bytes(range(16)), "name": b"NVIDIA H200"}

def broken(*arguments):
    raise RuntimeError("libnvrtc.so.12: cannot open shared object file\\nmore")

runtime = SimpleNamespace(getDeviceCount=lambda: 1, getDeviceProperties=properties)
cuda = SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=lambda: (12, 4)))
ElementwiseKernel, ones, zeros = broken, numpy.ones, numpy.zeros
# As CuPy has it: a module that `import cupy` does not import.
sys.modules["cupy.cuda"] = ModuleType("cupy.cuda")
nccl = sys.modules["cupy.cuda.nccl"] = ModuleType("cupy.cuda.nccl")
nccl.available, nccl.get_version = True, lambda: 22703
"""


def test_what_cupy_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(BROKEN_CUPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {one.subject: one for one in packages.look_at_packages(["0"])}
    assert found["GPU UUIDs"].text == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f NVIDIA H200"
    assert (found["NVRTC"].state, found["NVRTC"].text) == (
        "wrong", "RuntimeError: libnvrtc.so.12: cannot open shared object file"
    )
    assert "cupy-cuda12x[ctk]" in found["NVRTC"].fix
    assert [found[name].state for name in ("CUDA", "cuBLAS", "NCCL", "HDF5")] == ["ok"] * 4
    # Without a GPU nobody asks.
    assert "CUDA" not in {one.subject for one in packages.look_at_packages([])}


def test_a_cupy_that_ends_the_process_ends_the_child_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("import os, sys\nprint('no driver', file=sys.stderr, flush=True)\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {one.subject: one for one in packages.look_at_packages(["0"])}
    assert (found["CUDA"].state, found["CUDA"].text) == ("wrong", "CuPy cannot be used: no driver")
    assert "nvidia-smi" in found["CUDA"].fix


def test_too_little_node_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", str(tmp_path / "missing"))
    (found,) = machine._shared_memory()
    assert (found.state, found.subject) == ("wrong", "node memory")
    assert "--shm-size" in found.fix
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", "/proc")
    (found,) = machine._shared_memory()
    assert found.state == "wrong"


class FileSystem(NamedTuple):
    """What `os.statvfs` tells."""

    f_blocks: int
    f_bavail: int
    f_frsize: int = 1 << 20


@pytest.mark.parametrize(("size", "free", "state", "text"), [
    (63, 63, "wrong", "MPI itself needs more"),
    (8192, 10, "wrong", "MPI itself needs more"),
    (200, 200, "note", "private copies of all variables"),
    (512, 512, "note", "27 million numbers (float32) with Adam and 2 rank(s)"),
    (25600, 24000, "ok", "26.8 GB, 25.2 GB free"),
])
def test_what_node_memory_holds(monkeypatch: pytest.MonkeyPatch, size: int, free: int, state: str, text: str) -> None:
    assert machine.SHARED_FROM == SMALL_BYTES
    monkeypatch.delenv("MPIDIST_SHARED_MEMORY", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    monkeypatch.setattr("os.statvfs", lambda _: FileSystem(size, free))
    (found,) = machine._shared_memory()
    assert (found.state, text in found.text) == (state, True), found
    assert bool(found.fix) == (state != "ok")


def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is no rank and no job."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_", "MPI_LOCAL", "TF_CONFIG")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("variables", "state", "text"), [
    ({"TF_CONFIG": "{garbage"}, "wrong", "TF_CONFIG must be JSON of the form"),
    (
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'},
        "ok", "2 worker(s); this is worker 1",
    ),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator"}}'}, "ok", "this is evaluator 0"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "ok", "1 worker(s); this is no task"),
    ({"TF_CONFIG": '{"task": {"type": "ps", "index": 7}}'}, "ok", "no cluster; this is ps 7"),
    (
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'},
        "wrong", "this is worker 1, which is not in the cluster; its tasks are worker 0",
    ),
    (
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "Worker", "index": 0}}'},
        "wrong", "its tasks are worker 0. Did you mean 'worker' by 'Worker'?",
    ),
    (
        {"TF_CONFIG": '{"cluster": {"master": ["a:1"], "worker": ["b:1"]}}'},
        "wrong", "no strategy takes the jobs ['master']. Did you mean 'chief' by 'master'?",
    ),
    ({"TF_CONFIG": '{"cluster": {"worker": []}}'}, "wrong", "0 worker(s); this is no task; the cluster has no task"),
    ({"PMI_RANK": "x"}, "wrong", "PMI_RANK must be a number, which a launcher sets, got 'x'"),
    ({"SLURM_JOB_ID": "3", "SLURM_JOB_END_TIME": "never"}, "wrong", "SLURM_JOB_END_TIME must be a number"),
    (
        {
            "SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0",
            "PMIX_RANK": "0", "SLURM_STEP_NODELIST": "n[1-", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_MPI_TYPE": "pmix",
        },
        "wrong", "SLURM_STEP_NODELIST",
    ),
], ids=["TF_CONFIG that is no JSON", "TF_CONFIG", "an evaluator", "no task", "no cluster", "no such task",
        "no such job", "a job of TensorFlow 1", "no tasks", "no number", "no time", "a list of hosts"])
def test_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], state: str, text: str
) -> None:
    outside(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = [one for one in cluster.look_at_cluster() if text in one.text]
    assert [one.state for one in found] == [state], list(cluster.look_at_cluster())
    assert bool(found[0].fix) == (state == "wrong")


BROKEN = {
    "numpy": 'raise ImportError("\n\nIMPORTANT: libopenblas.so cannot be loaded\n")',
    "h5py": 'raise ValueError("numpy.dtype size changed, may indicate binary incompatibility")',
    "llvmlite": 'import os\nraise OSError("libllvmlite.so: cannot open shared object file")',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_a_finding(tmp_path: Path, name: str) -> None:
    """In a program of its own: this one has loaded them."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(BROKEN[name])
    root = str(Path(__file__).resolve().parents[3])
    program = "import sys; from mpidist.cli.main import main; sys.argv = ['mpidist', 'doctor', '--json']; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
    )
    said = [one for one in json.loads(result.stdout)["findings"] if one["state"] == "wrong"]
    assert any(f"{name} cannot be imported" in one["text"] for one in said), result.stderr
    assert all(one["fix"] for one in said)
    assert (result.returncode, result.stderr) == (1, "")


def test_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = machine._mpi()
    assert (found.subject, found.state, found.fix) == ("launcher", "wrong", "pip install 'mpidist[mpich]'")
    assert str(tmp_path / "python") in found.text


def test_a_reader_that_has_gone(tmp_path: Path) -> None:
    """`mpidist doctor | head -0`: no traceback."""
    root = str(Path(__file__).resolve().parents[3])
    program = "import sys; from mpidist.cli.main import main; sys.argv = ['mpidist', 'doctor', '--json']; main()"
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": root, "HOME": "/proc", "XDG_CACHE_HOME": "/proc"},
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    (found,) = machine._cores()
    assert (found.state, found.fix) == ("note", f"export OMP_NUM_THREADS={len(os.sched_getaffinity(0))}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [one.state for one in machine._cores()] == ["ok"]


def test_a_launcher_of_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mpirun on the PATH is Intel's, say, and mpi4py has loaded another library."""
    other = tmp_path / "mpirun"
    # The library that this environment does not have.
    name = "HYDRA build details" if "Open MPI" in str(list(machine._mpi())) else "mpirun (Open MPI) 5.0.7"
    other.write_text(f"#!/bin/sh\necho '{name}'\n")
    other.chmod(0o755)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    found = {one.subject: one for one in machine._mpi()}
    assert found["MPI library"].state == "wrong", found
    assert "each rank would be a program of its own" in found["MPI library"].text


def test_srun_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert [one.state for one in cluster.look_at_cluster()] == ["ok"]
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    (found,) = cluster.look_at_cluster()
    assert (found.state, found.fix.startswith("srun --mpi=pmix")) == ("wrong", True)
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    assert [one.state for one in cluster.look_at_cluster()] == ["ok"]


def test_how_a_finding_is_shown() -> None:
    assert str(Finding("cores", "ok", "2")).split() == ["ok", "cores", "2"]
    assert "fix: export A=1" in str(Finding("cores", "wrong", "2", "export A=1")).splitlines()[1]
