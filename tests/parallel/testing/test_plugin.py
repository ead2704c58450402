"""The plugin itself: what happens to a run when ranks differ, fail alone, or hang.

Each test starts ranks of its own, so it runs where there is one rank only; with more, ranks would start ranks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.testing import fake_nodes
from tests.helpers.launching import NoLauncherError, find_mpirun, launch_environment, mpirun_command

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.mpi, pytest.mark.timeout_seconds(120)]


@pytest.fixture
def alone(communicator: Communicator) -> None:
    if communicator.size > 1:
        pytest.skip("starts ranks of its own")
    try:
        find_mpirun()
    except NoLauncherError as error:
        pytest.skip(str(error))


def run_pytest(
    folder: Path, code: str, *options: str, ranks: int = 2, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text("import os, sys, time\nimport pytest\n\n" + code)
    # Registered once, by its entry point where mpidist is installed, else by name.
    (folder / "conftest.py").write_text("from tests.conftest import pytest_plugins\n")
    # Buffered, as where output goes to a file.
    environment = {**launch_environment(), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    # Open MPI gives its ranks a terminal.
    fixed = ["--with-mpi", "--color=no"]
    return subprocess.run(
        [*mpirun_command(ranks, find_mpirun()), sys.executable, "-m", "pytest", *fixed, *options, "test_it.py"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100, input=typed,
    )


def test_world_of_the_fixture(communicator: Communicator) -> None:
    ranks = communicator.all_gather_object(communicator.rank)
    assert ranks == list(range(communicator.size))


def test_fake_nodes(communicator: Communicator) -> None:
    nodes = fake_nodes(communicator, 2)
    assert (nodes.rank, nodes.size) == (communicator.rank, communicator.size)
    assert nodes.node_index == communicator.rank // 2
    assert nodes.node.rank == communicator.rank % 2


@pytest.mark.usefixtures("alone")
def test_outcomes_are_those_of_all_ranks(tmp_path: Path) -> None:
    code = """
def test_passes(communicator):
    communicator.barrier()

def test_fails_on_rank_1(communicator):
    print("printed by", communicator.rank)
    assert communicator.rank == 0, "only rank 1"

def test_skips_on_rank_1(communicator):
    if communicator.rank == 1:
        pytest.skip("only rank 1")

def test_skips():
    pytest.skip("all")

@pytest.mark.xfail(reason="rank 1 cannot")
def test_expected(communicator):
    assert communicator.rank == 0

@pytest.mark.xfail(reason="rank 1 cannot", strict=True)
def test_expected_strictly(communicator):
    assert communicator.rank == 0

@pytest.mark.xfail(reason="none can", strict=True)
def test_passes_unexpectedly():
    pass

@pytest.fixture
def broken(communicator):
    if communicator.rank == 1:
        raise RuntimeError("set-up of rank 1")

def test_with_broken(broken):
    pass

@pytest.mark.mpi(min_size=3)
def test_of_three():
    pass
"""
    result = run_pytest(tmp_path, code, "-rA")
    text = result.stdout
    assert result.returncode == 1, text + result.stderr
    assert "3 failed, 1 passed, 2 skipped, 2 xfailed, 1 error" in text
    assert "[XPASS(strict)] none can" in text
    assert text.count("test session starts") == 1, "ranks other than 0 are quiet"
    assert "failed on rank 1 of 2" in text
    assert "AssertionError: only rank 1" in text
    assert "printed by 1" in text
    assert "all ranks must skip a test, or none: skipped on rank 1" in text
    assert "RuntimeError: set-up of rank 1" in text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--setup-show"], "1 passed"), (["--setup-only"], "no tests ran"), (["--setup-plan"], "no tests ran"),
        (["--pdb"], "1 passed"), (["-o", "log_cli=true", "--log-cli-level=INFO"], "1 passed"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_use_the_terminal_leave_it_to_rank_0(options: list[str], count: str, tmp_path: Path) -> None:
    code = """
import logging

@pytest.fixture
def thing():
    return 3

def test_it(thing):
    logging.getLogger("x").info("logged")
"""
    result = run_pytest(tmp_path, code, *options)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert count in text
    for once in ("test session starts", "SETUP    F thing" if "--setup" in options[0] else "1 passed"):
        assert text.count(once) == 1, text
    assert text.count("logged") == (1 if "-o" in options else 0), text


@pytest.mark.usefixtures("alone")
def test_the_debugger_is_that_of_rank_0_and_nobody_hurries_it(tmp_path: Path) -> None:
    code = """
def outlive_the_grace_period():
    time.sleep(1)  # simulates work: that of a rank which fails long after another one

def test_it(communicator):
    if communicator.rank == 1:
        open("failed", "w").close()
        raise RuntimeError("rank 1 broke")
    while not os.path.exists("failed"):
        time.sleep(0.01)
    outlive_the_grace_period()
    raise RuntimeError("rank 0 broke")
"""
    result = run_pytest(tmp_path, code, "--pdb", "--mpi-grace", "0.2", typed="print(3 * 'typed ')\ncontinue\n")
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert "did not finish within" not in text
    assert text.count("entering PDB") == 1, text
    assert "typed typed typed" in text
    assert "RuntimeError: rank 0 broke" in text


@pytest.mark.usefixtures("alone")
def test_everything_passes_with_code_0(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "def test_it(communicator):\n    assert communicator.size == 3\n", ranks=3)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


@pytest.mark.usefixtures("alone")
def test_a_rank_that_fails_alone_ends_the_run(tmp_path: Path) -> None:
    code = """
