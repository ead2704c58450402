"""The manager, its state file and its lock, in one process."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory import lock as lock_module
from mpidist.checkpoint.directory.lock import DirectoryLock, LockOwner, is_dead, this_process
from mpidist.checkpoint.directory.state import (
    LOCK_FILE,
    CheckpointEntry,
    DirectoryState,
    read_state,
    retire,
    write_state,
)
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import make_arena

ROOT = Path(__file__).resolve().parents[3]
ARENA = make_arena(SoloCommunicator())


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def files(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(".h5"))


def test_manager_numbers_keeps_and_restores(tmp_path: Path) -> None:
    v = variable(0.0)
    with CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=2) as manager:
        assert not manager.checkpoints
        for step in range(1, 5):
            v.assign(step)
            assert manager.save() == str(tmp_path / f"ckpt-{step}.h5")
        assert manager.checkpoints == [str(tmp_path / "ckpt-3.h5"), str(tmp_path / "ckpt-4.h5")]
        assert files(tmp_path) == ["ckpt-3.h5", "ckpt-4.h5"]
        assert manager.latest_checkpoint == latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-4.h5")
    fresh = variable(0.0)
    again = CheckpointManager(Checkpoint(v=fresh), tmp_path, max_to_keep=2)
    assert again.checkpoints == [str(tmp_path / "ckpt-3.h5"), str(tmp_path / "ckpt-4.h5")]
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-4.h5")
    assert fresh.numpy() == 4.0
    assert again.save() == str(tmp_path / "ckpt-5.h5")
    assert files(tmp_path) == ["ckpt-4.h5", "ckpt-5.h5"]
    again.close()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-4.h5", "ckpt-5.h5"]


def test_paths_in_bytes_are_paths(tmp_path: Path) -> None:
    v = variable(1.0)
    folder: Any = os.fsencode(tmp_path)
    assert Checkpoint(v=v).save(folder + b"/ckpt") == latest_checkpoint(folder) == str(tmp_path / "ckpt-1.h5")
    with CheckpointManager(Checkpoint(v=v), folder, max_to_keep=1) as manager:
        # What `Checkpoint.save` has written is not the manager's to replace.
        assert manager.save() == str(tmp_path / "ckpt-2.h5")
    v.assign(0.0)
    Checkpoint(v=v).restore(folder + b"/ckpt-1.h5").assert_consumed()
    assert v.numpy() == 1.0


def test_an_overwritten_number_moves_to_the_end(tmp_path: Path) -> None:
    with CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 3, checkpoint_name="m") as manager:
        for number in (10, 20, 10):
            manager.save(checkpoint_number=number)
        assert [os.path.basename(path) for path in manager.checkpoints] == ["m-20.h5", "m-10.h5"]
        assert manager.checkpoint.save_counter == 3
        manager.save()
        assert files(tmp_path) == ["m-10.h5", "m-20.h5", "m-4.h5"]


def test_init_fn_is_called_when_there_is_nothing(tmp_path: Path) -> None:
    calls: list[int] = []
    manager = CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1, init_fn=lambda: calls.append(1))
    assert manager.restore_or_initialize() is None
    manager.save()
    assert manager.restore_or_initialize() is not None
    assert calls == [1]
    manager.close()


def test_interval_waits_for_enough_steps(tmp_path: Path) -> None:
    step = variable(0)
    manager = CheckpointManager(Checkpoint(s=step), tmp_path, 5, step_counter=step, checkpoint_interval=3)
    saved = []
    for now in range(1, 9):
        step.assign(now)
        saved.append(manager.save() is not None)
    assert saved == [True, False, False, True, False, False, True, False]
    assert manager.save(check_interval=False) is not None
    assert manager.save(check_interval=False) is None
    manager.close()
    other = CheckpointManager(Checkpoint(s=step), tmp_path, 5, step_counter=step, checkpoint_interval=3)
    other.restore_or_initialize()
    assert other.save() is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_to_keep": 0}, "max_to_keep"),
        ({"max_to_keep": 1, "checkpoint_interval": 2}, "step_counter"),
        ({"max_to_keep": 1, "checkpoint_name": "a/b"}, "checkpoint_name"),
    ],
)
def test_impossible_arguments(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, **arguments)


def test_retire_keeps_one_every_so_often() -> None:
    state = DirectoryState(tuple(CheckpointEntry(f"c-{n}", 100.0 * n) for n in range(1, 8)), 0.0, "c-7")
    kept, gone = retire(state, 2, 250.0)
    assert [entry.name for entry in kept.entries] == ["c-6", "c-7"]
    assert gone == ["c-1", "c-2", "c-4", "c-5"]
    assert kept.last_preserved == 300.0
    assert retire(state, None, 1.0) == (state, [])
    assert retire(state, 9, None) == (state, [])


def test_keep_every_n_hours_keeps_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    with CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1, keep_checkpoint_every_n_hours=1) as manager:
        for _ in range(5):
            clock[0] += 1801
            manager.save()
    assert files(tmp_path) == ["ckpt-2.h5", "ckpt-4.h5", "ckpt-5.h5"]


def test_latest_checkpoint_of_odd_directories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    path = Checkpoint(v=variable(0.0)).save(tmp_path / "c")
    assert latest_checkpoint(tmp_path) == path
    os.unlink(path)
    assert latest_checkpoint(tmp_path) is None
    for text in ("{", "[]", '{"all_model_checkpoint_paths": 3}'):
        (tmp_path / "checkpoint").write_text(text)
        with pytest.raises(ValueError, match=r"Invalid checkpoint state loaded from .*is not a valid"):
            latest_checkpoint(tmp_path)
        with caplog.at_level(logging.WARNING, "mpidist"):
            assert latest_checkpoint(tmp_path, fallback=True) is None
        assert "is not a valid" in caplog.text
        caplog.clear()
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(ValueError, match="Invalid checkpoint state loaded from"):
        latest_checkpoint(tmp_path)


def test_state_file_is_text_with_relative_names(tmp_path: Path) -> None:
    state = DirectoryState((CheckpointEntry("a-1.h5", 1.5), CheckpointEntry("a-2.h5", 2.5)), 0.5, "a-2.h5")
    write_state(str(tmp_path), state)
    assert read_state(str(tmp_path)) == state
    content = json.loads((tmp_path / "checkpoint").read_text())
    assert content["model_checkpoint_path"] == "a-2.h5"
    assert content["all_model_checkpoint_paths"] == ["a-1.h5", "a-2.h5"]


def test_leftovers_of_killed_saves_are_removed(tmp_path: Path) -> None:
    for name in (
        ".ckpt-7.h5.0123abcd.tmp", ".checkpoint.0123abcd.tmp", "checkpoint.lock.0123abcd.tmp",
        ".checkpoint.lock.0123abcd.tmp", ".other-1.h5.0123abcd.tmp", "ckpt.tmp",
    ):
        (tmp_path / name).write_text("x")
    with CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1) as manager:
        manager.save()
    assert sorted(os.listdir(tmp_path)) == [".other-1.h5.0123abcd.tmp", "checkpoint", "ckpt-1.h5", "ckpt.tmp"]
    Checkpoint(v=variable(0.0)).save(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.h5", "ckpt.tmp", "other-1.h5"]


def test_the_next_write_deletes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    left = [".best.h5.0123abcd.tmp", ".best.h5.89abcdef.tmp"]
    others = [".better.h5.0123abcd.tmp", ".best.h5.old.tmp", ".best-1.h5.0123abcd.tmp", "best.h5.0123abcd.tmp"]
    for name in left + others:
        (tmp_path / name).write_text("x")
    checkpoint = Checkpoint(v=variable(0.0))
    assert checkpoint.write(tmp_path / "best") == str(tmp_path / "best.h5")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "best.h5"])
    assert checkpoint.write(tmp_path / "new" / "best") == str(tmp_path / "new" / "best.h5")


def test_of_two_that_write_one_file_at_a_time_one_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = hdf5.complete

    def complete_later(blank: hdf5.Blank, checksums: list[int]) -> None:
        monkeypatch.undo()
        complete(blank, checksums)
        Checkpoint(v=variable(1.0)).write(tmp_path / "best")

    monkeypatch.setattr(hdf5, "complete", complete_later)
    with pytest.raises(FileNotFoundError, match="Another job has begun to write to the same file"):
        Checkpoint(v=variable(2.0)).write(tmp_path / "best")
    kept = variable(0.0)
    Checkpoint(v=kept).read(tmp_path / "best").assert_consumed()
    assert kept.numpy() == 1.0
    assert os.listdir(tmp_path) == ["best.h5"]


def test_a_manager_leaves_alone_what_another_job_writes_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluator keeps the best model in the directory of the training, which saves in the same moment."""
    manager = CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1)
    complete = hdf5.complete

    def complete_later(blank: hdf5.Blank, checksums: list[int]) -> None:
        monkeypatch.undo()
        manager.save()
        complete(blank, checksums)

    monkeypatch.setattr(hdf5, "complete", complete_later)
    path = Checkpoint(v=variable(2.0)).write(tmp_path / "ckpt-best")
    manager.close()
    best = variable(0.0)
    Checkpoint(v=best).read(path).assert_consumed()
    assert best.numpy() == 2.0
    assert files(tmp_path) == ["ckpt-1.h5", "ckpt-best.h5"]


