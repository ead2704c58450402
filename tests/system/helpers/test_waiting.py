"""The helpers of tests: waits for what another process does, and the second try of what was impossible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import limits, stuck
from tests.helpers.launching import ROOT, run_program
from tests.helpers.waiting import page_of, process_of, until, until_exists, until_waits_in

WAITING = """
import sys
from pathlib import Path
import mpidist
from tests.helpers.waiting import until_exists, until_waits_in
strategy = mpidist.MultiWorkerMirroredStrategy()
folder, rank = Path(sys.argv[1]), strategy.communicator.rank
if rank == 0:
    until_waits_in(1, "gather_object", "all_reduce")
    (folder / "seen").touch()
    until_exists(folder / "go")
strategy.reduce("SUM", 1.0, axis=None)
"""


def test_a_rank_is_seen_in_its_call_from_its_job_and_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAITING)

    def look(job: subprocess.Popen[str]) -> None:
        until_waits_in(2, "all_reduce", job=job)
        until_waits_in(1, "all_reduce", job=job)
        until_exists(tmp_path / "seen", job=job)
        # Rank 0 is in no call, and cannot come to one.
        assert page_of(process_of(0, job)) is not None
        monkeypatch.setenv(limits.VARIABLE, "0.01")
        with pytest.raises(AssertionError, match=r"still not process .* waits in all_reduce"):
            until_waits_in(0, "all_reduce", job=job)
        monkeypatch.undo()
        (tmp_path / "go").touch()

    result = run_program(3, program, tmp_path, meanwhile=look)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_job_that_ends_ends_the_wait(tmp_path: Path) -> None:
    job = subprocess.Popen(["sh", "-c", "echo said; exit 3"], stdout=subprocess.PIPE, text=True)
    with job, pytest.raises(AssertionError, match=r"(?s)ended with 3, before there is .*never.*said"):
        until_exists(tmp_path / "never", job=job)


def test_what_a_job_did_last_counts(tmp_path: Path) -> None:
    with subprocess.Popen(["touch", tmp_path / "mark"], text=True) as job:
        job.wait()
        until_exists(tmp_path / "mark", job=job)


TRIES = """
import subprocess
import pytest
from tests.helpers import second_try, stuck

@pytest.fixture
def made(tmp_path_factory):
    starts.append("fixture")
    if len(starts) == 1:
        raise stuck.BrokenQueueError("of the fixture")

starts = []
died = subprocess.Popen(["sh", "-c", "kill -PIPE $$", "-m", "tests.helpers.messages", "folder"])
died.wait()

def test_second(made, tmp_path):
    assert not any(tmp_path.iterdir())
    (tmp_path / "mark").touch()
    starts.append("test")
    if len(starts) == 3:
        raise stuck.BrokenLauncherError("of the test")
    assert starts == ["fixture", "fixture", "test", "test"]

def test_launcher():
    stuck.note_launcher(died, "")
    starts.append("launcher")
    assert starts[4:] == ["launcher"] * 2

def test_launcher_that_hurt_nobody():
    stuck.note_launcher(died, "")
    starts.append("nobody")

def test_never():
    starts.append("never")
    raise stuck.NotStartedError("never")

def test_error():
    starts.append("error")
    raise AssertionError("an error of its own")

def test_counts():
    assert starts[4:] == ["launcher"] * 2 + ["nobody"] + ["never"] * second_try.STARTS + ["error"]
"""


def test_what_was_proved_to_be_impossible_runs_again_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "test_tries.py"
    file.write_text(TRIES)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.second_try", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )
    assert "2 failed, 4 passed" in result.stdout, result.stdout + result.stderr
    for reason in ("of the fixture", "of the test", "never", "died of SIGPIPE"):
        assert re.search(rf"started again: .*: .*{reason}\n", result.stdout), result.stdout
    # Each reason of each test once.
    assert result.stdout.count("started again: ") == 4, result.stdout


@pytest.mark.parametrize(
    ("end", "is_launchers"), [("kill -PIPE $$", True), ("kill -KILL $$", False), ("exit 1", False)]
)
def test_only_the_launchers_own_death_by_sigpipe_is_a_proof(tmp_path: Path, end: str, is_launchers: bool) -> None:
    job = subprocess.Popen(["sh", "-c", end, "-m", "tests.helpers.messages", str(tmp_path)], text=True)
    job.wait()
    if is_launchers:
        with pytest.raises(stuck.BrokenLauncherError, match="mpirun has died of SIGPIPE"):
            stuck.require_launcher(job)
        stuck.DEATHS.clear()
    else:
        stuck.require_launcher(job)


def test_a_launcher_that_has_started_no_rank_is_a_proof() -> None:
    with subprocess.Popen(["false"], text=True) as job, pytest.raises(stuck.NotStartedError):
        stuck.require_launcher(job, f"[n1] {stuck.NOT_STARTED}\n")


def test_limits_follow_what_a_start_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.VARIABLE, "1")
    quiet = limits.limit(10)
    limits.note_start(3 * limits.QUIET_SECONDS)
    assert limits.limit(10) == pytest.approx(3 * quiet)
    limits.note_start(0.1)
    assert limits.limit(10) == quiet
    until(lambda: True)