def test_it(communicator):
    if communicator.rank == 1:
        raise RuntimeError("rank 1 broke")
    communicator.barrier()
"""
    result = run_pytest(tmp_path, code, "--mpi-grace", "1")
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert "test_it.py::test_it (call): failed on rank 1 of 2, the others did not finish within 1 s" in text
    assert "RuntimeError: rank 1 broke" in text


@pytest.mark.usefixtures("alone")
def test_a_hang_prints_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    code = """
def wait_for_nobody(communicator):
    communicator.barrier()

@pytest.mark.timeout_seconds(1)
def test_it(communicator):
    import threading
    if communicator.rank == 0:
        wait_for_nobody(communicator)
    else:
        threading.Event().wait()
"""
    result = run_pytest(tmp_path, code)
    text = result.stdout + result.stderr
    assert result.returncode != 0
    for rank in (0, 1):
        assert f"time limit: rank {rank} of 2" in text
    assert "in wait_for_nobody" in text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("ends", [True, False], ids=["the run ends", "a later test hangs"])
def test_a_failure_is_told_at_once_and_once(ends: bool, tmp_path: Path) -> None:
    code = f"""
def test_fails(communicator):
    print("captured here")
    assert communicator.rank == 0, "told before"

@pytest.fixture
def broken(communicator):
    raise RuntimeError("no set-up")

def test_with_broken(broken):
    pass

@pytest.mark.timeout_seconds(1)
def test_hangs(communicator):
    import threading
    if not {ends}:
        threading.Event().wait()
"""
    result = run_pytest(tmp_path, code, *(["-q"] if ends else []))
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert ("time limit: rank 0 of 2" in text) is not ends, text
    assert ("1 failed, 1 passed, 1 error" in text) is ends, text
    for once in ('E       AssertionError: told before', "E       RuntimeError: no set-up"):
        assert result.stdout.count(once) == 1, text
    assert "test_it.py::test_with_broken in setup __" in text
    assert "\n___" in result.stdout.partition("test_it.py::test_fails __")[0], text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "from mpidist import launch\n"
            "@pytest.mark.parametrize('rank', [launch.world_rank()])\ndef test_it(rank):\n    pass\n",
            "First difference: 'test_it.py::test_it[0]' on rank 0, 'test_it.py::test_it[1]' on rank 1",
        ),
        (
            "from mpidist import launch\n"
            "if launch.world_rank() == 1:\n    raise ImportError('rank 1 lacks it')\ndef test_it():\n    pass\n",
            "ImportError: rank 1 lacks it",
        ),
    ],
    ids=["parameters", "import"],
)
def test_other_tests_on_other_ranks_are_an_error(tmp_path: Path, code: str, expected: str) -> None:
    result = run_pytest(tmp_path, code)
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert "the tests collected must be the same on all ranks" in text
    assert expected in text


@pytest.mark.usefixtures("alone")
def test_a_rank_that_leaves_the_run_ends_it(tmp_path: Path) -> None:
    code = """
def test_it(communicator):
    if communicator.rank == 1:
        raise KeyboardInterrupt
"""
    result = run_pytest(tmp_path, code, "--mpi-grace", "1")
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert "the ranks are at different places of the run" in text
    assert "rank 1: pytest ended with" in text


@pytest.mark.usefixtures("alone")
def test_a_report_that_ends_the_run_is_not_captured_and_names_the_test(tmp_path: Path) -> None:
    code = """
def test_passes(communicator):
    communicator.barrier()

def test_differs(communicator):
    if communicator.rank == 0:
        communicator.all_gather_object(1)
    communicator.barrier()
"""
    result = run_pytest(tmp_path, code)
    text = result.stdout + result.stderr
    assert result.returncode != 0
    _, heading, report = text.partition("test_it.py::test_differs =====\nmpidist: rank ")
    assert heading, text
    assert "is deadlocked, the job ends: the ranks are in different calls" in report, text
    assert "waits in barrier" in report, text
    assert text.count("is deadlocked") == 1, text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("option", ["--capture=fd", "--capture=no"])
def test_a_text_goes_to_stderr_once_captured_or_not(tmp_path: Path, option: str) -> None:
    code = """
from mpidist.observe.output import say

def test_it(communicator):
    if communicator.rank == 1:
        say("from rank 1")
"""
    result = run_pytest(tmp_path, code, option)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr.count("mpidist: from rank 1\n") == 1, result.stderr


@pytest.mark.usefixtures("alone")
def test_failures_are_told_where_another_rank_ends_the_job_at_the_exit(tmp_path: Path) -> None:
    code = """
import atexit, threading

def test_fails(communicator, request):
    if communicator.rank == 1:
        atexit.register(communicator.mpi.Abort, 1)
    else:
        # It has left pytest's hooks, and not yet written what pytest has printed.
        request.config.add_cleanup(threading.Event().wait)
    assert communicator.size == 3
"""
    result = run_pytest(tmp_path, code)
    assert result.returncode != 0
    assert "test_it.py::test_fails - assert" in result.stdout, result.stdout + result.stderr
    assert "1 failed in" in result.stdout