def test_is_dead_knows_restarts_processes_and_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    me = this_process()
    assert (me.job, me.restart) == ("7", 2)
    elsewhere = replace(me, host="elsewhere")
    assert is_dead(me, me) is False
    assert is_dead(replace(elsewhere, restart=1), me) is True
    assert is_dead(replace(elsewhere, restart=3), me) is False
    assert is_dead(elsewhere, me) is None
    assert is_dead(replace(elsewhere, job="8"), me) is None
    assert is_dead(replace(me, job="8", started=me.started + 1), me) is True
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_dead(replace(me, process=ended.pid), me) is True


def test_a_living_process_keeps_its_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from mpidist.checkpoint.directory.lock import DirectoryLock; DirectoryLock(sys.argv[1]).acquire();"
        "print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    manager = CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"another job .*process {child.pid} on .*alive.*delete"):
            manager.save()
        assert files(tmp_path) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert manager.save() == str(tmp_path / "ckpt-1.h5")
    manager.close()
    assert not (tmp_path / LOCK_FILE).exists()


def test_the_lock_is_released_at_exit_and_shared_within_a_process(tmp_path: Path) -> None:
    lock = "from mpidist.checkpoint.directory.lock import DirectoryLock"
    code = f"import sys; {lock}; DirectoryLock(sys.argv[1]).acquire()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    assert os.listdir(tmp_path) == []
    first, second = DirectoryLock(str(tmp_path)), DirectoryLock(str(tmp_path))
    first.acquire()
    second.acquire()
    first.release()
    second.acquire()
    assert (tmp_path / LOCK_FILE).exists()
    second.release()
    second.release()
    assert os.listdir(tmp_path) == []


