"""Checkpoints of served variables in one process: of any size, and of what changes while the file is made."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint import transfer
from mpidist.checkpoint.background import served
from mpidist.checkpoint.file.layout import PAGE_BYTES
from mpidist.checkpoint.file.positional import write_at
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.making.partitioners import FixedShardsPartitioner

PAGE = PAGE_BYTES // 4


@pytest.fixture(params=[1, 3])
def strategy(request: pytest.FixtureRequest) -> Iterator[ParameterServerStrategy]:
    """With whole variables, and with variables of three shards."""
    partitioner = FixedShardsPartitioner(request.param) if request.param > 1 else None
    with ParameterServerStrategy(
        variable_partitioner=partitioner, options=ServerOptions(heap_bytes=1 << 22)
    ) as strategy:
        yield strategy


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE])
def test_a_variable_about_as_large_as_a_page_comes_back(
    strategy: ParameterServerStrategy, tmp_path: Path, size: int
) -> None:
    content = np.arange(size, dtype="float32")
    with strategy.scope():
        variable, beside = mpidist.Variable(content), mpidist.Variable(np.ones(3))
    checkpoint = mpidist.Checkpoint(variable=variable, beside=beside)
    path = checkpoint.save(tmp_path / "c")
    variable.assign(np.full(size, -1, "float32"))
    beside.assign(np.zeros(3))
    checkpoint.restore(path).assert_consumed()
    assert variable.numpy().tolist() == content.tolist()
    assert beside.numpy().tolist() == [1.0] * 3


class Box(mpidist.Module):
    """Two variables, and a second name of one of them."""

    def __init__(self) -> None:
        self.first, self.second = (mpidist.Variable(np.full(3, value)) for value in (1.0, 2.0))
        self.third = self.first


def test_a_name_that_changes_while_the_file_is_made_is_saved_as_it_is_then(
    strategy: ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The datasets are the same ones; another name belongs to them."""
    with strategy.scope():
        box = Box()
    create = transfer.create_blank

    def change_meanwhile(*arguments: Any) -> Any:
        blank = create(*arguments)
        box.third = box.second
        return blank

    monkeypatch.setattr(served, "create_blank", change_meanwhile)
    path = mpidist.Checkpoint(box=box).save(tmp_path / "c")
    other = Box()
    other.third = mpidist.Variable(np.zeros(3))
    mpidist.Checkpoint(box=other).restore(path)
    assert [float(one.numpy()[0]) for one in (other.first, other.second, other.third)] == [1.0, 2.0, 2.0]
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".h5"] == ["c-1.h5"]


class Log:
    """The chief's own; its state is the array itself."""

    def __init__(self) -> None:
        self.values = np.zeros(3)

    def state(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state(self, saved: Any) -> None:
        self.values = saved["values"].numpy()


class Disk:
    """A disk that waits until it is opened, and then may have an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.error: OSError | None = None

        def write(*arguments: Any) -> None:
            assert self.is_open.wait(60)
            if self.error is not None:
                raise self.error
            write_at(*arguments)

        monkeypatch.setattr(transfer, "write_at", write)


@pytest.mark.parametrize("end", ["sync", "close", "skips"])
def test_the_program_continues_while_the_servers_save(
    strategy: ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    disk = Disk(monkeypatch)
    with strategy.scope():
        variable, small = mpidist.Variable(np.full(5 * PAGE, 1.0, "f4")), mpidist.Variable(np.ones(2))
    own = Log()
    objects = {"variable": variable, "small": small, "own": own}
    manager = mpidist.CheckpointManager(
        mpidist.Checkpoint(**objects), tmp_path, 3, background=True, skip_while_saving=end == "skips"
    )
    path = str(manager.save(metadata={"epoch": 1}))
    assert not os.path.exists(path)
    variable.assign_add(np.ones(5 * PAGE, "f4"))
    own.values += 1
    assert float(variable.numpy()[0]) == 2.0
    disk.is_open.set()
    if end == "close":
        strategy.close()
        manager.sync()
    elif end == "sync":
        manager.sync()
    else:
        while manager.save() is None:
            pass
        manager.sync()
        assert mpidist.load_variable(tmp_path / "ckpt-2.h5", "variable")[0] == 2.0
    assert manager.checkpoints[0] == path
    assert manager.metadata == ({} if end == "skips" else {"epoch": 1})
    manager.close()
    assert (mpidist.load_variable(path, "variable") == 1.0).all()
    assert mpidist.load_variable(path, "own/values").tolist() == [0.0] * 3
    assert mpidist.checkpoint.verify(path) > 0


def test_two_managers_save_in_the_background_side_by_side(
    strategy: ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers write one snapshot after the other. Functions continue while the second one waits."""
    disk, wait = Disk(monkeypatch), Chief.wait_for_snapshot
    waits: list[bool] = []

    def wait_for_snapshot(chief: Chief) -> None:
        if chief.commits.saving:
            waits.append(chief._held is None)
            disk.is_open.set()
        wait(chief)

    monkeypatch.setattr(Chief, "wait_for_snapshot", wait_for_snapshot)
    with strategy.scope():
        variables = [mpidist.Variable(np.full(5 * PAGE, value, "f4")) for value in (1.0, 2.0)]
    managers = [
        mpidist.CheckpointManager(mpidist.Checkpoint(v=one), tmp_path / str(number), 3, background=True)
        for number, one in enumerate(variables)
    ]
    paths = []
    for manager, one in zip(managers, variables, strict=True):
        paths.append(str(manager.save()))
        one.assign(np.zeros(5 * PAGE, "f4"))
    assert waits == [True]
    for manager in managers:
        manager.close()
    assert [np.unique(mpidist.load_variable(path, "v")).tolist() for path in paths] == [[1.0], [2.0]]


def test_a_save_for_which_there_is_no_thread_is_made_at_once(
    strategy: ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "mpidist-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with strategy.scope():
        variable = mpidist.Variable(np.full(5 * PAGE, 1.0, "f4"))
    with mpidist.CheckpointManager(mpidist.Checkpoint(v=variable), tmp_path, 3, background=True) as manager:
        path = str(manager.save())
        assert (mpidist.load_variable(path, "v") == 1.0).all()
    assert manager.checkpoints == [path]


def test_a_server_that_cannot_write_is_an_error_of_the_next_call(
    strategy: ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    with strategy.scope():
        variable = mpidist.Variable(np.full(5 * PAGE, 1.0, "f4"))
    with mpidist.CheckpointManager(mpidist.Checkpoint(v=variable), tmp_path, 3, background=True) as manager:
        acts: tuple[Callable[[], object], ...] = (manager.save, manager.sync)
        for act in acts:
            manager.save()
            disk.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            disk.is_open.set()
            with pytest.raises(OSError, match="No space left"):
                act()
            assert not manager.checkpoint.save_counter
            disk.error = None
        assert manager.save() == str(tmp_path / "ckpt-1.h5")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.h5"]
