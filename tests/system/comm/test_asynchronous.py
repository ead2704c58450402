"""The communication thread at the ends of a program: MPI without threads, and exits with reductions under way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(150)

HEAD = """
import sys
import mpi4py
{before}
import numpy as np
from mpidist.comm.group import communication_thread
from mpidist.comm.choice import selection
from mpidist.comm.cross_device.asynchronous import open_asynchronous
from mpidist.comm.group.opening import open_communicator
from mpidist.options import CommunicationOptions
communicator = open_communicator()
rank = communicator.rank
own = open_asynchronous(selection.choose(communicator, CommunicationOptions()))
"""


def run(folder: Path, code: str, *, before: str = "", ranks: int = 2) -> tuple[subprocess.CompletedProcess[str], str]:
    program = folder / "program.py"
    program.write_text(HEAD.format(before=before) + code)
    result = run_program(ranks, program, timeout_seconds=60)
    return result, result.stdout + result.stderr


def test_without_threads_in_mpi_the_work_is_done_at_wait(tmp_path: Path) -> None:
    code = """
assert not own.has_thread
handles = [own.all_reduce_async(np.full(3, float(number))) for number in range(4)]
handles[2].wait()
sys.stdout.write(f"{[handle.done() for handle in handles]} {handles[2].wait().tolist()}\\n")
handles[3].wait()
"""
    result, text = run(tmp_path, code, before="mpi4py.rc.thread_level = 'serialized'")
    assert result.returncode == 0, text
    assert text.count("[True, True, True, False] [4.0, 4.0, 4.0]") == 2
    assert text.count("done when they are waited for, because MPI was started without THREAD_MULTIPLE") == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exit_without_waiting_is_said_and_ends(tmp_path: Path, ranks: int) -> None:
    """Rank 0 waits for what the others do not: they finish it before they go."""
    code = """
arrays = [np.ones(1 << 18, np.float32) for _ in range(5)]
handles = [own.all_reduce_async(array) for array in arrays]
if rank == 0:
    for handle in handles:
        handle.wait()
    print("sum", arrays[-1][0])
else:
    handles[0].wait()
"""
    result, text = run(tmp_path, code, ranks=ranks)
    assert result.returncode == 0, text
    assert f"sum {ranks}.0" in text
    assert text.count("4 of 5 asynchronous reductions were not waited for") == ranks - 1
    assert f"rank 1 of {ranks} exits" in text
    assert "rank 0 of" not in text


def test_nothing_is_said_where_all_were_waited_for(tmp_path: Path) -> None:
    result, text = run(tmp_path, "own.all_reduce_async(np.ones(3)).wait()\n")
    assert result.returncode == 0
    assert text.strip() == ""


def test_a_reduction_that_others_never_make_ends_the_job(tmp_path: Path) -> None:
    code = """
communication_thread.STALLED_SECONDS = 1.0
if rank == 1:
    own.all_reduce_async(np.ones(3))
"""
    result, text = run(tmp_path, code)
    assert result.returncode != 0
    assert "its asynchronous reduction number 1 has waited 1 s for other ranks" in text


@pytest.mark.parametrize("how", ["raise ValueError('the bug')", "sys.exit(3)"])
def test_a_failure_with_reductions_under_way_ends_the_job(tmp_path: Path, how: str) -> None:
    code = f"""
communication_thread.STALLED_SECONDS = 1.0
handle = own.all_reduce_async(np.ones(3)) if rank == 0 else None
if rank == 1:
    {how}
handle.wait()
"""
    result, text = run(tmp_path, code)
    assert result.returncode != 0
    assert "the bug" in text or "exited with 3" in text
