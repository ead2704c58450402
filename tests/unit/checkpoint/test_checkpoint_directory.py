"""Directories that are not as the manager left them: lost state files, other programs, damaged files, odd arguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory import lock as lock_module
from mpidist.checkpoint.directory.lock import DirectoryLock
from mpidist.checkpoint.directory.state import (
    LOCK_FILE,
    STATE_FILE,
    CheckpointEntry,
    DirectoryState,
    read_state,
    retire,
    write_state,
)
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, DamagedCheckpointError
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import make_arena

ROOT = Path(__file__).resolve().parents[3]
ARENA = make_arena(SoloCommunicator())


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


def files(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(".h5"))


def fill(directory: Path, count: int) -> BaseVariable:
    """Checkpoints 1 to `count` of a variable that holds their number."""
    v = variable(0.0)
    with CheckpointManager(Checkpoint(v=v), directory, None) as manager:
        for number in range(1, count + 1):
            v.assign(number)
            manager.save()
    return v


def break_file(path: Path) -> None:
    with h5py.File(path) as file:
        at = file["v"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# What a state file may have become: lost, empty, cut off, or JSON that makes no sense.
SOUND = {
    "model_checkpoint_path": "ckpt-3.h5", "all_model_checkpoint_paths": ["ckpt-3.h5"],
    "all_model_checkpoint_timestamps": [1.0], "last_preserved_timestamp": 1.0,
}
NONSENSE: dict[str, dict[str, Any]] = {
    "latest null": {"model_checkpoint_path": None, "all_model_checkpoint_paths": 3},
    "latest number": {"model_checkpoint_path": 3},
    "names text": {"all_model_checkpoint_paths": "1", "all_model_checkpoint_timestamps": "1"},
    "names numbers": {"all_model_checkpoint_paths": [3]},
    "fewer times": {"all_model_checkpoint_timestamps": []},
    "infinite": {"last_preserved_timestamp": float("inf")},
    "not a time": {"all_model_checkpoint_timestamps": [float("nan")]},
    "outside": {"model_checkpoint_path": "../ckpt-3.h5"},
}
DAMAGES: dict[str, Any] = {
    "lost": None, "empty": "", "blank": " \n", "cut": '{"model_checkp', "list": "[]", "null": "null", "number": "7",
    "no names": "{}", "not UTF-8": b"\xff\xfe", "deep": "[" * 100_000, "long": "9" * 5000,
    **{name: json.dumps({**SOUND, **changes}) for name, changes in NONSENSE.items()},
}


def damage_state(directory: Path, damage: str) -> None:
    (directory / "checkpoint").unlink()
    content = DAMAGES[damage]
    if content is not None:
        (directory / "checkpoint").write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_file_is_an_error_that_names_the_fallback(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that is queued again, and begins anew, loses what it has learnt: its saves replace the old ones."""
    fill(tmp_path, 3)
    damage_state(tmp_path, damage)
    v, calls = variable(0.0), list[int]()
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 1, init_fn=lambda: calls.append(1))
    acts: list[Callable[[], object]] = [
        manager.restore_or_initialize, lambda: manager.latest_checkpoint, lambda: latest_checkpoint(tmp_path),
    ]
    for act in acts:
        with pytest.raises(DamagedCheckpointError, match=r"(lost|empty|damaged|understood).*fallback=True"):
            act()
    assert not calls
    assert latest_checkpoint(tmp_path, fallback=True) == str(tmp_path / "ckpt-3.h5")
    assert manager.restore_or_initialize(fallback=True) == str(tmp_path / "ckpt-3.h5") == manager.latest_checkpoint
    assert v.numpy() == 3.0
    # Then it goes on as ever.
    with manager:
        assert manager.save() == str(tmp_path / "ckpt-4.h5")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-4.h5")
    assert files(tmp_path) == [f"ckpt-{number}.h5" for number in range(1, 5)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_without_checkpoints_has_nothing_to_lose(tmp_path: Path, damage: str) -> None:
    Checkpoint(v=variable(0.0)).write(tmp_path / "best")
    with h5py.File(tmp_path / "data-00001.h5", "w") as file:
        file["x"] = 1.0
    (tmp_path / "checkpoint").touch()
    damage_state(tmp_path, damage)
    calls: list[int] = []
    manager = CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1, init_fn=lambda: calls.append(1))
    assert manager.latest_checkpoint is None
    assert manager.restore_or_initialize(fallback=True) is None
    if damage == "lost":
        assert manager.restore_or_initialize() is None
        assert latest_checkpoint(tmp_path) is None
    assert calls == [1] * (1 + (damage == "lost"))
    with manager:
        assert manager.save() == latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1.h5")


