"""Saves in the background, in one process: what they hold, when they are complete, and what becomes of their errors."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint import transfer
from mpidist.checkpoint.background import copying, marks, memory, save, together
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import make_arena

ROOT = Path(__file__).resolve().parents[3]
ARENA = make_arena(SoloCommunicator())


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


class Gate:
    """Where threads that save wait; the first wait of the program for them opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self.error: OSError | None = None
        real = transfer.write_pieces

        def write(*arguments: Any) -> None:
            assert self._is_open.wait(60), "nothing waits for the save"
            if self.error is not None:
                raise self.error
            real(*arguments)

        monkeypatch.setattr(copying, "write_pieces", write)
        for name in ("wait_until_written", "join"):
            monkeypatch.setattr(save.BackgroundSave, name, self._opening(getattr(save.BackgroundSave, name)))

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            self._is_open.set()
            return real(*arguments)

        return act

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def is_saving(checkpoint: Checkpoint) -> bool:
    return checkpoint.saving is not None


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def saved(path: str, shape: int = 3000) -> float:
    v = variable(np.zeros(shape))
    Checkpoint(v=v).restore(path, only="v")
    assert (v.numpy() == v.numpy()[0]).all()
    return float(v.numpy()[0])


def test_it_holds_the_values_of_the_call_and_is_there_after_sync(gate: Gate, tmp_path: Path) -> None:
    v = variable(np.full(3000, 1.0))
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 2, background=True)
    path = manager.save(metadata={"epoch": 1})
    v.assign(np.full(3000, 2.0))
    assert path == str(tmp_path / "ckpt-1.h5")
    assert names(tmp_path)[0].startswith(".ckpt-1.h5.")
    assert latest_checkpoint(tmp_path) is None
    assert not manager.latest_checkpoint
    manager.sync()
    assert manager.latest_checkpoint == latest_checkpoint(tmp_path) == path
    assert saved(str(path)) == 1.0
    assert manager.metadata == {"epoch": 1}
    assert manager.checkpoint.save_seconds
    manager.close()
    assert names(tmp_path) == ["checkpoint", "ckpt-1.h5"]


@pytest.mark.parametrize("act", ["save", "write", "restore", "restore_or_initialize", "sync", "close", "read"])
def test_each_call_waits_for_the_save(gate: Gate, tmp_path: Path, act: str) -> None:
    v = variable(np.full(3000, 1.0))
    checkpoint = Checkpoint(v=v)
    manager = CheckpointManager(checkpoint, tmp_path, 2)
    path = manager.save(background=True)
    v.assign(np.full(3000, 2.0))
    acts: dict[str, Callable[[], object]] = {
        "save": manager.save, "write": lambda: checkpoint.write(tmp_path / "other"), "sync": checkpoint.sync,
        "close": manager.close, "restore": lambda: checkpoint.restore(path), "read": lambda: checkpoint.read(str(path)),
        "restore_or_initialize": manager.restore_or_initialize,
    }
    acts[act]()
    assert path is not None
    assert os.path.exists(path)
    assert saved(path) == 1.0
    assert v.numpy()[0] == (1.0 if act.startswith("re") else 2.0)
    manager.close()
    assert not [name for name in names(tmp_path) if name.endswith((".tmp", ".lock"))]


def test_other_checkpoints_wait_where_they_use_the_directory(gate: Gate, tmp_path: Path) -> None:
    first, second = (Checkpoint(v=variable(np.full(3000, value))) for value in (1.0, 2.0))
    path = first.save(tmp_path / "a" / "c", background=True)
    # Beside it, in another directory.
    elsewhere = second.save(tmp_path / "b" / "c")
    assert os.path.exists(elsewhere)
    assert not os.path.exists(path)
    # To the same names: this one deletes what killed saves have left, and must not find the other one's.
    assert second.save(tmp_path / "a" / "d")
    assert saved(path) == 1.0
    gate.close()
    again = first.save(tmp_path / "a" / "c", background=True)
    assert Checkpoint(v=variable(np.zeros(3000))).restore(again, only="v")
    first.sync()
    assert names(tmp_path / "a") == ["c-1.h5", "c-2.h5", "checkpoint", "d-2.h5"]
    assert latest_checkpoint(tmp_path / "a") == again


