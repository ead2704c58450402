"""Signals that come while a program starts: before there is a handler, or where there will be none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = """
import os, signal, subprocess, sys
import mpidist
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig

how, folder = sys.argv[1:3]

def tell():
    # As soon as the package is there: numpy and MPI are not.
    os.kill(os.getpid(), signal.SIGTERM)

def take(*_):
    print("its own", flush=True)
    sys.exit(7)

if how in ("handler", "none"):
    tell()
if how == "own":
    tell()
    signal.signal(signal.SIGTERM, take)
if how == "before":
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
if how == "children":
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    # One that a rank starts is none, though it has the environment of one.
    code = "import mpidist, signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"True\\n"
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    steps = mpidist.Variable(0, dtype="int64", aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
if how not in ("none", "own"):
    config = TerminationConfig(exit_code=75)
    handler = PreemptionCheckpointHandler(None, mpidist.Checkpoint(steps=steps), folder, config)
    for _ in range(5):
        handler.run(lambda: strategy.run(lambda: steps.assign_add(1)))
print("prepared", flush=True)
strategy.reduce("SUM", 1.0, axis=None)
print("goes on", flush=True)
"""


def run(folder: Path, how: str, **environment: Any) -> tuple[int, str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    result = run_program(2, program, how, folder / "checkpoints", **environment)
    return result.returncode, result.stdout + result.stderr


# A job that Slurm does not answer for may be queued again.
SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": "4000000000"}


@pytest.mark.parametrize("environment", [{"MPIDIST_SIGNALS": "USR1,TERM"}, SLURM], ids=["variable", "slurm"])
def test_a_handler_hears_of_what_came_before_it(tmp_path: Path, environment: dict[str, str]) -> None:
    code, text = run(tmp_path, "handler", **environment)
    assert code == 75, text
    assert "the job is about to end (SIGTERM): saved" in text, text


def test_without_a_handler_the_signal_ends_the_job_at_the_first_call(tmp_path: Path) -> None:
    code, text = run(tmp_path, "none", MPIDIST_SIGNALS="TERM")
    assert code not in (0, 75), text
    assert "prepared" in text, text
    assert "goes on" not in text, text


def test_a_handler_of_the_program_gets_it_then(tmp_path: Path) -> None:
    _, text = run(tmp_path, "own", MPIDIST_SIGNALS="TERM")
    assert "its own" in text, text
    assert "goes on" not in text, text


def test_elsewhere_nothing_is_handled(tmp_path: Path) -> None:
    code, text = run(tmp_path, "before")
    assert (code, text.count("goes on")) == (0, 2), text


def test_children_take_their_own(tmp_path: Path) -> None:
    code, text = run(tmp_path, "children", MPIDIST_SIGNALS="TERM")
    assert (code, text.count("goes on")) == (0, 2), text


def test_a_name_that_is_no_signal_is_an_error(tmp_path: Path) -> None:
    code, text = run(tmp_path, "before", MPIDIST_SIGNALS="USR1,KILL")
    assert code != 0
    assert "must be names of signals that announce the end of a job, such as USR1,TERM, got 'KILL'" in text, text
