"""A test whose program does not end says where that stands."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers import limits, messages, stuck
from tests.helpers.launching import run_program
from tests.helpers.processes import with_variable
from tests.slurm import private_slurm
from tests.slurm.private_slurm import NotEndedError, PrivateSlurm

WAITING = """
import signal
from mpi4py import MPI
def stand_here():
    print("there", flush=True)
    signal.pause()
if MPI.COMM_WORLD.rank:
    stand_here()
MPI.COMM_WORLD.Barrier()
"""


def test_stacks_of_all_ranks_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.VARIABLE, "0.5")
    program = tmp_path / "program.py"
    program.write_text(WAITING)
    with pytest.raises(AssertionError, match=r"program\.py did not end within 5 s") as caught:
        run_program(2, program, timeout_seconds=5)
    text = str(caught.value)
    assert re.search(r"stand_here \(.*program\.py:6\)", text), text
    # The other one waits in MPI.
    assert re.search(r"<module> \(.*program\.py:9\)", text), text
    assert "MPI_Barrier" in text, text


# All ranks stand still; no message is on its way.
ASLEEP = """
import signal
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
print("there", flush=True)
signal.pause()
"""


def test_a_program_that_hangs_while_mpi_delivers_is_no_matter_of_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(limits.VARIABLE, "0.5")
    program = tmp_path / "program.py"
    program.write_text(ASLEEP)
    with pytest.raises(AssertionError, match="did not end within 5 s") as caught:
        run_program(3, program, timeout_seconds=5, kills=True)
    assert type(caught.value) is AssertionError
    answers = {path.name: path.read_text() for path in tmp_path.glob("messages-*/*.heard")}
    assert answers == {"0.heard": "1 2", "1.heard": "0 2", "2.heard": "0 1"}


def answers(folder: Path, **heard: str) -> Path:
    """Ranks have sent, and have heard, a long time later, of these."""
    for name, text in heard.items():
        sent, got = (folder / f"{name[1:]}.{kind}" for kind in (messages.SENT, messages.HEARD))
        sent.touch()
        os.utime(sent, (0, 0))
        got.write_text(text)
    return folder


def test_a_rank_that_gets_nothing_of_living_ones_is_a_proof(tmp_path: Path) -> None:
    reason = stuck.why_broken(answers(tmp_path, r0="", r1="0 2", r2="0 1"), "")
    assert reason == "MPI does not deliver messages: of rank 1 to 0, of rank 2 to 0"


def test_a_dead_rank_of_which_nothing_comes_is_none(tmp_path: Path) -> None:
    assert stuck.why_broken(answers(tmp_path, r0="2", r2="0"), "") is None
    assert stuck.why_broken(tmp_path, "process 1\nMainThread\nprocess 2\nMainThread\n") is None


FLUSH = "process 5 of 4, state R, 0 s: python\nThread 5 (active): \"MainThread\"\n    ucp_ep_flush_nbx (libucp.so.0)\n"
POLL = "process 6 of 4, state S, 0 s: python\nThread 6 (idle): \"MainThread\"\n    RmaWindow.poll (rma.py:202)\n"
STOPPED = "process 7 of 4, state T, 0 s: python\nThread 7 (idle): \"MainThread\"\n"


@pytest.mark.parametrize(("seen", "is_proof"), [
    (POLL + FLUSH, True), (POLL + FLUSH + FLUSH, True), (POLL + POLL + FLUSH, False), (POLL, False),
    (POLL + STOPPED + FLUSH, True), (POLL + STOPPED + POLL + FLUSH, False),
])
def test_a_flush_that_does_not_end_though_all_others_ask_is_a_proof(
    tmp_path: Path, seen: str, is_proof: bool
) -> None:
    assert (stuck.why_broken(answers(tmp_path, r0=""), seen) is not None) is is_proof


def test_a_step_that_has_no_tasks_and_does_not_end(
    slurm: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_slurm, "STEP_END_SECONDS", 2 / limits.limit(1))
    task = "echo began; until [ -e go ]; do sleep 0.1; done; sleep 3; touch ended"
    job = slurm.submit_command(f"srun --ntasks=1 bash -c '{task}'", folder=tmp_path)
    slurm.wait_for(job, "began")
    stopped = [
        process for process in with_variable(f"SLURM_CONF={slurm.folder / 'slurm.conf'}")
        if Path(f"/proc/{process}/comm").read_text().strip() == "srun"
    ]
    assert stopped
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    (tmp_path / "go").touch()
    try:
        with pytest.raises(NotEndedError, match=r"state T.*srun --ntasks=1"):
            slurm.wait(job)
    finally:
        for process in stopped:
            # Cancelling the job may have ended it already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
    # Not while there was a task.
    assert (tmp_path / "ended").exists()
