"""A test whose program does not end says where that stands."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests import stuck
from tests.launching import run_program
from tests.slurm import private_slurm
from tests.slurm.private_slurm import NotEndedError, PrivateSlurm

WAITING = """
import sys, time
from mpi4py import MPI
def stand_here():
    print("there", flush=True)
    time.sleep(60)
if MPI.COMM_WORLD.rank:
    stand_here()
MPI.COMM_WORLD.Barrier()
"""


def test_stacks_of_all_ranks_are_shown(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAITING)
    with pytest.raises(AssertionError, match=r"program\.py did not end within 5 s") as caught:
        run_program(2, program, timeout_seconds=5)
    text = str(caught.value)
    assert re.search(r"stand_here \(.*program\.py:6\)", text), text
    # The other one waits in MPI.
    assert re.search(r"<module> \(.*program\.py:9\)", text), text
    assert "MPI_Barrier" in text, text


def test_a_step_that_has_no_tasks_and_does_not_end(
    slurm: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_slurm, "STEP_END_SECONDS", 2)
    job = slurm.submit_command("srun --ntasks=1 bash -c 'echo began; sleep 3'", folder=tmp_path)
    slurm.wait_for(job, "began")
    stopped = [
        process for process in stuck.with_variable(f"SLURM_CONF={slurm.folder / 'slurm.conf'}")
        if Path(f"/proc/{process}/comm").read_text().strip() == "srun"
    ]
    assert stopped
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        with pytest.raises(NotEndedError, match=r"state T.*srun --ntasks=1"):
            slurm.wait(job)
    finally:
        for process in stopped:
            # Cancelling the job may have ended it already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
    # Not while there was a task.
    assert time.monotonic() - begin > 3