def test_a_save_is_left_out_while_one_is_under_way(gate: Gate, tmp_path: Path) -> None:
    step = variable(0)
    manager = CheckpointManager(
        Checkpoint(v=variable(np.ones(3000))), tmp_path, 3, step_counter=step, checkpoint_interval=2, background=True,
        skip_while_saving=True,
    )
    assert manager.save()
    step.assign_add(1)
    assert manager.save() is None  # too early, and no wait
    step.assign_add(1)
    assert manager.save() is None
    assert names(tmp_path)[-1] == "checkpoint.lock"
    gate.open()
    while manager.checkpoint.saving is not None and manager.checkpoint.saving.is_running:
        manager.checkpoint.saving.join()
    # What was left out did not count.
    assert manager.save() == str(tmp_path / "ckpt-2.h5")
    assert manager.save(check_interval=False) is None  # the same step
    step.assign_add(1)
    gate.close()
    assert manager.save(check_interval=False) == str(tmp_path / "ckpt-3.h5")
    manager.close()
    assert [path[-4] for path in manager.checkpoints] == ["1", "2", "3"]


@pytest.mark.parametrize("act", ["save", "sync", "close", "restore_or_initialize"])
def test_the_next_call_raises_the_error_and_the_save_does_not_count(gate: Gate, tmp_path: Path, act: str) -> None:
    step = variable(0)
    v = variable(np.full(3000, 1.0))
    manager = CheckpointManager(
        Checkpoint(v=v), tmp_path, 1, step_counter=step, checkpoint_interval=5, keep_best="loss"
    )
    good = manager.save(metadata={"good": True}, metrics={"loss": 1.0})
    step.assign_add(5)
    gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert manager.save(background=True, metadata={"good": False}, metrics={"loss": 0.5})
    step.assign_add(5)
    with pytest.raises(OSError, match="No space left") as caught:
        getattr(manager, act)()
    assert caught.value.errno == errno.ENOSPC
    assert manager.checkpoint.save_counter == 1
    assert manager.metadata == {"good": True}
    assert manager.latest_checkpoint == manager.best_checkpoint == good
    assert manager.checkpoints == [good]
    gate.error = None
    # It is due again: the step of the save that has failed does not count.
    step.assign(5)
    assert manager.save(background=True) == str(tmp_path / "ckpt-2.h5")
    manager.close()
    assert names(tmp_path) == ["checkpoint", "ckpt-1.h5", "ckpt-1.h5.metrics", "ckpt-2.h5"]


def test_a_directory_that_is_lost_meanwhile_is_an_error(gate: Gate, tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=variable(np.ones(3000)))
    with CheckpointManager(checkpoint, tmp_path / "run", 2) as manager:
        manager.save(background=True)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(FileNotFoundError):
            manager.sync()
        assert manager.save() == str(tmp_path / "run" / "ckpt-1.h5")


def test_the_same_is_kept_as_in_the_foreground(tmp_path: Path) -> None:
    states = []
    for background in (False, True):
        step = variable(0)
        directory = tmp_path / str(background)
        with CheckpointManager(
            Checkpoint(v=variable(np.ones(10))), directory, 2, keep_best="loss", keep_every_n_steps=4,
            step_counter=step, background=background,
        ) as manager:
            for loss in (0.5, 0.2, float("nan"), 0.4, 0.3, 0.9):
                step.assign_add(1)
                manager.save(metrics={"loss": loss})
            manager.sync()
            best, kept = manager.best_checkpoint, [os.path.basename(path) for path in manager.checkpoints]
        content = json.loads((directory / "checkpoint").read_text())
        states.append((names(directory), best and os.path.basename(best), kept, {
            key: value for key, value in content.items() if "timestamp" not in key
        }))
    assert states[0] == states[1]


