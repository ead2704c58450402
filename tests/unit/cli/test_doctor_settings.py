"""What the doctor says of variables of the environment: mpidist's own, and the numbers of launchers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mpidist import launch
from mpidist.cli.doctor import machine
from mpidist.cli.doctor.cluster import look_at_cluster
from mpidist.cli.doctor.settings import CHOICES, SWITCHES, VARIABLES, look_at_settings
from mpidist.comm.gpu.transport import Transport
from mpidist.options import CommunicationImplementation, WindowWay

PAGE = Path(__file__).resolve().parents[3] / "docs" / "environment.md"


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MPIDIST_"):
            monkeypatch.delenv(name)


def test_all_variables_of_the_page_are_known() -> None:
    assert set(re.findall(r"^\| `(MPIDIST_\w+)", PAGE.read_text(), re.MULTILINE)) == set(VARIABLES)


def test_the_choices_are_those_of_the_library() -> None:
    assert set(CHOICES["MPIDIST_COLLECTIVE"]) == {one.name for one in CommunicationImplementation}
    assert set(CHOICES["MPIDIST_WINDOW"]) == {one.name for one in WindowWay}
    assert {one.upper().replace("-", "_") for one in CHOICES["MPIDIST_GPU_TRANSPORT"]} == {o.name for o in Transport}


@pytest.mark.parametrize(
    ("name", "value", "state", "text"),
    [
        ("MPIDIST_TIMEOUT", "1 min", "wrong", "MPIDIST_TIMEOUT must be a number of seconds, got '1 min'"),
        ("MPIDIST_WARN_SECONDS", "x", "wrong", "MPIDIST_WARN_SECONDS must be a number of seconds"),
        ("MPIDIST_COLLECTIVE", "ring2", "wrong", "MPIDIST_COLLECTIVE must be one of AUTO, MPI, RING"),
        ("MPIDIST_DEVICE", "tpu", "wrong", "MPIDIST_DEVICE must be one of cpu, gpu, got 'tpu'"),
        ("MPIDIST_COMPILE", "no", "note", "MPIDIST_COMPILE must be one of 0, 1, got 'no'"),
        ("MPIDIST_TIMOUT", "60", "note", "mpidist has no variable MPIDIST_TIMOUT: the setting has no effect"),
        ("MPIDIST_", "60", "note", "mpidist has no variable MPIDIST_: the setting has no effect"),
        ("MPIDIST_TUNE", "1", "note", "MPIDIST_TUNE is gone: the sizes at which AUTO changes its backend are const"),
    ],
)
def test_what_nobody_reads_or_takes(
    name: str, value: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (finding,) = look_at_settings()
    assert finding.state == state
    assert finding.text.startswith(text)
    assert finding.fix == ("export MPIDIST_TIMEOUT=60, if that is meant" if "TIMOUT" in name else f"unset {name}")


def test_right_values_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in {**CHOICES, **SWITCHES}.items():
        for word in ("", *words, words[0].lower()):
            monkeypatch.setenv(name, word)
            assert list(look_at_settings()) == []
    monkeypatch.setenv("MPIDIST_GPU_TRANSPORT", "cuda_aware")
    monkeypatch.setenv("MPIDIST_TIMEOUT", "1e3")
    monkeypatch.setenv("MPIDIST_TRACE", "/tmp/a b")
    assert list(look_at_settings()) == []


def test_a_time_that_is_none_lets_no_rank_start_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "look_at_modules", lambda: iter(()))
    assert machine.find_obstacle() is None
    monkeypatch.setenv("MPIDIST_TIMEOUT", "soon")
    found = machine.find_obstacle()
    assert found is not None
    assert "MPIDIST_TIMEOUT" in found.text


def test_node_memory_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", str(file))
    (found,) = machine._shared_memory()
    assert (found.state, found.text) == ("wrong", f"{file} is no directory")


def test_a_number_longer_than_any_count_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "9" * 5000
    assert launch.read({"PMI_RANK": long, "PMI_SIZE": "2"}) is None
    for name in ("OMP_NUM_THREADS", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, long)
    assert [one.state for one in machine._cores()] == ["ok"]
    assert list(machine._shared_memory())


STEP = {
    "SLURM_JOB_ID": "3", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        (STEP, 3), ({**STEP, "SLURM_NODEID": "2"}, 1), ({**STEP, "SLURM_NODEID": "3"}, 1),
        ({**STEP, "SLURM_NTASKS_PER_NODE": "5"}, 3),
        # Of mpirun in a job, and of a script.
        ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "5"}, 5), ({}, 1),
    ],
)
def test_the_ranks_of_a_node(variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (found,) = machine._shared_memory()
    assert f"{ranks} rank(s)" in found.text


@pytest.mark.parametrize(("tasks", "state"), [("1", "ok"), ("2", "wrong")])
def test_a_step_of_one_task_needs_no_mpi(tasks: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_", "MPI_LOCAL", "TF_CONFIG")):
            monkeypatch.delenv(name)
    for name, value in {
        **STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    (found,) = look_at_cluster()
    assert found.state == state
