"""How a job ends: quickly, with one whole traceback, and with a code that says so."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.launching import run_program

pytestmark = pytest.mark.timeout_seconds(150)

HEAD = """
import os, sys, time
import numpy as np
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
def wait_for_others():
    strategy.reduce("SUM", 1.0, axis=None)
def bug():
    raise ValueError("the bug of rank %d" % rank)
"""
# MPI jobs take a second to start; the rest is what the library takes.
SECONDS = 20


def run(folder: Path, code: str, *, ranks: int = 3, **environment: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The finished job, and what it wrote."""
    program = folder / "program.py"
    program.write_text(HEAD + code)
    begin = time.monotonic()
    result = run_program(ranks, program, timeout_seconds=60, **environment)
    text = result.stdout + result.stderr
    assert time.monotonic() - begin < SECONDS, text
    return result, text


def ours(text: str) -> list[str]:
    """What mpidist itself printed."""
    return re.findall(r"mpidist: .*", text)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_lone_exception_ends_the_job(tmp_path: Path, who: int) -> None:
    result, text = run(tmp_path, f"bug() if rank == {who} else wait_for_others()\n")
    assert result.returncode != 0
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count(f"ValueError: the bug of rank {who}") == 1
    assert "in bug" in text
    assert len(ours(text)) == 1
    assert re.match(rf"mpidist: rank {who} of 3 on \S+ failed, the job ends", ours(text)[0])


def test_an_exception_in_a_scope_or_a_replica_ends_the_job(tmp_path: Path) -> None:
    code = "with strategy.scope():\n    strategy.run(lambda: bug() if rank == 1 else wait_for_others_in_run())\n"
    helper = "def wait_for_others_in_run():\n    mpidist.get_replica_context().all_reduce('SUM', 1.0)\n"
    result, text = run(tmp_path, helper + code)
    assert result.returncode != 0
    assert text.count("ValueError: the bug of rank 1") == 1


@pytest.mark.parametrize(
    "code",
    [
        "strategy.reduce('SUM', np.ones(3 + rank), axis=None)",
        "mpidist.MirroredStrategy(devices=['cpu:0'] * 7)",
        "try:\n    strategy.reduce('SUM', np.ones(3 + rank), axis=None)\nexcept ValueError as e:\n"
        "    raise RuntimeError('cannot go on') from e",
    ],
    ids=["mismatch", "devices", "chained"],
)
def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path, code: str) -> None:
    result, text = run(tmp_path, code + "\n")
    assert result.returncode != 0
    assert len(ours(text)) == 1
    assert ours(text)[0].startswith("mpidist: rank 0 of 3")


def test_an_error_of_all_ranks_that_only_one_does_not_catch(tmp_path: Path) -> None:
    code = (
        "try:\n    strategy.reduce('SUM', np.ones(3 + rank), axis=None)\nexcept ValueError:\n"
        "    if rank == 2: raise\nwait_for_others()\n"
    )
    result, text = run(tmp_path, code)
    assert result.returncode != 0
    assert len(ours(text)) == 1
    assert ours(text)[0].startswith("mpidist: rank 2 of 3")


@pytest.mark.parametrize("leave", ["sys.exit(3)", "sys.exit('no data')", "exit(3)", "argparse"])
@pytest.mark.parametrize("where", ["{}", "with strategy.scope(): strategy.run(lambda: {})"], ids=["top", "run"])
def test_a_lone_exit_with_a_code_ends_the_job(tmp_path: Path, leave: str, where: str) -> None:
    if leave == "argparse":
        leave = "__import__('argparse').ArgumentParser().parse_args(['--nonsense'])"
    result, text = run(tmp_path, f"if rank == 1:\n    {where.format(leave)}\nwait_for_others()\n")
    assert result.returncode != 0
    assert len(ours(text)) == 1
    assert re.match(r"mpidist: rank 1 of 3 on \S+ exited with \d", ours(text)[0])
    if "no data" in leave:
        assert "no data" in text


