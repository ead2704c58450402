"""Which checkpoints a manager keeps: the best, those of some steps, those that wait for their value."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.keeping import KeepingRules
from mpidist.checkpoint.directory.state import CheckpointEntry, DirectoryState
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.variables.making.creation import create_variable
from tests.helpers.amounts import amount
from tests.helpers.strategies import make_arena

ROOT = Path(__file__).resolve().parents[3]
ARENA = make_arena(SoloCommunicator())


def manager(folder: Path, max_to_keep: int | None = 2, **options: Any) -> CheckpointManager:
    checkpoint = Checkpoint(v=create_variable(ARENA, np.zeros(3)))
    one = CheckpointManager(checkpoint, folder, max_to_keep, **options)
    one.restore_or_initialize()
    return one


def there(folder: Path) -> list[int]:
    return sorted(int(name[5:-3]) for name in os.listdir(folder) if name.endswith(".h5"))


def test_the_best_one_is_kept_also_by_a_program_that_resumes(tmp_path: Path) -> None:
    for round_, values in enumerate(([0.5, 0.2, 0.4], [0.9, 0.3], [0.1, 0.1])):
        with manager(tmp_path, keep_best="loss") as one:
            for value in values:
                one.save(metrics={"loss": value, "other": 3})
            best = 2 if round_ < 2 else 6
            assert one.best_checkpoint == str(tmp_path / f"ckpt-{best}.h5")
    assert there(tmp_path) == [6, 7]
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint", "ckpt-6.h5", "ckpt-6.h5.metrics", "ckpt-7.h5", "ckpt-7.h5.metrics",
    ]
    with manager(tmp_path / "max", keep_best="loss", mode="max") as one:
        for value in (1.0, 3.0, 2.0, 2.0, 2.0):
            one.save(metrics={"loss": np.float32(value)})
        assert there(tmp_path / "max") == [2, 4, 5]


def test_a_missing_value_is_never_the_best_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path, 1, keep_best="loss") as one:
        one.save(metrics={"loss": math.nan})
        one.save(metrics={"other": 1.0})
        assert not one.best_checkpoint
        assert caplog.text.count("is not the best one") == 2
        one.save(metrics={"loss": 5.0})
        one.save(metrics={"loss": 7.0})
        assert there(tmp_path) == [3, 4]
        assert one.best_checkpoint == str(tmp_path / "ckpt-3.h5")
    assert caplog.text.count("is not the best one") == 2


def test_another_process_reports_a_value_and_until_then_it_is_waited_for(tmp_path: Path) -> None:
    with manager(tmp_path, 2, keep_best="loss") as one:
        paths = [str(one.save()) for _ in range(3)]
        assert there(tmp_path) == [1, 2, 3]
        code = (
            "import sys, mpidist\n"
            "manager = mpidist.CheckpointManager(mpidist.Checkpoint(), sys.argv[1], None)\n"
            "manager.report(sys.argv[2], {'loss': 0.5})\n"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path), paths[1]], cwd=ROOT, check=True, timeout=60)
        one.report(paths[2], {"loss": 0.7})
        one.report(paths[2], {"accuracy": 1})
        assert json.loads((tmp_path / "ckpt-3.h5.metrics").read_text()) == {"loss": 0.7, "accuracy": 1.0}
        assert one.best_checkpoint == paths[1]
        for _ in range(3):
            one.save()
        # The first has waited in vain for two more saves than it would have been kept.
        assert there(tmp_path) == [2, 4, 5, 6]
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            one.report(paths[2], {"loss": 0.1})
        assert not (tmp_path / "ckpt-3.h5.metrics").exists()


def test_a_replaced_checkpoint_loses_its_value(tmp_path: Path) -> None:
    with manager(tmp_path, 2, keep_best="loss") as one:
        path = one.save(checkpoint_number=1, metrics={"loss": 0.1})
        assert one.best_checkpoint == path
        one.save(checkpoint_number=1)
        assert one.best_checkpoint is None


def test_a_damaged_value_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path, 2, keep_best="loss") as one:
        path = str(one.save(metrics={"loss": 0.1}))
        Path(f"{path}.metrics").write_text("[")
        assert one.best_checkpoint is None
        assert one.save()
    assert "counts as not evaluated" in caplog.text


def test_every_so_many_steps_one_is_kept_for_good(tmp_path: Path) -> None:
    step = create_variable(ARENA, np.int64(0))
    checkpoint = Checkpoint(step=step)
    for _ in range(2):
        with CheckpointManager(checkpoint, tmp_path, 1, step_counter=step, keep_every_n_steps=4) as one:
            one.restore_or_initialize()
            for _ in range(5):
                step.assign_add(1)
                one.save()
            assert len(one.checkpoints) == 1
    # Steps 4 and 8, and the latest.
    assert there(tmp_path) == [4, 8, 10]


@pytest.mark.parametrize(("options", "kind", "text"), [
    ({"keep_best": 3}, TypeError, "`keep_best` must be"), ({"mode": "least"}, ValueError, "`mode` must be 'min' or"),
    ({"keep_every_n_steps": 3}, ValueError, "`keep_every_n_steps=3` needs a `step_counter`"),
    ({"keep_every_n_steps": 0}, ValueError, "keep_every_n_steps"),
])
def test_impossible_rules(options: Any, kind: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=text):
        manager(tmp_path, **options)


@pytest.mark.parametrize(("metrics", "text"), [
    (3, "must be a dictionary of numbers"), ({"loss": "0.1"}, r"metrics\['loss'\]` must be a number"),
    ({1: 2.0}, "strings as keys"), ({"loss": np.zeros(2)}, "must be a number"),
])
def test_metrics_that_are_no_numbers_are_an_error(metrics: Any, text: str, tmp_path: Path) -> None:
    with manager(tmp_path, keep_best="loss") as one:
        path = str(one.save(metrics={"loss": 1}))
        with pytest.raises(TypeError, match=text):
            one.save(metrics=metrics)
        with pytest.raises(TypeError, match=text):
            one.report(path, metrics)
        assert (there(tmp_path), one.best_checkpoint) == ([1], path)
        assert one.save()


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_vanished_directory_is_an_error_and_is_not_made_again(is_empty: bool, tmp_path: Path) -> None:
    folder, away = tmp_path / "run", tmp_path / "away"
    with manager(folder) as one:
        one.save()
        os.rename(folder, away)
        if is_empty:
            folder.mkdir()
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match=r"run' is (gone|empty), and was expected to have 'ckpt-1.h5'"):
                one.save()
        assert folder.exists() == is_empty
        assert not is_empty or os.listdir(folder) == []
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(away, folder)
        assert one.save() == str(folder / "ckpt-2.h5")


@settings(max_examples=amount(80, 5000))
@given(
    values=st.lists(st.one_of(st.none(), st.just(math.nan), st.integers(0, 5).map(float)), min_size=1, max_size=12),
    keep=st.integers(1, 3), mode=st.sampled_from(["min", "max"]),
)
def test_the_rules_keep_the_latest_the_best_and_what_may_be_the_best(
    values: list[float | None], keep: int, mode: str
) -> None:
    rules = KeepingRules(keep, None, "loss", mode, None)
    state = DirectoryState()
    for number, value in enumerate(values):
        name = f"c-{number}"
        state = DirectoryState((*state.entries, CheckpointEntry(name, float(number), value=value)), 0.0, name)
        state, gone = rules.retire(state)
        names = [entry.name for entry in state.entries]
        assert names[-keep:] == [f"c-{n}" for n in range(number + 1)][-keep:]
        assert not set(gone) & set(names)
        seen = [one for one in values[: number + 1] if one is not None and not math.isnan(one)]
        if seen:
            best = min(seen) if mode == "min" else max(seen)
            assert f"c-{values.index(best)}" in names
        # One without a value stays for at most so many more saves.
        assert all(
            number - int(one.name[2:]) < 2 * keep for one in state.entries if one.value is None
        )
        assert all(f"c-{n}" in names for n in range(max(0, number + 1 - 2 * keep), number + 1) if values[n] is None)
        assert len(names) <= 2 * keep + 1