def test_the_latest_of_other_programs_is_asked_for_again(tmp_path: Path) -> None:
    """A manager that was made before another one has saved."""
    early = CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1)
    fill(tmp_path, 2)
    assert early.restore_or_initialize() == str(tmp_path / "ckpt-2.h5")


def test_the_first_save_has_a_state_file_before_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks in that moment must not take it for a loss."""
    replace, seen = os.replace, list[object]()

    def look(source: str, target: str) -> None:
        replace(source, target)
        if str(target).endswith(".h5"):
            seen.append(latest_checkpoint(tmp_path))

    monkeypatch.setattr(os, "replace", look)
    assert Checkpoint(v=variable(0.0)).save(tmp_path / "c") == str(tmp_path / "c-1.h5")
    assert seen == [None]
    with CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path / "d", 1) as manager:
        manager.save()
    assert seen == [None, str(tmp_path / "c-1.h5")]


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_without_a_state_file_the_numbers_go_on(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, 3)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    damage_state(tmp_path, damage)
    v = variable(9.0)
    with CheckpointManager(Checkpoint(v=v), tmp_path, 1) as manager:
        assert manager.save() == str(tmp_path / "ckpt-4.h5")
        assert manager.save() == str(tmp_path / "ckpt-5.h5")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert files(tmp_path) == [*before, "ckpt-5.h5"]
    again = Checkpoint(v=v)
    with CheckpointManager(again, tmp_path, 1) as manager:
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-5.h5")
        assert again.save_counter == 5
        assert manager.save() == str(tmp_path / "ckpt-6.h5")


def test_without_a_state_file_fallback_restores_the_last(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    (tmp_path / "checkpoint").unlink()
    v = variable(0.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 1)
    assert manager.restore_or_initialize(fallback=True) == str(tmp_path / "ckpt-3.h5")
    assert v.numpy() == 3.0
    assert latest_checkpoint(tmp_path, fallback=True) == str(tmp_path / "ckpt-3.h5")


@pytest.mark.parametrize("prefix", ["other", "ckpt"])
def test_a_manager_deletes_only_what_managers_have_saved(tmp_path: Path, prefix: str) -> None:
    path = Checkpoint(v=variable(7.0)).save(tmp_path / prefix)
    assert latest_checkpoint(tmp_path) == path
    with CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1) as manager:
        assert manager.latest_checkpoint == path
        saved = [manager.save() for _ in range(3)]
        assert manager.checkpoints == [saved[-1]]
        between = Checkpoint(v=variable(8.0)).save(tmp_path / "between")
        assert latest_checkpoint(tmp_path) == between
        last = manager.save()
    assert latest_checkpoint(tmp_path) == last
    assert set(files(tmp_path)) == {os.path.basename(str(name)) for name in (path, between, last)}
    fresh = variable(0.0)
    Checkpoint(v=fresh).restore(path).assert_consumed()
    assert fresh.numpy() == 7.0


def test_managers_of_several_names_share_a_directory(tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=variable(0.0))
    with (
        CheckpointManager(checkpoint, tmp_path, 2) as usual,
        CheckpointManager(checkpoint, tmp_path, 1, checkpoint_name="ckpt-best") as best,
    ):
        for _ in range(3):
            usual.save()
            best.save()
        assert files(tmp_path) == ["ckpt-3.h5", "ckpt-5.h5", "ckpt-best-6.h5"]
    names = [entry.name for entry in (read_state(str(tmp_path)) or DirectoryState((), 0, None)).entries]
    assert sorted(names) == ["ckpt-3.h5", "ckpt-5.h5", "ckpt-best-6.h5"]
    with CheckpointManager(checkpoint, tmp_path, 1) as later:
        later.save()
        assert files(tmp_path) == ["ckpt-7.h5", "ckpt-best-6.h5"]


def test_the_number_may_be_a_variable(tmp_path: Path) -> None:
    step = variable(np.int64(40))
    with CheckpointManager(Checkpoint(step=step), tmp_path, None) as manager:
        assert manager.save(checkpoint_number=step) == str(tmp_path / "ckpt-40.h5")
        assert manager.save(checkpoint_number=np.int32(41)) == str(tmp_path / "ckpt-41.h5")
        for number, kind in ((-1, ValueError), (2.5, TypeError), ("x", TypeError), (variable(2.5), TypeError)):
            odd: Any = number
            with pytest.raises(kind, match=r"`checkpoint_number` must be an integer"):
                manager.save(checkpoint_number=odd)
        assert files(tmp_path) == ["ckpt-40.h5", "ckpt-41.h5"]


def test_a_clock_that_is_set_back_keeps_what_the_hours_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    with CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 1, keep_checkpoint_every_n_hours=1) as manager:
        for number in range(1, 12):
            clock[0] += 1800
            if number == 5:
                clock[0] -= 500_000
            manager.save()
    # By the hours: 2, 4, 6, 8, 10. After the clock was set back nobody knows how long ago 4 was.
    kept = {int(name.split("-")[1].split(".")[0]) for name in files(tmp_path)}
    assert kept == {2, 4, 5, 7, 9, 11}
    state = DirectoryState((CheckpointEntry("a", 50.0), CheckpointEntry("b", 51.0)), 100.0, "b")
    assert retire(state, 1, 10.0)[1] == []
    assert retire(state, 1, None)[1] == ["a"]


def test_the_last_step_may_be_given(tmp_path: Path) -> None:
    step = variable(10)
    checkpoint = Checkpoint(s=step)
    with CheckpointManager(
        checkpoint, tmp_path, 1, step_counter=step, checkpoint_interval=5, last_checkpoint_step=8
    ) as manager:
        assert manager.save() is None
        step.assign(13)
        assert manager.save() is not None
    with pytest.raises(ValueError, match="`last_checkpoint_step=3` needs a `step_counter`"):
        CheckpointManager(checkpoint, tmp_path, 1, last_checkpoint_step=3)


@pytest.mark.parametrize("name", ["../victim.h5", "/tmp/victim.h5", "sub/victim.h5", "..", "a\0b"])
@pytest.mark.parametrize("place", ["all_model_checkpoint_paths", "model_checkpoint_path"])
def test_a_state_file_names_no_files_outside(tmp_path: Path, name: str, place: str) -> None:
    victim, directory = tmp_path / "victim.h5", tmp_path / "d"
    fill(directory, 2)
    victim.write_text("precious")
    content = json.loads((directory / "checkpoint").read_text())
    content[place] = [name, content[place][1]] if isinstance(content[place], list) else name
    (directory / "checkpoint").write_text(json.dumps(content))
    manager = CheckpointManager(Checkpoint(v=variable(0.0)), directory, 1)
    acts: list[Callable[[], object]] = [lambda: latest_checkpoint(directory), manager.restore_or_initialize]
    for act in acts:
        with pytest.raises(CheckpointError, match="expected names of files in the same directory, got"):
            act()
    assert latest_checkpoint(directory, fallback=True) == str(directory / "ckpt-2.h5")
    with manager:
        assert manager.restore_or_initialize(fallback=True) == str(directory / "ckpt-2.h5")
        for _ in range(3):
            manager.save()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"all_model_checkpoint_paths": [], "x": 1e999}', "9" * 5000, "[]"])
def test_a_forged_state_file_is_an_error(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint").write_text(text)
    with pytest.raises(DamagedCheckpointError, match="is not a valid"):
        latest_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path, fallback=True) is None
    assert "is not a valid" in caplog.text


def test_a_state_file_may_name_a_file_that_no_system_has(tmp_path: Path) -> None:
    v = fill(tmp_path, 2)
    content = json.loads((tmp_path / "checkpoint").read_text())
    content["all_model_checkpoint_paths"][0] = f"ckpt-{'9' * 5000}.h5"
    (tmp_path / "checkpoint").write_text(json.dumps(content))
    with CheckpointManager(Checkpoint(v=v), tmp_path, 1) as manager:
        assert manager.checkpoints == [str(tmp_path / "ckpt-2.h5")]
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-2.h5")
        assert manager.save() == str(tmp_path / "ckpt-3.h5")


def test_a_pipe_as_state_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="got no regular file"):
        latest_checkpoint(tmp_path)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    v = fill(tmp_path, 4)
    newest = tmp_path / "ckpt-4.h5"
    break_file(newest)
    os.truncate(tmp_path / "ckpt-3.h5", 3000)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 1)
    with pytest.raises(DamagedCheckpointError, match=r"ckpt-4\.h5' is damaged: .*fallback=True"):
        manager.restore_or_initialize()
    assert v.numpy() == 4.0
    with caplog.at_level(logging.WARNING, "mpidist"):
        assert manager.restore_or_initialize(fallback=True) == str(tmp_path / "ckpt-2.h5")
    assert v.numpy() == 2.0
    assert "ckpt-4.h5' is damaged" in caplog.text
    assert "ckpt-3.h5'" in caplog.text
    caplog.clear()
    assert latest_checkpoint(tmp_path) == str(newest)
    assert latest_checkpoint(tmp_path, fallback=True) == str(tmp_path / "ckpt-2.h5")
    assert "ckpt-4.h5' is damaged" in caplog.text
    newest.unlink()
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path, fallback=True) == str(tmp_path / "ckpt-2.h5")
    for name in files(tmp_path):
        os.truncate(tmp_path / name, 100)
    with pytest.raises(DamagedCheckpointError, match="truncated"):
        latest_checkpoint(tmp_path, fallback=True)
    with pytest.raises(DamagedCheckpointError, match="truncated"):
        manager.restore_or_initialize(fallback=True)
    assert latest_checkpoint(tmp_path / "none", fallback=True) is None


def test_fallback_does_not_pass_over_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    with CheckpointManager(Checkpoint(v=variable(np.zeros(3))), tmp_path, 5) as manager:
        manager.save(checkpoint_number=2)
    with pytest.raises(CheckpointError, match=r"'v' has shape \(\), but \(3,\) was saved"):
        CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 5).restore_or_initialize(fallback=True)


def test_arguments_of_another_kind_say_what_was_expected(tmp_path: Path) -> None:
    v: Any = variable(1.0)
    nothing: Any = None
    with pytest.raises(TypeError, match=r"`checkpoint` must be a mpidist\.Checkpoint, got .*Manager\(mpidist"):
        CheckpointManager(v, tmp_path, 1)
    with pytest.raises(TypeError, match=r"`directory` must be a path .*, got None"):
        CheckpointManager(Checkpoint(v=v), nothing, 1)
    with pytest.raises(TypeError, match=r"`file_prefix` must be a path .*, got None"):
        Checkpoint(v=v).save(nothing)
    with pytest.raises(TypeError, match=r"`path` must be a path .*, got None"):
        Checkpoint(v=v).write(nothing)
    with pytest.raises(TypeError, match=r"`directory` must be a path .*, got None"):
        latest_checkpoint(nothing)
    with pytest.raises(IsADirectoryError, match=rf"got the directory '{tmp_path}'; .*latest_checkpoint"):
        Checkpoint(v=v).restore(tmp_path)


def test_a_link_to_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    v = fill(tmp_path, 2)
    (tmp_path / "ckpt-9.h5").symlink_to("gone")
    assert latest_checkpoint(tmp_path, fallback=True) == str(tmp_path / "ckpt-2.h5")
    with CheckpointManager(Checkpoint(v=v), tmp_path, 2) as manager:
        assert manager.restore_or_initialize(fallback=True) == str(tmp_path / "ckpt-2.h5")
        assert manager.save() == str(tmp_path / "ckpt-3.h5")


def test_checkpoints_may_be_deleted_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the training, while an evaluator looks for the latest one."""
    v = fill(tmp_path, 3)

    def delete_and(function: Any, number: int) -> Any:
        def act(*arguments: Any) -> Any:
            (tmp_path / f"ckpt-{number}.h5").unlink(missing_ok=True)
            return function(*arguments)
        return act

    with monkeypatch.context() as patch:
        patch.setattr(os.path, "getmtime", delete_and(os.path.getmtime, 1))
        assert latest_checkpoint(tmp_path, fallback=True) == str(tmp_path / "ckpt-3.h5")
    assert files(tmp_path) == ["ckpt-2.h5", "ckpt-3.h5"]
    with monkeypatch.context() as patch:
        patch.setattr("mpidist.checkpoint.directory.latest.read_contents", delete_and(hdf5.read_contents, 3))
        assert latest_checkpoint(tmp_path, fallback=True) == str(tmp_path / "ckpt-2.h5")
    fill(tmp_path, 3)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(hdf5, "read_contents", delete_and(hdf5.read_contents, 3))
        with pytest.raises(FileNotFoundError, match=r"no checkpoint .*ckpt-3\.h5'; the directory has ckpt-1"):
            manager.restore_or_initialize()
    fill(tmp_path, 3)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(hdf5, "read_contents", delete_and(hdf5.read_contents, 3))
        assert manager.restore_or_initialize(fallback=True) == str(tmp_path / "ckpt-2.h5")


