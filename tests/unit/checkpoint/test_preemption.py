"""Preemption in one process: when it saves, when it ends, and when the job is queued again."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.directory.lock import this_process
from mpidist.checkpoint.directory.state import LOCK_FILE
from mpidist.checkpoint.preemption import handler as preemption
from mpidist.checkpoint.preemption import termination
from mpidist.cluster.signals import SIGNALS
from mpidist.cluster.slurm import job
from mpidist.errors import CheckpointError, LauncherError
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
from tests.helpers.clocks import SetClock

# Where another test has loaded JAX, which warns of every fork.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

ENDINGS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals are as before after each test, and this process is in no job of Slurm's."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    # No program ends here.
    monkeypatch.setattr(preemption, "leave_later", lambda *_: None)
    before = [signal.getsignal(number) for number in ENDINGS]
    yield
    for one in Training.handlers:
        one.close()
    Training.handlers.clear()
    for number, handler in zip(ENDINGS, before, strict=True):
        signal.signal(number, handler)
    assert not any(one() for heard in SIGNALS._notices.values() for one in heard)


class Training:
    """A variable that counts steps, and a handler over it."""

    handlers: ClassVar[list[PreemptionCheckpointHandler]] = []

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        self.ended: list[int] = []
        self.variable: Any = mpidist.Variable(np.zeros(3))
        self.checkpoint = mpidist.Checkpoint(variable=self.variable)
        settings.setdefault("exit_fn", lambda: self.ended.append(self.handler.total_run_calls))
        self.handler: PreemptionCheckpointHandler = PreemptionCheckpointHandler(
            None, self.checkpoint, folder, TerminationConfig(**{"save_seconds": 0.1, **settings}), clock=clock
        )
        self.handlers.append(self.handler)

    def step(self) -> int:
        self.variable.assign_add(np.ones(3))
        return int(self.variable.numpy()[0])

    def train(self, clock: SetClock, *seconds: float) -> None:
        """Run steps that take so many seconds by the handler's clock, until it has ended."""
        for one in seconds:
            if self.ended:
                return
            self.handler.run(self.step)
            clock.forward(one)


def saved_steps(folder: Path) -> int:
    """The steps of the latest checkpoint."""
    variable: Any = mpidist.Variable(np.zeros(3))
    path = mpidist.latest_checkpoint(folder)
    mpidist.Checkpoint(variable=variable).restore(path)
    return int(variable.numpy()[0])


@pytest.mark.parametrize("number", ENDINGS)
def test_one_step_runs_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    training = Training(tmp_path, exit_fn=None)

    def train() -> None:
        for index in range(10):
            if index == 3:
                os.kill(os.getpid(), number)
            assert training.handler.run(training.step) == index + 1

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 42
    assert (saved_steps(tmp_path), training.handler.total_run_calls) == (4, 4)
    # One that comes late does not change the exit code.
    os.kill(os.getpid(), number)
    signal.signal(number, signal.SIG_DFL)
    again = Training(tmp_path)
    assert (again.handler.total_run_calls, again.step()) == (4, 5)


def test_a_call_after_the_step_saves_after_the_next_one(tmp_path: Path) -> None:
    training = Training(tmp_path, exit_code=7, exit_fn=None)

    def train() -> None:
        for index in range(10):
            if index == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            training.step()
            training.handler.save_checkpoint_if_preempted()

    with pytest.raises(SystemExit) as caught:
        train()
    assert (caught.value.code, saved_steps(tmp_path)) == (7, 5)


def test_arguments_go_to_the_function_that_saves(tmp_path: Path) -> None:
    given: list[object] = []
    training = Training(tmp_path, save_fn=lambda *args, **named: given.append((args, named)))
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(5):
        training.handler.save_checkpoint_if_preempted(3, check_interval=True)
    assert given == [((3,), {"check_interval": True})]
    assert mpidist.latest_checkpoint(tmp_path) is None
    # The exit function has returned: the program goes on, and signals are its own.
    assert len(training.ended) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# By the clock of a test a step is so long that a save, whose time is measured, counts for nothing beside it.
