"""Whether MPI takes GPU memory: switches, the library's word, and a child process that tries."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.comm.gpu import cuda_awareness
from mpidist.comm.gpu.cuda_awareness import Probe, child_environment, decide
from mpidist.comm.gpu.transport import Transport, asked_transport, may_need_probe
from mpidist.comm.group.mpi_library import Library

MPICH, OPEN_MPI, CRAY = Library("MPICH", (5, 0)), Library("Open MPI", (5, 0, 11)), Library("Cray MPICH", (8, 1))


@pytest.mark.parametrize(
    ("library", "environment", "queried", "is_aware", "why"),
    [
        (MPICH, {}, True, True, "MPICH 5.0 says so"),
        (MPICH, {}, False, False, "denies it"),
        (MPICH, {}, None, None, "does not say"),
        (MPICH, {"MPIR_CVAR_ENABLE_GPU": "0"}, True, False, "MPIR_CVAR_ENABLE_GPU=0"),
        (MPICH, {"MPIR_CVAR_ENABLE_GPU": "1"}, False, None, "does not say"),
        # Another library's switch says nothing.
        (MPICH, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, False, "denies it"),
        (OPEN_MPI, {"OMPI_MCA_opal_cuda_support": "true"}, False, None, "does not say"),
        (OPEN_MPI, {"OMPI_MCA_opal_cuda_support": "false"}, True, False, "OMPI_MCA_opal_cuda_support=false"),
        # Cray's may deny what it can do: the child decides; without its switch it cannot.
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, None, "does not say"),
        (CRAY, {}, True, False, "MPICH_GPU_SUPPORT_ENABLED=1, which is not set"),
        (Library("MVAPICH", (2, 3)), {}, None, False, "MV2_USE_CUDA=1"),
        (Library("MVAPICH", (2, 3)), {"MV2_USE_CUDA": "1"}, None, None, "does not say"),
        (Library("ParaStation MPI", ()), {"PSP_CUDA": "0"}, True, False, "PSP_CUDA=0"),
        (Library("Intel MPI", (2021, 18)), {}, True, False, "I_MPI_OFFLOAD"),
    ],
)
def test_switches_and_the_librarys_word(
    library: Library, environment: dict[str, str], queried: bool | None, is_aware: bool | None, why: str
) -> None:
    answer = decide(library, environment, queried)
    assert answer.is_aware is is_aware
    assert why in answer.why


def test_a_switch_that_is_on_may_need_the_probe() -> None:
    assert not may_need_probe({"PATH": "/bin", "MPIR_CVAR_ENABLE_GPU": "0"})
    assert may_need_probe({"MPICH_GPU_SUPPORT_ENABLED": "1"})


@pytest.mark.parametrize("text", ["cuda-aware", "CUDA_AWARE", "Cuda-Aware"])
def test_the_transport_is_named_in_any_case(text: str) -> None:
    assert asked_transport({"MPIDIST_GPU_TRANSPORT": text}) is Transport.CUDA_AWARE
    assert asked_transport({}) is Transport.AUTO
    with pytest.raises(ValueError, match=r"MPIDIST_GPU_TRANSPORT.*AUTO, NCCL, CUDA_AWARE, STAGED"):
        asked_transport({"MPIDIST_GPU_TRANSPORT": "ucx"})


def test_a_child_gets_settings_but_not_its_place() -> None:
    place = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_MCA_ess_base_vpid": "1", "PMIX_RANK": "1", "PMI_FD": "9", "PMI_RANK": "1",
        "SLURM_PROCID": "3", "HYDI_CONTROL_FD": "7", "MPI_LOCALRANKID": "0", "PRTE_LAUNCHED": "1", "PALS_RANKID": "2",
        "FLUX_TASK_RANK": "0", "OMPI_MCA_num_procs": "2",
    }
    settings = {
        "OMPI_MCA_pml": "ucx", "UCX_TLS": "rc,cuda_copy", "MPICH_GPU_SUPPORT_ENABLED": "1", "PATH": "/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
    }
    assert child_environment({**place, **settings}) == settings


def test_a_child_that_tries_host_memory_succeeds_and_its_answer_is_kept(tmp_path: Path) -> None:
    probe = Probe("numpy", tmp_path)
    assert probe.is_running
    (said,) = [json.loads(path.read_text()) for path in [_kept(probe, tmp_path)]]
    assert said["messages"] is True
    assert said["sums"] is True
    again = Probe("numpy", tmp_path)
    assert not again.is_running
    assert again.answer(said["library"]) == cuda_awareness.Awareness(True, "a child process tested it")
    other = again.answer("MPICH 1.0")
    assert other.is_aware is False
    assert said["library"] in other.why


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_the_answer_is_no_and_kept(tmp_path: Path) -> None:
    probe = Probe(folder=tmp_path / "made" / "when needed")
    answer = probe.answer("MPICH 5.0")
    assert answer.is_aware is False
    assert "No module named 'cupy'" in answer.why
    again = Probe(folder=tmp_path / "made" / "when needed")
    assert not again.is_running
    assert again.answer("MPICH 5.0") == answer


def test_a_child_that_dies_is_a_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a library does that cannot reach GPU memory: the C library's memcpy from an address that is not mapped.
    program = tmp_path / "dying.py"
    program.write_text(
        "import ctypes\nprint('{\"library\": \"MPICH 5.0\", \"messages\": true}', flush=True)\nctypes.string_at(8)\n"
    )
    monkeypatch.setattr(
        cuda_awareness, "_start_child",
        lambda memory: subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True),
    )
    answer = Probe(folder=tmp_path).answer("MPICH 5.0")
    assert answer.is_aware is False
    assert "ended with code -11 in sums" in answer.why


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['print(\'{"reason": "CUDARuntimeError: out of memory"}\')'], "out of memory"),
        (['print(\'{"library": "MPICH 5.0"}\', flush=True)', "os.kill(os.getpid(), signal.SIGKILL)"], "code -9"),
        (['print(\'{"library": "MPICH 5.0"}\', flush=True)', "signal.pause()"], "did not end within"),
    ],
    ids=["busy", "killed", "late"],
)
def test_what_may_be_otherwise_next_time_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], reason: str
) -> None:
    program = "\n".join(["import os, signal", *lines])
    monkeypatch.setattr(
        cuda_awareness, "_start_child",
        lambda memory: subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True),
    )
    monkeypatch.setattr(cuda_awareness, "PROBE_SECONDS", 1.0 if "within" in reason else 60.0)
    probe = Probe(folder=tmp_path)
    answer = probe.answer("MPICH 5.0")
    assert answer.is_aware is False
    assert reason in answer.why
    assert probe.answer("MPICH 5.0") == answer
    assert not list(tmp_path.glob("cuda-aware-*.json"))


def test_where_nothing_can_be_kept_the_answer_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    probe = Probe("numpy", tmp_path / "file")
    assert probe.is_running
    assert probe.answer(_library_of(tmp_path)).is_aware is True


def _kept(probe: Probe, folder: Path) -> Path:
    probe.answer("not looked at")
    (path,) = folder.glob("cuda-aware-*.json")
    return path


def _library_of(folder: Path) -> str:
    said = json.loads(_kept(Probe("numpy", folder), folder).read_text())
    return str(said["library"])
