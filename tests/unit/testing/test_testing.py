"""The plugin in a single process, and how it makes one outcome of several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.comm.group.solo import SoloCommunicator
from mpidist.testing import fake_nodes
from mpidist.testing.outcome import Outcome, collection_difference, combine, outcome_of
from tests.conftest import _INSTALLED
from tests.helpers.launching import launch_environment

ROOT = Path(__file__).resolve().parents[3]


def make_report(outcome: str = "passed", longrepr: object = None) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="t", location=("t", 0, "t"), keywords={}, outcome=outcome, longrepr=longrepr, when="call"  # type: ignore[arg-type]
    )


def run_pytest(folder: Path, *options: str, shared: str = "pytest_plugins") -> subprocess.CompletedProcess[str]:
    # Registered once, by its entry point where mpidist is installed, else by name.
    (folder / "conftest.py").write_text(f"from tests.conftest import {shared}\n")
    environment = {**launch_environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=50,
    )


def test_a_failure_elsewhere_fails_here_and_brings_the_traceback() -> None:
    report = make_report()
    combine(report, [Outcome("passed"), Outcome("failed", "the traceback", "ValueError: x")], rank=0)
    assert report.failed
    assert "failed on rank 1 of 2" in report.longreprtext
    assert "the traceback" in report.longreprtext
    assert report.longrepr.reprcrash.message == "rank 1: ValueError: x"  # type: ignore[union-attr]


def test_a_failure_here_keeps_its_traceback_and_adds_others() -> None:
    report = make_report("failed", "mine")
    outcomes = [Outcome("failed", "mine", "A"), Outcome("failed", "theirs", "B"), Outcome("failed", "theirs", "B")]
    combine(report, outcomes, rank=0)
    assert report.longreprtext == "mine"
    assert report.sections == [("failed on ranks 1-2 of 3", "theirs")]


def test_the_same_failure_everywhere_is_told_once() -> None:
    report = make_report("failed", "mine")
    combine(report, [Outcome("failed", "mine", "A"), Outcome("failed", "mine", "A")], rank=0)
    assert report.sections == []


def test_skips_must_agree() -> None:
    skip = ("test.py", 1, "Skipped: no")
    report = make_report("skipped", skip)
    mine = outcome_of(report)
    combine(report, [mine, mine], rank=0)
    assert report.skipped
    combine(report, [mine, Outcome("passed")], rank=0)
    assert report.failed
    assert "skipped on rank 0 (Skipped: no), run on the others" in report.longreprtext


def test_an_expected_failure_on_one_rank_is_expected() -> None:
    report = make_report()
    combine(report, [Outcome("passed", wasxfail="why"), Outcome("skipped", "why", "why", "why")], rank=0)
    assert report.skipped
    assert report.wasxfail == "why"


def test_a_strict_expected_failure_on_one_rank_is_expected() -> None:
    strict, came = make_report("failed", "[XPASS(strict)] why"), make_report("skipped", ("t.py", 1, "no"))
    came.wasxfail = "why"
    outcomes = [outcome_of(strict), outcome_of(came)]
    combine(strict, outcomes, rank=0)
    combine(came, outcomes, rank=1)
    assert [(one.outcome, one.wasxfail) for one in (strict, came)] == [("skipped", "why")] * 2
    assert strict.longrepr is None
    # Where it comes on no rank, or another failure does, the test fails.
    strict = make_report("failed", "[XPASS(strict)] why")
    combine(strict, [outcome_of(strict)] * 2, rank=0)
    assert (strict.outcome, strict.longrepr) == ("failed", "[XPASS(strict)] why")
    combine(came, [*outcomes, Outcome("failed", "the traceback", "ValueError: x")], rank=1)
    assert came.failed
    assert "the traceback" in came.longreprtext
    assert "XPASS" not in came.longreprtext


def test_difference_of_collections_names_the_first() -> None:
    text = collection_difference([["a", "b"], ["a"], ["a", "b"]], [[], ["ImportError: x"], []])
    assert "on rank 1 they are not the 2 tests of rank 0" in text
    assert "'b' on rank 0, 'nothing' on rank 1" in text
    assert "rank 1: ImportError: x" in text


def test_one_rank_is_one_node() -> None:
    solo = SoloCommunicator()
    assert fake_nodes(solo, 2) is solo


def test_a_hang_ends_the_run_with_stacks(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, threading\n"
        "def test_quick(communicator):\n    assert communicator.size == 1\n"
        "@pytest.mark.timeout_seconds(0.5)\n"
        "def test_slow():\n    threading.Event().wait()\n"
    )
    result = run_pytest(tmp_path)
    assert result.returncode == 1
    assert "rank 0 of 1" in result.stderr
    assert "test_it.py::test_slow after 0.5 s" in result.stderr
    assert "in test_slow" in result.stderr


@pytest.mark.parametrize("mark", ["timeout_seconds(0.5)", "timeout_seconds(seconds=0.5)"])
def test_the_limit_of_a_mark_has_a_name(mark: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import pytest, threading\n@pytest.mark.{mark}\ndef test_slow():\n    threading.Event().wait()\n"
    )
    assert "test_it.py::test_slow after 0.5 s" in run_pytest(tmp_path, "--mpi-timeout", "20").stderr


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(seconds: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    for option in ("--mpi-timeout", "--mpi-grace"):
        result = run_pytest(tmp_path, f"{option}={seconds}")
        assert (result.returncode, result.stdout) == (pytest.ExitCode.USAGE_ERROR, "")
        assert f"argument {option}: " in result.stderr
    assert run_pytest(tmp_path, "-o", f"mpi_timeout={seconds}").returncode == pytest.ExitCode.USAGE_ERROR
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.timeout_seconds({seconds!r})\ndef test_it():\n    pass\n"
    )
    result = run_pytest(tmp_path)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"timeout_seconds: expected a number of seconds, got '{seconds}'" in result.stderr


def test_a_single_process_has_no_limit_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import threading\ndef test_threads():\n    assert threading.active_count() == 1\n"
    )
    assert run_pytest(tmp_path).returncode == 0
    assert run_pytest(tmp_path, "--mpi-timeout", "20").returncode == 1


def test_an_interrupt_ends_the_run_by_itself(tmp_path: Path) -> None:
    """Also beside the check for leaks, to which pytest comes last."""
    (tmp_path / "test_it.py").write_text("def test_it():\n    raise KeyboardInterrupt('by hand')\n")
    result = run_pytest(tmp_path, shared="*")
    assert result.returncode == pytest.ExitCode.INTERRUPTED, result.stdout + result.stderr
    assert "test_it.py:2: KeyboardInterrupt" in result.stdout, result.stdout
    assert "Error" not in result.stderr, result.stderr


def test_a_run_that_a_hang_ends_has_told_its_failures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, threading\ndef test_fails():\n    raise ValueError('told before')\n"
        "@pytest.mark.timeout_seconds(0.5)\ndef test_hangs():\n    threading.Event().wait()\n"
    )
    result = run_pytest(tmp_path)
    assert "time limit: rank 0 of 1" in result.stderr, result.stderr
    assert result.stdout.count("ValueError: told before") == 1, result.stdout


MARKED = """
import pytest