LONG = 1e6


def test_in_the_grace_period_training_goes_on(tmp_path: Path) -> None:
    clock = SetClock()
    training = Training(tmp_path, clock, grace_period=20.5 * LONG)
    training.train(clock, *[LONG] * 3)
    os.kill(os.getpid(), signal.SIGTERM)
    training.train(clock, *[LONG] * 2)
    assert saved_steps(tmp_path) == 4
    training.train(clock, *[LONG] * 40)
    # The period is over 23.5 steps after the beginning: from 18 on there are no six steps and a save left, and all
    # ranks know one step later.
    assert training.ended == [19]
    assert saved_steps(tmp_path) == 19


def test_the_grace_period_begins_with_the_signal(tmp_path: Path) -> None:
    """And not when the ranks tell each other of it, which may be a long step later."""
    clock = SetClock()
    training = Training(tmp_path, clock, grace_period=41.0 * LONG)
    training.train(clock, LONG, LONG)
    os.kill(os.getpid(), signal.SIGTERM)
    clock.forward(10 * LONG)
    training.train(clock, *[LONG] * 60)
    # The signal came at 2, and 43 is the end. Step n begins at 10 + n, and the mean of those before is (10 + n) / n: at
    # 34 six of them are left, and not at 35.
    assert training.ended == [26]


def test_a_second_signal_does_not_make_the_grace_period_longer(tmp_path: Path) -> None:
    clock = SetClock()
    training = Training(tmp_path, clock, grace_period=20.5 * LONG)
    os.kill(os.getpid(), signal.SIGTERM)
    training.train(clock, *[LONG] * 8)
    os.kill(os.getpid(), signal.SIGUSR1)
    training.train(clock, *[LONG] * 2)
    assert saved_steps(tmp_path) == 1
    training.train(clock, *[LONG] * 40)
    assert training.ended == [16]


def test_before_the_time_limit_it_saves(tmp_path: Path) -> None:
    clock = SetClock()
    training = Training(tmp_path, clock, time_limit=20.5 * LONG, save_factor=2.0, save_seconds=3.0 * LONG)
    training.train(clock, *[LONG] * 40)
    # Twice the time of a save, which was not measured yet, and two steps: 13 is the first that is too late for them.
    assert training.ended == [14]
    assert saved_steps(tmp_path) == 14


@pytest.mark.parametrize("long_one", [1, 3, 5])
def test_the_longest_step_may_come_again_before_the_time_limit(tmp_path: Path, long_one: int) -> None:
    clock = SetClock()
    training = Training(tmp_path, clock, time_limit=30.5 * LONG, save_seconds=0.0)
    training.train(clock, *[LONG * (5 if number == long_one else 1) for number in range(60)])
    # Step n begins at n + 4: at 20.5 there are two of the longest left.
    assert training.ended == [18]


def test_a_directory_to_which_nobody_can_save_is_no_surprise_of_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    for place in (folder, folder / "checkpoints", Path("/proc/self/checkpoints")):
        with pytest.raises(OSError, match=f"no checkpoint can be saved to '{place}': .* Name a directory"):
            Training(place)
    Training(folder / "checkpoints", save_fn=lambda: None)
    Training(tmp_path / "new" / "checkpoints")
    assert os.listdir(tmp_path / "new" / "checkpoints") == []


def test_a_directory_to_which_another_job_saves_is_an_error_at_the_start(tmp_path: Path) -> None:
    start = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    other = dataclasses.replace(this_process(), process=os.getppid(), started=start)
    (tmp_path / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(other)))
    with pytest.raises(CheckpointError, match="another job saves its checkpoints"):
        Training(tmp_path)
    Training(tmp_path, save_fn=lambda: None)