def test_where_memory_lacks_it_is_saved_in_the_foreground_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(together, "free_bytes", lambda: 1000)
    checkpoint = Checkpoint(v=variable(np.ones(3000)))
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            path = checkpoint.save(tmp_path / "c", background=True)
            assert os.path.exists(path)
            assert path.endswith(f"c-{number}.h5")
    assert caplog.text.count("in the foreground") == 1
    assert "take 24064 bytes" in caplog.text
    # What is kept need not be taken again.
    monkeypatch.undo()
    checkpoint.save(tmp_path / "c", background=True)
    monkeypatch.setattr(together, "free_bytes", lambda: 0)
    caplog.clear()
    checkpoint.save(tmp_path / "c", background=True)
    assert is_saving(checkpoint)
    checkpoint.sync()
    assert not caplog.records


def test_the_free_memory_is_that_of_the_host_or_of_a_control_group(tmp_path: Path) -> None:
    assert memory.free_bytes(tmp_path) == memory.UNKNOWN
    group = tmp_path / "sys/fs/cgroup/job/step"
    for folder in (tmp_path / "proc/self", group):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   7 kB\n")
    assert memory.free_bytes(tmp_path) == 7168
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    for folder, most, used, cached in ((group, "max", 1, 0), (group.parent, "6000", 3500, 500)):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    assert memory.free_bytes(tmp_path) == 3000


def test_a_checkpoint_that_is_dropped_is_completed(gate: Gate, tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=variable(np.full(3000, 4.0)))
    path = checkpoint.save(tmp_path / "c", background=True)
    del checkpoint
    gc.collect()
    assert saved(path) == 4.0
    assert names(tmp_path) == ["c-1.h5", "checkpoint"]


def test_options_as_in_tf(gate: Gate, tmp_path: Path) -> None:
    wrong: Any = {"enable_async": True}
    checkpoint = Checkpoint(v=variable(np.ones(3)))
    for options in (
        mpidist.CheckpointOptions(enable_async=True),
        mpidist.CheckpointOptions(experimental_enable_async_checkpoint=True, experimental_io_device="/job:localhost"),
    ):
        gate.close()
        path = checkpoint.write(tmp_path / "w", options)
        assert is_saving(checkpoint)
        checkpoint.sync()
        assert saved(path, 3) == 1.0
    manager = CheckpointManager(checkpoint, tmp_path, None)
    manager.save(None, True, mpidist.CheckpointOptions(enable_async=True))
    assert is_saving(checkpoint)
    manager.close()
    checkpoint.save(tmp_path / "c", mpidist.CheckpointOptions())
    assert not is_saving(checkpoint)
    with pytest.raises(NotImplementedError, match=r"`experimental_write_callbacks`.* after `sync`"):
        mpidist.CheckpointOptions(experimental_write_callbacks=[print])
    with pytest.raises(TypeError, match=r"must be a mpidist\.CheckpointOptions"):
        checkpoint.save(tmp_path / "c", wrong)
    with pytest.raises(TypeError, match="background"):
        checkpoint.save(tmp_path / "c", background=wrong)


def test_a_handler_completes_it_before_the_program_ends(gate: Gate, tmp_path: Path) -> None:
    v = variable(np.full(3000, 1.0))
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 2, background=True)
    ended: list[str | None] = []
    config = TerminationConfig(
        termination_watcher_fn=lambda: False, exit_fn=lambda: ended.append(latest_checkpoint(tmp_path))
    )
    with PreemptionCheckpointHandler(None, manager, termination_config=config) as handler:
        handler.run(manager.save)
        v.assign(np.full(3000, 2.0))
        os.kill(os.getpid(), signal.SIGTERM)
        while not ended:
            handler.run(lambda: None)
    assert ended == [str(tmp_path / "ckpt-2.h5")]
    assert saved(str(ended[0])) == 2.0
    manager.close()