def hold_elsewhere(tmp_path: Path, **changes: Any) -> LockOwner:
    holder = replace(this_process(), host="elsewhere", **changes)
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(holder)))
    return holder


def test_a_silent_holder_on_another_host_is_replaced(tmp_path: Path) -> None:
    hold_elsewhere(tmp_path)
    old = time.time() - lock_module.DEAD_SECONDS - 5
    os.utime(tmp_path / LOCK_FILE, (old, old))
    mine = DirectoryLock(str(tmp_path))
    mine.acquire()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == asdict(this_process())
    mine.release()


def test_a_holder_on_another_host_that_is_heard_of_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_elsewhere(tmp_path)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        os.utime(tmp_path / LOCK_FILE, (time.time() + len(naps), time.time() + len(naps)))

    monkeypatch.setattr(time, "sleep", nap)
    with pytest.raises(CheckpointError, match="on elsewhere; it is alive"):
        DirectoryLock(str(tmp_path)).acquire()
    assert len(naps) == 1


def test_a_requeued_job_takes_over_and_the_old_one_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    hold_elsewhere(tmp_path, restart=0)
    mine = DirectoryLock(str(tmp_path))
    mine.acquire()
    hold_elsewhere(tmp_path, restart=2)
    with pytest.raises(CheckpointError, match=r"restart 2, .* taken over"):
        mine.acquire()
    mine.release()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["restart"] == 2


def test_the_lock_is_touched_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.01)
    mine = DirectoryLock(str(tmp_path))
    mine.acquire()
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    while os.stat(tmp_path / LOCK_FILE).st_mtime == 1:
        time.sleep(0.01)
    mine.release()


def test_a_lock_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: LockOwner) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock_module, "_encode", fail)
    with pytest.raises(OSError, match="No space left"):
        DirectoryLock(str(tmp_path)).acquire()
    assert not list(tmp_path.iterdir())


def test_a_damaged_lock_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("?")
    with pytest.raises(CheckpointError, match="is not a valid lock"):
        DirectoryLock(str(tmp_path)).acquire()


def test_a_lock_stays_that_of_its_directory_where_the_program_goes_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    lock = DirectoryLock("run")
    lock.acquire()
    here, there = tmp_path / "run" / LOCK_FILE, tmp_path / "other" / "run" / LOCK_FILE
    there.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "other")
    os.utime(here, (1, 1))
    while os.stat(here).st_mtime == 1:
        time.sleep(0.01)
    # The next save goes to the directory of that name that is there now.
    lock.acquire()
    assert (here.exists(), there.exists()) == (False, True)
    monkeypatch.chdir(tmp_path)
    lock.release()
    assert not there.exists()


def test_a_child_has_nothing_of_its_parents_lock(tmp_path: Path) -> None:
    program = """
import os, sys
from mpidist.checkpoint.directory.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire()
child = os.fork()
if child == 0:
    try:
        lock.acquire()
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("left:", os.listdir(sys.argv[1]), flush=True)
lock.release()
"""
    # Python warns of a fork beside a thread; the lock has one.
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    error, left = subprocess.check_output(command, text=True, timeout=60).splitlines()
    assert error.startswith("another job saves its checkpoints to")
    assert "it is alive" in error
    assert left == f"left: ['{LOCK_FILE}']"
    assert not list(tmp_path.iterdir())