def test_plain():
    pass

@pytest.mark.mpi
def test_marked():
    pass

@pytest.mark.mpi(min_size=2)
def test_of_two():
    pass
"""
# The first as where mpidist is installed, the second as where a conftest.py names the plugin.
WAYS = [("_INSTALLED", [] if _INSTALLED else ["-p", "mpidist.testing.plugin"]), ("pytest_plugins", [])]


@pytest.mark.parametrize(("shared", "options"), WAYS, ids=["installed", "named"])
@pytest.mark.parametrize("other", [["-p", "no:pytest_mpi"], []], ids=["without pytest-mpi", "beside it"])
def test_the_marker_is_there_with_and_without_pytest_mpi(
    shared: str, options: list[str], other: list[str], tmp_path: Path
) -> None:
    if not other:
        pytest.importorskip("pytest_mpi")
    (tmp_path / "test_it.py").write_text(MARKED)
    options = [*options, *other, "--strict-markers", "-rs"]
    for option, counts, reason in (
        ([], "1 passed, 2 skipped", "need --with-mpi option to run"), (["--with-mpi"], "2 passed, 1 skipped", "2 "),
    ):
        result = run_pytest(tmp_path, *options, *option, shared=shared)
        assert result.returncode == 0, result.stdout + result.stderr
        assert counts in result.stdout
        assert reason in result.stdout
    helped = run_pytest(tmp_path, *options, "--help", shared=shared).stdout
    assert helped.count("--with-mpi ") == 1, helped


def test_a_marker_with_other_arguments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.mpi(2)\ndef test_it():\n    pass\n")
    result = run_pytest(tmp_path, "-p", "no:pytest_mpi", "--with-mpi")
    assert result.returncode != 0
    assert "expected @pytest.mark.mpi(min_size=2), got (2,)" in result.stdout + result.stderr


def test_an_option_of_a_projects_own_stays_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MARKED)
    (tmp_path / "own.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--with-mpi', default='x')\n")
    shared, options = WAYS[0]
    result = run_pytest(tmp_path, "-p", "no:pytest_mpi", "-p", "own", *options, "--with-mpi=3", shared=shared)
    assert "3 passed" in result.stdout, result.stdout + result.stderr