@pytest.mark.parametrize("act", ["save", "sync"])
def test_an_interrupt_of_the_wait_leaves_the_save_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: str
) -> None:
    may_write, real, wait = threading.Event(), transfer.write_pieces, save.BackgroundSave.wait_until_written

    def write(*arguments: Any) -> None:
        assert may_write.wait(60)
        real(*arguments)

    def be_interrupted(one: save.BackgroundSave) -> Exception | None:
        if not may_write.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(one)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "write_pieces", write)
    monkeypatch.setattr(save.BackgroundSave, "wait_until_written", be_interrupted)
    manager = CheckpointManager(Checkpoint(v=variable(np.full(3000, 1.0))), tmp_path, 2, background=True)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        first = manager.save()
        with pytest.raises(KeyboardInterrupt):
            getattr(manager, act)()
        after = is_saving(manager.checkpoint), manager.checkpoint.save_counter
    finally:
        signal.signal(signal.SIGTERM, before)
        may_write.set()
    assert after == (True, 1)
    second = manager.save()
    manager.close()
    assert manager.checkpoints == [first, second] == [str(tmp_path / f"ckpt-{n}.h5") for n in (1, 2)]
    assert saved(str(first)) == 1.0


PROGRAM = """
import os, signal, sys, threading
import numpy as np
import mpidist
from mpidist.checkpoint.background import copying
from mpidist.checkpoint.background.save import BackgroundSave

may_write, write, wait, join = (
    threading.Event(), copying.write_pieces, BackgroundSave.wait_until_written, BackgroundSave.join
)

def write_at_last(*arguments):
    # The disk is slow until the program waits for the save.
    may_write.wait()
    if how == "fails":
        raise OSError(28, "No space left on device")
    write(*arguments)

def join_at_last(save):
    may_write.set()
    join(save)

def wait_and_be_told(save):
    os.kill(os.getpid(), signal.SIGTERM)
    return wait(save)

copying.write_pieces, BackgroundSave.join = write_at_last, join_at_last

def run(how, directory):
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(np.ones(3000)))
    if how == "told":
        # A handler of its own ends it while it waits for the save.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
        BackgroundSave.wait_until_written = wait_and_be_told
    manager = mpidist.CheckpointManager(checkpoint, directory, 2, background=True)
    manager.save()
    if how == "forks":
        child = os.fork()
        if child == 0:
            # It has neither the thread nor the lock.
            beside = mpidist.Checkpoint(v=mpidist.Variable(np.ones(3)))
            beside.write(os.path.join(directory, "child"), background=True)
            checkpoint.sync()
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    elif how == "raises":
        raise KeyError("the program's own")
    elif how == "told":
        manager.save()
    elif how == "leaves":
        with manager:
            sys.exit(5)

children = {}
for how in ("ends", "raises", "leaves", "told", "forks", "fails"):
    child = os.fork()
    if child == 0:
        children.clear()
        os.dup2(os.open(os.path.join(sys.argv[1], how + ".txt"), os.O_CREAT | os.O_WRONLY), 2)
        run(how, os.path.join(sys.argv[1], how))
        break
    children[how] = child
for how, child in children.items():
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_end_of_the_program_completes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    texts = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    codes = dict(line.split() for line in result.stdout.splitlines())
    expected = {"ends": "0", "raises": "1", "leaves": "5", "told": "6", "forks": "0", "fails": "0"}
    assert codes == expected, (result.stderr, texts)
    path = tmp_path / "fails"
    assert f"checkpoint '{path}/ckpt-1.h5' was not saved: [Errno 28] No space left" in texts["fails"]
    assert names(path) == []
    for how in ("ends", "raises", "leaves", "told", "forks"):
        path = tmp_path / how
        assert saved(str(path / "ckpt-1.h5")) == 1.0
        assert names(path) == ["checkpoint", *["child.h5"] * (how == "forks"), "ckpt-1.h5"]
        assert ("KeyError" in texts[how]) == (how == "raises")


ON_A_FULL_DISK = """
import errno, os, sys
import numpy as np
import mpidist

