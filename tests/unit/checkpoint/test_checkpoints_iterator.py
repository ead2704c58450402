"""Following a directory of checkpoints: each new one once, timeouts, and the end of the training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.following import checkpoints_iterator, follow
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, DamagedCheckpointError
from mpidist.first_rank import note_role
from mpidist.variables.making.creation import create_variable
from tests.helpers.clocks import SetClock
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())


def checkpoint() -> Checkpoint:
    return Checkpoint(v=create_variable(ARENA, np.zeros(3)))


def test_each_new_checkpoint_comes_once(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with CheckpointManager(checkpoint(), folder, max_to_keep=2) as manager:
        found = checkpoints_iterator(folder, timeout=0)
        assert list(found) == []
        found = checkpoints_iterator(folder, timeout=10)
        # Those before the latest are left out.
        manager.save()
        manager.save()
        assert next(found) == str(folder / "ckpt-2.h5")
        manager.save()
        assert next(found) == str(folder / "ckpt-3.h5")
    in_bytes: Any = os.fsencode(folder)
    assert list(checkpoints_iterator(in_bytes, timeout=0)) == [str(folder / "ckpt-3.h5")]


def test_a_checkpoint_that_is_saved_again_is_new(tmp_path: Path) -> None:
    first, second = checkpoint(), checkpoint()
    first.save(tmp_path / "c")
    found = checkpoints_iterator(tmp_path, timeout=0.2)
    assert next(found) == str(tmp_path / "c-1.h5")
    second.save(tmp_path / "c")
    assert list(found) == [str(tmp_path / "c-1.h5")]


class Follower:
    """Follows a directory by a clock that only its naps set forward.

    Attributes:
        naps: Between two looks.
        after: Called after so many naps.
    """

    def __init__(
        self, folder: Path, interval: float = 0.0, timeout: float | None = None, restore: Checkpoint | None = None
    ) -> None:
        self.naps: list[float] = []
        self.after: dict[int, Callable[[], object]] = {}
        self.clock = SetClock()
        self.found = follow(str(folder), interval, timeout, None, self.clock, self.nap, restore)

    def nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.clock.forward(seconds)
        self.after.get(len(self.naps), bool)()


def test_it_waits_for_a_checkpoint_without_burning_a_core(tmp_path: Path) -> None:
    saved, follower = checkpoint(), Follower(tmp_path)
    follower.after[100] = lambda: saved.save(tmp_path / "c")
    assert next(follower.found) == str(tmp_path / "c-1.h5")
    # It looks twice a second.
    assert follower.naps == [0.5] * 100


@pytest.mark.parametrize("timeout", [0.03125, 0.25, 1.75])
def test_a_timeout_ends_it(tmp_path: Path, timeout: float) -> None:
    saved, follower = checkpoint(), Follower(tmp_path, timeout=timeout)
    assert list(follower.found) == []
    assert timeout <= sum(follower.naps) < timeout + 0.05
    # It begins again with each checkpoint, also when the program was busy with that for long.
    follower = Follower(tmp_path, timeout=timeout)
    saved.save(tmp_path / "c")
    assert next(follower.found) == str(tmp_path / "c-1.h5")
    follower.clock.forward(10 * timeout)
    assert list(follower.found) == []
    assert timeout <= sum(follower.naps) < timeout + 0.05


def test_a_real_timeout_ends_it(tmp_path: Path) -> None:
    begin = time.monotonic()
    assert list(checkpoints_iterator(tmp_path, timeout=0.3)) == []
    assert time.monotonic() - begin >= 0.3


@pytest.mark.parametrize("timeout", [0, 0.1])
def test_a_function_decides_after_the_timeout(tmp_path: Path, timeout: float) -> None:
    saved = checkpoint()
    calls: list[int] = []

    def is_done() -> bool:
        calls.append(len(calls))
        if len(calls) == 2:
            saved.save(tmp_path / "c")
        return len(calls) == 4

    found = list(checkpoints_iterator(tmp_path, timeout=timeout, timeout_fn=is_done))
    assert found == [str(tmp_path / "c-1.h5")]
    assert calls == [0, 1, 2, 3]


def test_an_interval_passes_between_two(tmp_path: Path) -> None:
    saved, follower = checkpoint(), Follower(tmp_path, interval=20.0, timeout=5.0)
    saved.save(tmp_path / "c")
    begin = follower.clock()
    assert next(follower.found) == str(tmp_path / "c-1.h5")
    saved.save(tmp_path / "c")
    assert next(follower.found) == str(tmp_path / "c-2.h5")
    assert follower.clock() == begin + 20.0
    # The timeout begins behind it.
    assert list(follower.found) == []
    assert follower.clock() == begin + 45.0


def test_it_ends_with_the_training_after_the_last_checkpoint(tmp_path: Path) -> None:
    saved = checkpoint()
    has_ended = False
    note_role(0, lambda: has_ended)
    found = checkpoints_iterator(tmp_path, min_interval_secs=1000)
    saved.save(tmp_path / "c")
    assert next(found) == str(tmp_path / "c-1.h5")
    saved.save(tmp_path / "c")
    has_ended = True
    assert list(found) == [str(tmp_path / "c-2.h5")]
    assert list(checkpoints_iterator(tmp_path / "nothing")) == []


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"checkpoint_dir": 7}, TypeError, "`checkpoint_dir` must be a path .* got 7"),
        ({"min_interval_secs": -1}, ValueError, "`min_interval_secs` must not be negative, got -1"),
        ({"timeout": "1"}, TypeError, "`timeout` must be a number, got .*'1'"),
        ({"timeout_fn": 5}, TypeError, "`timeout_fn` must be a function, or None, got .*5"),
        ({"restore": 5}, TypeError, "`restore` must be a mpidist.Checkpoint, or None, got .*5"),
    ],
)
def test_wrong_arguments_are_said_at_once(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        checkpoints_iterator(**{"checkpoint_dir": ".", **arguments})


class Racing(Checkpoint):
    """A checkpoint whose file somebody deletes or replaces in the moment before it is restored.

    Attributes:
        meanwhile: What happens before the restores, in turn.
    """

    meanwhile: list[Callable[[], object]]

    def restore(self, path: Any, **choice: Any) -> Any:
        act = self.meanwhile.pop(0)
        act()
        return super().restore(path, **choice)


def racing(*meanwhile: Callable[[], object]) -> tuple[Racing, Any]:
    variable: Any = create_variable(ARENA, np.zeros(3))
    restored = Racing(v=variable)
    vars(restored)["meanwhile"] = list(meanwhile)
    return restored, variable


def test_a_checkpoint_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    """The evaluator is late, and the training keeps one checkpoint."""
    variable: Any = create_variable(ARENA, np.zeros(3))
    with CheckpointManager(Checkpoint(v=variable), tmp_path, max_to_keep=1) as manager:
        def save() -> None:
            variable.assign_add(np.ones(3))
            manager.save()

        save()
        restored, own = racing(save, save, lambda: None)
        follower = Follower(tmp_path, timeout=0.0, restore=restored)
        assert next(follower.found) == str(tmp_path / "ckpt-3.h5")
        assert own.numpy()[0] == 3.0
        assert list(follower.found) == []


def test_a_checkpoint_that_is_deleted_by_hand_is_waited_for_again(tmp_path: Path) -> None:
    saved = checkpoint()
    saved.save(tmp_path / "c")
    restored, _ = racing((tmp_path / "c-1.h5").unlink, lambda: None)
    follower = Follower(tmp_path, restore=restored)
    follower.after[10] = lambda: saved.save(tmp_path / "c")
    assert next(follower.found) == str(tmp_path / "c-2.h5")
    assert len(follower.naps) == 10


def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    Checkpoint(v=create_variable(ARENA, np.zeros(4))).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"'v' has shape \(3,\), but \(4,\) was saved"):
        next(checkpoints_iterator(tmp_path, timeout=0, restore=checkpoint()))
    os.truncate(tmp_path / "c-1.h5", 3000)
    with pytest.raises(DamagedCheckpointError):
        next(checkpoints_iterator(tmp_path, timeout=0, restore=checkpoint()))


def test_who_follows_waits_where_a_state_file_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, follower = checkpoint(), Follower(tmp_path)
    saved.save(tmp_path / "c")
    (tmp_path / "checkpoint").write_text("{")
    follower.after[20] = lambda: saved.save(tmp_path / "c")
    assert next(follower.found) == str(tmp_path / "c-2.h5")
    assert len(follower.naps) == 20
    # Said once, and once more by the save.
    assert caplog.text.count("Waiting for the next checkpoint") == 1


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(NotADirectoryError, match="a file cannot receive new checkpoints"):
        next(checkpoints_iterator(tmp_path / "c"))