def test_a_file_that_h5py_holds_open_is_restored(tmp_path: Path) -> None:
    v = variable(5.0)
    path = Checkpoint(v=v).save(tmp_path / "c")
    for mode in ("r", "r+"):
        with h5py.File(path, mode):
            v.assign(0.0)
            Checkpoint(v=v).restore(path).assert_consumed()
            assert v.numpy() == 5.0


def test_save_takes_the_lock_of_the_directory(tmp_path: Path) -> None:
    code = (
        "import sys, time; from mpidist.checkpoint.directory.lock import DirectoryLock;"
        "DirectoryLock(sys.argv[1]).acquire();"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        checkpoint = Checkpoint(v=variable(1.0))
        with pytest.raises(CheckpointError, match=rf"another job saves .*process {child.pid} on"):
            checkpoint.save(tmp_path / "c")
        assert os.listdir(tmp_path) == [LOCK_FILE]
        child.communicate("")
    checkpoint.save(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c-1.h5", "checkpoint"]


def test_save_beside_a_manager_leaves_it_the_lock(tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=variable(1.0))
    with CheckpointManager(checkpoint, tmp_path, 1) as manager:
        manager.save()
        checkpoint.save(tmp_path / "other")
        assert (tmp_path / LOCK_FILE).exists()
    assert not (tmp_path / LOCK_FILE).exists()


def test_of_two_that_find_a_holder_dead_one_gets_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes over in the moment between the look at the dead holder and its replacement."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    me = lock_module.this_process()
    dead = dataclasses.replace(me, process=ended.pid)
    start = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    quicker = dataclasses.replace(me, process=os.getppid(), started=start)
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps(dataclasses.asdict(dead)))
    is_dead = lock_module.is_dead

    def look(holder: lock_module.LockOwner, mine: lock_module.LockOwner) -> bool | None:
        answer = is_dead(holder, mine)
        if holder == dead:
            path.write_text(json.dumps(dataclasses.asdict(quicker)))
        return answer

    monkeypatch.setattr(lock_module, "is_dead", look)
    with pytest.raises(CheckpointError, match=rf"process {os.getppid()} on .*; it is alive"):
        DirectoryLock(str(tmp_path)).acquire()
    assert json.loads(path.read_text()) == dataclasses.asdict(quicker)
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_a_holder_may_delete_the_temporary_files_of_those_that_want_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    quicker = dataclasses.replace(lock_module.this_process(), process=os.getppid(), started=start)

    def link(temporary: str, path: str) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(quicker)))
        os.unlink(temporary)
        raise FileNotFoundError(temporary)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(CheckpointError, match=rf"process {os.getppid()} on .*; it is alive"):
        DirectoryLock(str(tmp_path)).acquire()