directory, files = os.path.join(sys.argv[1], "run"), ["checkpoint", "ckpt-1.h5"]
small, large = mpidist.Variable(np.ones(100_000)), mpidist.Variable(np.ones(1))
checkpoint = mpidist.Checkpoint(v=small, large=large)
manager = mpidist.CheckpointManager(checkpoint, directory, 1, background=True)
path = manager.save()
manager.sync()
checkpoint.large = mpidist.Variable(np.ones(2_000_000))
for _ in range(2):
    # There is no room for it on the disk; the program hears of that at the next call, and goes on.
    assert manager.save().endswith("ckpt-2.h5")
    small.assign_add(np.ones(100_000))
    try:
        manager.sync()
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    else:
        raise AssertionError("no error")
    assert sorted(name for name in os.listdir(directory) if name != "checkpoint.lock") == files
    assert manager.latest_checkpoint == path and mpidist.checkpoint.verify(path)
checkpoint.large = large
assert manager.save() == path.replace("1.h5", "2.h5")
manager.close()
assert sorted(os.listdir(directory)) == ["checkpoint", "ckpt-2.h5"]
assert mpidist.load_variable(directory, "v")[0] == 3.0
print("well")
"""
UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
# Room for two of the small ones, and for no large one.
SMALL_DISK = 'mount -t tmpfs -o size=4M tmpfs "$1" && exec "$0" -c "$2" "$1"'


def test_a_disk_that_is_really_full_costs_the_new_checkpoint_only(tmp_path: Path) -> None:
    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = [*UNSHARE, "sh", "-c", SMALL_DISK, sys.executable, str(tmp_path), program]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)

    result = run(ON_A_FULL_DISK)
    if result.stdout != "well\n" and run("").returncode:
        pytest.skip("needs the right to mount a file system in memory")
    assert (result.stdout, result.returncode) == ("well\n", 0), result.stderr


def test_a_manager_in_a_with_block_completes_it_where_the_block_raises(gate: Gate, tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=variable(np.full(3000, 1.0)))
    manager = CheckpointManager(checkpoint, tmp_path, 2, background=True)

    def leave() -> None:
        with manager:
            assert manager.save() == path
            raise KeyError("the program's own")

    path = str(tmp_path / "ckpt-1.h5")
    with pytest.raises(KeyError, match="the program's own"):
        leave()
    assert names(tmp_path) == ["checkpoint", "ckpt-1.h5"]
    gate.error, path = OSError(errno.EIO, "broken"), str(tmp_path / "ckpt-2.h5")
    gate.close()
    with pytest.raises(KeyError, match="the program's own"):
        leave()
    with pytest.raises(OSError, match="broken"):
        manager.save()
    manager.close()


def test_a_first_rank_that_waits_in_vain_gives_up(tmp_path: Path) -> None:
    """A mark that is not whole, and one that never comes."""
    path = str(tmp_path / ".c.h5.00000000.tmp")
    waits: list[float] = []
    Path(path).touch()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            os.unlink(marks.mark_of(path, 1))
            marks.leave_mark(path, 1, marks.Mark({(0, 0): (5, 7)}))
        elif len(waits) >= 4:
            raise CheckpointError("in vain")

    Path(marks.mark_of(path, 1)).write_bytes(b"0000")
    assert marks.wait_for_marks(path, [1], wait) == {1: marks.Mark({(0, 0): (5, 7)})}
    with pytest.raises(CheckpointError, match="in vain"):
        marks.wait_for_marks(path, [1, 2], wait)
    marks.leave_mark(path, 2, marks.Mark({}, "rank 2: full"))
    assert marks.wait_for_marks(path, [2, 3], wait)[2].error == "rank 2: full"
    # A rank that cannot leave a mark, here since there is one, deletes the file.
    with pytest.raises(FileExistsError):
        marks.leave_mark(path, 1, marks.Mark({}))
    with pytest.raises(FileNotFoundError, match="could neither write nor say why"):
        marks.wait_for_marks(path, [1, 3], wait)
    marks.remove_marks(path, range(1, 4))
    assert names(tmp_path) == []