@pytest.mark.parametrize("content", [None, "", "[]"])
def test_a_job_goes_on_where_its_state_file_is_lost(tmp_path: Path, content: str | None) -> None:
    training = Training(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    while not training.ended:
        training.handler.run(training.step)
    training.handler.close()
    (tmp_path / "checkpoint").unlink()
    if content is not None:
        (tmp_path / "checkpoint").write_text(content)
    assert Training(tmp_path).handler.total_run_calls == training.ended[0] > 0


def test_without_hard_links_the_check_passes_and_so_does_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", fail)
    training = Training(tmp_path)
    assert os.listdir(tmp_path) == []
    os.kill(os.getpid(), signal.SIGTERM)
    while not training.ended:
        training.handler.run(training.step)
    assert training.ended[0] == saved_steps(tmp_path)


def test_a_save_that_fails_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    training = Training(folder)
    training.handler.run(training.step)
    os.kill(os.getpid(), signal.SIGTERM)
    training.handler.run(training.step)
    folder.rmdir()
    folder.write_text("no folder")
    for _ in range(2):
        with pytest.raises(OSError, match="File exists"):
            training.handler.run(training.step)
    assert training.ended == []
    folder.unlink()
    training.handler.run(training.step)
    assert training.ended == [2]
    assert saved_steps(folder) == 2


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
@pytest.mark.parametrize("is_slurms", [False, True])
def test_a_clock_that_is_set_moves_no_end(
    tmp_path: Path, jump: float, is_slurms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    present, clock = int(time.time()), SetClock()
    wall = present
    monkeypatch.setattr(time, "time", lambda: wall)
    if is_slurms:
        monkeypatch.setenv("SLURM_JOB_ID", "5")
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(present + 1050))
    training = Training(tmp_path, clock, save_seconds=0.0, **({} if is_slurms else {"time_limit": 1050.0}))
    training.train(clock, *[100.0] * 3)
    wall += int(jump)
    training.train(clock, *[100.0] * 30)
    assert training.ended == [10]


def test_slurms_end_of_the_job_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    far = Training(tmp_path)
    for _ in range(5):
        far.handler.run(far.step)
    assert not far.ended
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time())))
    near = Training(tmp_path)
    for _ in range(5):
        near.handler.run(near.step)
    assert near.ended == [1]
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    with pytest.raises(LauncherError, match=r"SLURM_JOB_END_TIME must be a number of seconds.*'soon'"):
        Training(tmp_path)


def test_less_time_than_a_save_may_take_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Training(tmp_path, time_limit=91, save_seconds=30.0)
    assert not caplog.records
    short = Training(tmp_path, time_limit=60, save_seconds=30.0)
    assert "ends in 60 s, and 90 s are reserved for saving (`save_factor` 3 times 30.0 s" in caplog.text
    assert "`TerminationConfig(save_seconds=...)`" in caplog.text
    for _ in range(5):
        short.handler.run(short.step)
    assert short.ended == [1]


def test_a_function_tells_of_the_end(tmp_path: Path) -> None:
    ends = [False]
    training = Training(tmp_path, termination_watcher_fn=lambda: ends[0])
    training.handler.run(training.step)
    ends[0] = True
    while not training.ended:
        training.handler.run(training.step)
    assert training.ended[0] == saved_steps(tmp_path)


def test_an_error_of_the_function_is_raised(tmp_path: Path) -> None:
    def fail() -> bool:
        raise ZeroDivisionError("by a function")

    training = Training(tmp_path, termination_watcher_fn=fail)

    def train() -> None:
        while True:
            training.handler.run(training.step)

    with pytest.raises(ZeroDivisionError, match="by a function"):
        train()


def test_a_function_is_asked_no_more_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "WATCHER_SECONDS", 0.01)
    asked: queue.Queue[threading.Thread] = queue.Queue()
    training = Training(tmp_path, termination_watcher_fn=lambda: asked.put(threading.current_thread()))
    watcher = asked.get()
    training.handler.close()
    watcher.join()