def test_managers_of_one_name_know_of_each_other(tmp_path: Path) -> None:
    """Of one program, or of a job that has ended since the other was started."""
    first, second = (CheckpointManager(Checkpoint(v=variable(0.0)), tmp_path, 2) for _ in range(2))
    for manager in (first, second, first, second):
        manager.save()
    assert [os.path.basename(path) for path in second.checkpoints] == files(tmp_path) == ["ckpt-3.h5", "ckpt-4.h5"]
    state = read_state(str(tmp_path))
    assert state is not None
    assert [entry.name for entry in state.entries] == files(tmp_path)
    first.close()
    second.close()


@pytest.mark.parametrize("text", ['{"job": 3}', "[" * 100_000, "null"])
def test_a_forged_lock_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="is not a valid lock"):
        DirectoryLock(str(tmp_path)).acquire()
    odd = {**dataclasses.asdict(lock_module.this_process()), "process": "x"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(odd))
    with pytest.raises(CheckpointError, match="is not a valid lock"):
        DirectoryLock(str(tmp_path)).acquire()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"checkpoint_interval": "2"}, TypeError, "`checkpoint_interval` must be an integer of at least 0"),
        ({"checkpoint_interval": 1.5}, TypeError, "`checkpoint_interval` must be an integer of at least 0"),
        ({"checkpoint_interval": True}, TypeError, "`checkpoint_interval` must be an integer of at least 0"),
        ({"checkpoint_interval": -3}, ValueError, "`checkpoint_interval` must be an integer of at least 0"),
        ({"step_counter": 3}, TypeError, "`step_counter` must be a variable that counts steps, got 3"),
        ({"checkpoint_name": 3}, TypeError, "`checkpoint_name` must be a string, got 3"),
    ],
)
def test_arguments_of_wrong_kinds(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    step = variable(10)
    with pytest.raises(error, match=text):
        CheckpointManager(Checkpoint(s=step), tmp_path, 1, **{"step_counter": step, **arguments})


def test_the_page_of_the_format_has_the_keys_of_the_state_file(tmp_path: Path) -> None:
    state = DirectoryState((CheckpointEntry("a-1.h5", 1.0, is_for_good=True), CheckpointEntry("a-2.h5", 2.0, waited=3)))
    write_state(str(tmp_path), state)
    page = (ROOT / "docs" / "checkpoint-format.md").read_text()
    rows = re.findall(r"^\| (`\w+_\w+`.*?) \|", page.partition("## The files beside it")[2], re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [*json.loads((tmp_path / STATE_FILE).read_text())]