def test_a_caught_exit_ends_nothing(tmp_path: Path) -> None:
    code = (
        "kept = None\nif rank == 1:\n    try:\n        sys.exit(5)\n    except SystemExit as error:\n"
        "        kept = error\n"
        "if rank == 2:\n    try:\n        sys.exit(6)\n    except BaseException:\n        pass\n"
        "wait_for_others()\nsys.stdout.write('went on\\n')\nsys.exit(0)\n"
    )
    result, text = run(tmp_path, code)
    assert result.returncode == 0, text
    assert text.count("went on") == 3
    assert ours(text) == []


@pytest.mark.parametrize("last", ["", "sys.exit()", "sys.exit(0)"])
def test_a_program_that_ends_well_prints_nothing(tmp_path: Path, last: str) -> None:
    # Ranks come to the end at different times.
    result, text = run(tmp_path, f"wait_for_others()\ntime.sleep(0.3 * rank)\n{last}\n")
    assert result.returncode == 0
    assert text == ""


def test_all_ranks_may_exit_with_a_code(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "wait_for_others()\nsys.exit(7)\n")
    assert result.returncode != 0


def test_a_keyboard_interrupt_ends_the_job(tmp_path: Path) -> None:
    result, text = run(tmp_path, "if rank == 1: raise KeyboardInterrupt\nwait_for_others()\n")
    assert result.returncode != 0
    assert "Traceback" not in text


def test_the_users_own_hook_is_called(tmp_path: Path) -> None:
    code = "bug() if rank == 1 else wait_for_others()\n"
    program = tmp_path / "program.py"
    hook = "import sys\nsys.excepthook = lambda *_: sys.stderr.write('the hook of the program\\n')\n"
    program.write_text(hook + HEAD + code)
    result = run_program(3, program)
    assert result.returncode != 0
    assert (result.stdout + result.stderr).count("the hook of the program") == 1
    assert "Traceback" not in result.stderr


def test_output_before_the_failure_is_not_lost(tmp_path: Path) -> None:
    code = "print('before the failure')\nbug() if rank == 1 else wait_for_others()\n"
    _, text = run(tmp_path, code, PYTHONUNBUFFERED="")
    assert "before the failure" in text
    assert text.index("before the failure") < text.index("mpidist: rank 1")


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    code = "if rank == 1:\n    sys.stderr.write(f'hook {sys.excepthook is sys.__excepthook__}')\nwait_for_others()\n"
    result, text = run(tmp_path, code, MPIDIST_ABORT="0")
    assert result.returncode == 0
    assert "hook True" in text


def test_one_rank_switches_it_off_for_all(tmp_path: Path) -> None:
    """A rank without hooks takes no leave: the others would wait for it at their end."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom mpidist import launch\n"
        "if launch.world_rank() == 1:\n    os.environ['MPIDIST_ABORT'] = '0'\n" + HEAD + "wait_for_others()\n"
        "sys.stderr.write(f'hook {sys.excepthook is sys.__excepthook__}\\n')\n"
    )
    result = run_program(3, program, timeout_seconds=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("hook True") == 3


def test_a_program_that_finalizes_mpi_itself_ends_well(tmp_path: Path) -> None:
    result, text = run(tmp_path, "from mpi4py import MPI\nwait_for_others()\nMPI.Finalize()\n")
    assert result.returncode == 0, text
    assert text == ""


def test_a_forked_child_may_fail(tmp_path: Path) -> None:
    code = """
child = os.fork()
if child == 0:
    try:
        sys.excepthook(ValueError, ValueError("the child's own"), None)
    finally:
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
wait_for_others()
print("the ranks go on")
"""
    result, text = run(tmp_path, code)
    assert result.returncode == 0, text
    assert text.count("the child's own") == text.count("the ranks go on") == 3
    assert not ours(text)
