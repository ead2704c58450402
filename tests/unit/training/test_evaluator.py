"""The evaluator's part of a training, in one process, and the checkpoints that are the best."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import training
from mpidist.training.evaluator import EvaluatedCheckpoint, ask_to_stop
from tests.helpers.clocks import SetClock
from tests.helpers.fitting import STEPS, Line, points


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    """Two lines, of a training and of its evaluator."""
    made = [Line(mpidist.MirroredStrategy()) for _ in range(2)]
    yield made
    for one in made:
        one.strategy.close()


def trainer_of(line: Line, folder: Path, **rules: Any) -> mpidist.Trainer:
    manager = mpidist.CheckpointManager(line.checkpoint, folder, max_to_keep=1, **rules)
    return mpidist.Trainer(line.strategy, line.step, checkpoint=manager, evaluate_step=line.evaluate_step)


def test_the_best_epoch_is_kept(tmp_path: Path, lines: list[Line]) -> None:
    count = 0

    def step(x: Any, _: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"rising": np.full(len(x), count)}

    manager = mpidist.CheckpointManager(lines[0].checkpoint, tmp_path, max_to_keep=1, keep_best="rising")
    mpidist.Trainer(lines[0].strategy, step, checkpoint=manager).fit(points(), 3)
    assert [Path(path).name for path in manager.checkpoints] == ["ckpt-1.h5", "ckpt-3.h5"]
    assert manager.best_checkpoint == str(tmp_path / "ckpt-1.h5")
    manager.close()


def test_an_evaluator_reports_what_it_has_evaluated(tmp_path: Path, lines: list[Line]) -> None:
    train = trainer_of(lines[0], tmp_path)
    train.fit(points(), 1)
    evaluating = trainer_of(lines[1], tmp_path, keep_best="val_loss")
    stopping = training.EarlyStopping("val_loss", patience=1)
    found = training.SidecarEvaluator(evaluating, points(seed=None), max_evaluations=1, callbacks=[stopping]).start()
    assert found.epoch == [1]
    assert found["val_loss"] == [pytest.approx(lines[0].loss())]
    assert evaluating.manager is not None
    assert evaluating.manager.best_checkpoint == str(tmp_path / "ckpt-1.h5")
    assert not (tmp_path / training.STOP_FILE).exists()
    assert train.manager is not None
    train.manager.close()


def test_a_training_ends_when_the_evaluator_asks_for_it(tmp_path: Path, lines: list[Line]) -> None:
    """Not by what an evaluator of an earlier training has left."""
    trainer, clock = trainer_of(lines[0], tmp_path), SetClock()
    tmp_path.mkdir(exist_ok=True)
    ask_to_stop(str(tmp_path))

    class Asking(training.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.trainer.position.total == STEPS + 1:
                ask_to_stop(str(tmp_path))
                clock.forward(1)

    history = trainer.fit(points(), 9, callbacks=[Asking(), EvaluatedCheckpoint(clock=clock)])
    assert history.epoch == [0, 1]
    assert trainer.position.total == STEPS + 3
    assert trainer.manager is not None
    trainer.manager.close()


@pytest.mark.parametrize(("arguments", "text"), [
    ({"steps": 0}, "`steps` must be"), ({"max_evaluations": 0}, "`max_evaluations` must be"),
])
def test_wrong_arguments(tmp_path: Path, lines: list[Line], arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        training.SidecarEvaluator(trainer_of(lines[0], tmp_path), points(), **arguments)
    with pytest.raises(ValueError, match="`checkpoint_dir` is needed"):
        training.SidecarEvaluator(
            mpidist.Trainer(
                lines[1].strategy, lines[1].step, checkpoint=lines[1].checkpoint, evaluate_step=lines[1].evaluate_step
            ), points(),
        )