def test_signals_are_given_back(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    with Training(tmp_path).handler:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    Training(tmp_path)
    Training.handlers.clear()
    gc.collect()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2


def test_steps_of_another_thread_than_the_main_one_end_it_alone(tmp_path: Path) -> None:
    heard: list[int] = []
    codes: list[object] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    training = Training(tmp_path, exit_fn=None)

    def train() -> None:
        with training.handler as handler:
            try:
                for _ in range(5):
                    handler.run(training.step)
            except SystemExit as error:
                codes.append(error.code)

    os.kill(os.getpid(), signal.SIGUSR1)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert codes == [42]
    assert saved_steps(tmp_path) == 1
    # It was closed there, too: signals are given back.
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_a_second_handler_that_takes_turns_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Training(tmp_path / "before").handler as before:
        before.run(lambda: None)
    first, second = Training(tmp_path / "first"), Training(tmp_path / "second")
    for _ in range(2):
        first.handler.run(first.step)
        assert not caplog.messages or second.handler.total_run_calls
        second.handler.run(second.step)
    assert ["several PreemptionCheckpointHandlers" in text for text in caplog.messages] == [True]


def run_and_sleep(runs: Any) -> None:
    runs.set()
    threading.Event().wait()


def test_a_forked_child_is_ended_by_a_signal(tmp_path: Path) -> None:
    """As `multiprocessing` ends its workers, also those of a DataLoader."""
    training = Training(tmp_path)
    fork = multiprocessing.get_context("fork")
    # At once, and when it runs.
    for waits in (False, True):
        runs = fork.Event()
        child = fork.Process(target=run_and_sleep, args=(runs,))
        child.start()
        if waits:
            runs.wait()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM
    assert training.handler._notice.reason == 0


SCONTROL = r"""#!/bin/sh
if [ "$1" = show ]; then
    printf "JobId=12 JobName=$SCONTROL_NAME\n   UserId=me(1)\n$SCONTROL_SHOWS   Comment=$SCONTROL_NAME\n"
    exit
fi
kill -TERM $$
echo "$@" >> "$SCONTROL_LOG"
[ -z "$SCONTROL_FAILS" ] || { echo "not allowed" >&2; exit 1; }
"""
# As of a job that runs.
RUNS = """\
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   PreemptEligibleTime=2026-11-23T10:48:21 PreemptTime=None
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of Slurm's; what `scontrol` was asked is in the file that this returns."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    log = tmp_path / "asked"
    log.touch()
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SCONTROL_LOG": str(log), "SLURM_JOB_ID": "12",
                   "SLURM_JOB_END_TIME": "4000000000", "SCONTROL_SHOWS": RUNS, "SCONTROL_NAME": "train"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return log


def preempt(folder: Path, **settings: Any) -> Training:
    training = Training(folder, requeue=True, **settings)
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(5):
        training.handler.run(training.step)
    assert len(training.ended) == 1
    return training


def test_a_job_is_queued_again(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt(tmp_path / "a")
    assert slurm.read_text() == "requeue 12\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    preempt(tmp_path / "a")
    assert slurm.read_text() == "requeue 12\nrequeue 10_2\n"


@pytest.mark.parametrize(
    ("shows", "asked", "warning"),
    [
        (RUNS, "requeue 12\n", "job 12 is requeued"),
        ("", "requeue 12\n", "job 12 is requeued"),
        (RUNS.replace("RUNNING", "COMPLETING"), "", "not requeued: job 12 was cancelled (scancel)"),
        (RUNS.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit"), "requeue 12\n", "12 is requeued"),
        (RUNS.replace("RUNNING", "COMPLETING").replace("PreemptTime=None", "PreemptTime=2026-11-23T10:48:22"),
         "requeue 12\n", "job 12 is requeued"),
        # Somebody else was first.
        (RUNS.replace("RUNNING", "COMPLETING").replace("Restarts=0", "Restarts=1"), "", "job 12 is requeued"),
    ],
)
def test_a_job_that_was_cancelled_is_not_queued_again(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shows: str,
    asked: str, warning: str,
) -> None:
    monkeypatch.setenv("SCONTROL_SHOWS", shows)
    preempt(tmp_path / "a")
    assert slurm.read_text() == asked
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        # A name that is no UTF-8, and names and comments that look like fields.
        (r"Gr\366sse", RUNS),
        ("a Restarts=9 BatchFlag=1", RUNS),
        ("Requeue=1 Restarts=9 BatchFlag=1 JobState=COMPLETING", RUNS),
        *(("train", RUNS.replace("Restarts=0", given)) for given in ("Restarts=", "Restarts=(null)", "Reboots=0")),
        # The second component of a heterogeneous job.
        ("train", RUNS + "\n" + RUNS.replace("Restarts=0", "Restarts=1")),
    ],
)
def test_a_job_is_queued_again_whatever_slurm_shows_of_it(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str,
    shows: str,
) -> None:
    monkeypatch.setenv("SCONTROL_NAME", name)
    monkeypatch.setenv("SCONTROL_SHOWS", shows)
    preempt(tmp_path / "a")
    assert slurm.read_text() == "requeue 12\n"
    assert "job 12 is requeued" in caplog.text


def test_a_job_is_not_queued_again_too_often(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    preempt(tmp_path / "a", max_requeues=2)
    assert slurm.read_text() == ""
    assert "it was requeued 2 time(s), and `max_requeues` is 2" in caplog.text
    preempt(tmp_path / "a", max_requeues=3)
    assert slurm.read_text() == "requeue 12\n"


def test_a_job_without_a_newer_checkpoint_is_not_queued_again(
    tmp_path: Path, slurm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a"
    preempt(folder, save_fn=lambda: None)
    assert "no newer checkpoint was saved since its start (the last one is none)" in caplog.text
    first = preempt(folder)
    assert slurm.read_text() == "requeue 12\n"
    preempt(folder, save_fn=lambda: None)
    latest = first.handler._manager.latest_checkpoint
    assert f"no newer checkpoint was saved since its start (the last one is {latest}" in caplog.text
    # A function may save elsewhere, and say where.
    elsewhere = tmp_path / "elsewhere.h5"
    preempt(folder, save_fn=lambda: elsewhere.write_text("saved") and elsewhere)
    assert slurm.read_text() == "requeue 12\n" * 2


def test_a_refusal_of_slurms_is_a_warning(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("SCONTROL_FAILS", "1")
    preempt(tmp_path / "a")
    assert "not requeued: `scontrol requeue 12` failed with code 1: not allowed" in caplog.text
    assert "#SBATCH --requeue" in caplog.text
    assert slurm.read_text() == "requeue 12\n"
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(LauncherError, match=r"SLURM_JOB_ID is not set\). Start the program by sbatch"):
        job.requeue()


def test_a_program_ends_whatever_comes_where_its_job_is_queued_again(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise ValueError("a text that nobody expects")

    monkeypatch.setattr(job, "requeue", fail)
    preempt(tmp_path / "a")
    assert "not requeued: a text that nobody expects" in caplog.text


def test_what_it_is_given_is_checked(tmp_path: Path) -> None:
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(1.0))
    given: Any = "a"
    with pytest.raises(TypeError, match="needs `checkpoint_dir`"):
        PreemptionCheckpointHandler(None, checkpoint)
    with pytest.raises(TypeError, match=r"must be a mpidist.Checkpoint or CheckpointManager, got 'a'"):
        PreemptionCheckpointHandler(None, given)
    with pytest.raises(ValueError, match="`checkpoint_dir` is for a Checkpoint"):
        PreemptionCheckpointHandler(None, mpidist.CheckpointManager(checkpoint, tmp_path, 1), tmp_path)
    with pytest.raises(ValueError, match="got SIGINT"):
        TerminationConfig(signals=[signal.SIGINT])
    with pytest.raises(ValueError, match="must be between 0 and 255, got 300"):
        TerminationConfig(exit_code=300)


def train_on_servers(folder: Path, scheduled: int, clock: SetClock, **settings: Any) -> list[int]:
    """Schedule functions that count, one in a step of a second, until the handler ends it.

    Returns:
        What the count was, and the steps so far, when it ended.
    """
    ended: list[int] = []
    with mpidist.ParameterServerStrategy(options=mpidist.ServerOptions(heap_bytes=1 << 20)) as strategy:
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            count: Any = mpidist.Variable(0)
        config = TerminationConfig(
            save_seconds=0.0, save_factor=1.0, **settings,
            exit_fn=lambda: ended.extend((int(count), handler.total_run_calls)),
        )
        checkpoint = mpidist.Checkpoint(count=count)
        with PreemptionCheckpointHandler(None, checkpoint, folder, config, clock=clock) as handler:
            assert int(count) == handler.total_run_calls
            while not ended:
                if handler.total_run_calls < scheduled:
                    handler.run(coordinator.schedule, lambda: count.assign_add(1))
                else:
                    handler.run(lambda: None)
                clock.forward(1.0)
                if handler.total_run_calls == 7 and "time_limit" not in settings:
                    os.kill(os.getpid(), signal.SIGTERM)
        coordinator.join()
        return ended


def test_functions_that_were_scheduled_are_in_the_checkpoint(tmp_path: Path) -> None:
    """They count once, and the next program goes on behind them."""
    assert train_on_servers(tmp_path, 1000, SetClock()) == [8, 8]
    count: Any = mpidist.Variable(0)
    mpidist.Checkpoint(count=count).restore(mpidist.latest_checkpoint(tmp_path))
    assert int(count) == 8


def fail() -> None:
    raise OSError("a worker's child has died")


@pytest.mark.parametrize("where", ["function", "chief"])
def test_an_error_on_servers_after_a_signal_loses_no_checkpoint(tmp_path: Path, where: str) -> None:
    """What has ended is saved; what has failed, and what was never begun, is not in it."""
    ended: list[int] = []
    with mpidist.ParameterServerStrategy(options=mpidist.ServerOptions(heap_bytes=1 << 20)) as strategy:
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            count: Any = mpidist.Variable(0)
        config = TerminationConfig(exit_fn=lambda: ended.append(handler.total_run_calls))
        handler = PreemptionCheckpointHandler(None, mpidist.Checkpoint(count=count), tmp_path, config)

        def train() -> None:
            for _ in range(5):
                handler.run(coordinator.schedule, lambda: count.assign_add(1))
            os.kill(os.getpid(), signal.SIGTERM)
            handler.run(coordinator.schedule if where == "function" else lambda function: function(), fail)
            handler.run(coordinator.join)

        with pytest.raises(OSError, match="a worker's child has died"), handler:
            train()
    assert ended == [6 if where == "function" else 5]
    saved: Any = mpidist.Variable(0)
    mpidist.Checkpoint(count=saved).restore(mpidist.latest_checkpoint(tmp_path))
    assert int(saved) == 5


def test_there_is_time_for_the_functions_in_the_queue(tmp_path: Path) -> None:
    """None of 100 has ended since the first was seen, at 1 s: they may take 100 times as long."""
    # At t, with two steps: t + 2 + 100 (t - 1). That is 20,102 at 200 and 20,203 at 201; all ranks know a step later.
    assert train_on_servers(tmp_path, 100, SetClock(), time_limit=20_150.0) == [100, 202]


def test_a_handler_that_a_program_has_set_again_ends_nothing_else(tmp_path: Path) -> None:
    """As code does that keeps the handlers it finds, and sets them again when it ends."""
    first = Training(tmp_path / "first")
    kept = signal.getsignal(signal.SIGTERM)
    first.handler.close()
    signal.signal(signal.SIGTERM, kept)
    second = Training(tmp_path / "second")
    # The signal ends it, and is not sent to itself for ever.
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
    second.handler.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
