"""The callbacks of a training, in one process."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import training
from mpidist.checkpoint import transfer
from mpidist.checkpoint.background import copying, save
from mpidist.experimental import TerminationConfig
from tests.helpers.clocks import SetClock
from tests.helpers.fitting import STEPS, Line, Make, Noted, points


class Valued:
    """A trainer, as far as a callback of values needs it."""

    is_writer = True

    def __init__(self) -> None:
        self.stop_training = False


@pytest.mark.parametrize(("values", "arguments", "stops_at"), [
    ([3, 2, 1, 0], {}, None),
    ([3, 2, 2, 1], {}, 2),
    ([3, 2, 2, 2, 1], {"patience": 2}, 3),
    ([3, 2.5, 2.4, 2.3], {"min_delta": 0.3}, 2),
    ([1, 2, 3, 3], {"mode": "max"}, 3),
    ([math.nan, 3, 2, math.nan], {}, 3),
    ([5, 4, 3], {"baseline": 1.0, "patience": 2}, 1),
    ([1, 2, 3, 2, 3], {"start_from_epoch": 3}, 4),
])
def test_early_stopping(values: list[float], arguments: dict[str, Any], stops_at: int | None) -> None:
    stopping, trainer = training.EarlyStopping("loss", **arguments), Valued()
    stopping.set_model(trainer)  # type: ignore[arg-type]
    stopping.on_train_begin()
    ends = []
    for epoch, value in enumerate(values):
        stopping.on_epoch_end(epoch, {"loss": value})
        if trainer.stop_training:
            ends.append(epoch)
    assert ends[:1] == ([] if stops_at is None else [stops_at])


def test_early_stopping_takes_the_larger_accuracy_and_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    stopping, trainer = training.EarlyStopping("val_accuracy"), Valued()
    stopping.set_model(trainer)  # type: ignore[arg-type]
    stopping.on_train_begin()
    for epoch, value in enumerate([0.1, 0.2]):
        stopping.on_epoch_end(epoch, {"val_accuracy": value})
    assert (trainer.stop_training, stopping.best) == (False, 0.2)
    with caplog.at_level(logging.WARNING, "mpidist"):
        stopping.on_epoch_end(2, {"loss": 1})
    assert "no value 'val_accuracy'" in caplog.text
    assert "It has loss" in caplog.text


def test_a_training_that_was_stopped_early_stays_so(tmp_path: Path, make: Make) -> None:
    """Also its state is that of the checkpoint: patience goes on in a program that is started again."""
    arguments: dict[str, Any] = {"monitor": "loss", "min_delta": 1e9, "patience": 3}
    line, stopping = make(tmp_path), training.EarlyStopping(**arguments)
    line.trainer.fit(points(), 10, callbacks=[stopping, Noted(2 * STEPS)])
    assert (line.trainer.position.epoch, stopping.wait) == (2, 1)
    line.end()
    again, stopping = make(tmp_path), training.EarlyStopping(**arguments)
    history = again.trainer.fit(points(), 10, callbacks=[stopping])
    assert history.epoch == [0, 1, 2, 3]
    assert again.trainer.stop_training
    again.end()
    last, noted = make(tmp_path), Noted()
    assert last.trainer.fit(points(), 10, callbacks=[noted]) == history
    assert noted.losses == []
    # Whoever wants more epochs gets them.
    last.end()
    assert make(tmp_path).trainer.fit(points(), 11).epoch == [*range(11)]


class Weights(training.Callback):
    """Notes the weights after each epoch."""

    def __init__(self, line: Line) -> None:
        self.line, self.after = line, list[Any]()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.after.append(self.line.weight.numpy())


@pytest.mark.parametrize("pauses", [False, True])
def test_the_best_weights_come_back_at_the_end(tmp_path: Path, make: Make, pauses: bool) -> None:
    """The largest loss counts as the best here: that of the first epoch. A pause does not bring them back."""
    line = make(tmp_path)
    arguments: dict[str, Any] = {"monitor": "loss", "mode": "max", "patience": 3, "restore_best_weights": True}
    noted, first = Weights(line), None
    if pauses:
        line.trainer.fit(points(), 10, callbacks=[noted, training.EarlyStopping(**arguments), Noted(2 * STEPS + 1)])
        first = noted.after[0]
        assert not np.array_equal(line.weight.numpy(), first)
        line.end()
        line = make(tmp_path)
        noted = Weights(line)
    history = line.trainer.fit(points(), 10, callbacks=[noted, training.EarlyStopping(**arguments)])
    assert history.epoch == [0, 1, 2, 3]
    np.testing.assert_array_equal(line.weight.numpy(), noted.after[0] if first is None else first)
    line.end()
    # The checkpoint at the end has them.
    last = make(tmp_path)
    last.trainer.fit(points(), 10)
    np.testing.assert_array_equal(last.weight.numpy(), line.weight.numpy())


def test_the_best_weights_need_a_checkpoint(make: Make) -> None:
    line = make()
    line.trainer = mpidist.Trainer(line.strategy, line.step)
    with pytest.raises(ValueError, match="`restore_best_weights=True` needs a checkpoint of the Trainer"):
        line.trainer.fit(points(), 1, callbacks=[training.EarlyStopping("loss", restore_best_weights=True)])


def test_an_end_in_the_middle_of_an_epoch_ends_the_epoch(make: Make) -> None:
    line, noted = make(), Noted(2, pauses=False)
    history = line.trainer.fit(points(), 3, validation_data=points(13), callbacks=[noted])
    # The step after that in which it was wished is made, on one rank as on many.
    assert len(noted.losses) == 3
    assert history.epoch == [0]
    assert set(history.history) == {"loss", "error", "val_loss", "val_error"}


def test_a_csv_file_that_is_continued(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "log.csv"
    line = make(tmp_path / "run")
    line.trainer.fit(points(), 3, callbacks=[training.CSVLogger(path), Noted(STEPS + 2)])
    line.end()
    # As if the program before had ended an epoch more, and died before its save.
    with path.open("a") as file:
        file.write("1,0.5,0.5\n")
    again = make(tmp_path / "run")
    history = again.trainer.fit(points(), 3, callbacks=[training.CSVLogger(path)])
    rows = [row.split(",") for row in path.read_text().split()]
    assert rows[0] == ["epoch", "error", "loss"]
    assert [[float(value) for value in row] for row in rows[1:]] == [
        [epoch, history["error"][epoch], history["loss"][epoch]] for epoch in range(3)
    ]
    assert again.trainer.fit(points(), 1, callbacks=[training.CSVLogger(path, append=True)]).epoch == [0]
    assert len(path.read_text().split()) == 5


def test_a_csv_file_that_cannot_be_written(tmp_path: Path, make: Make) -> None:
    with pytest.raises(OSError, match=r"No such file|Not a directory"):
        make().trainer.fit(points(), callbacks=[training.CSVLogger(tmp_path / "missing" / "log.csv")])


def test_tensorboard(tmp_path: Path, make: Make) -> None:
    pytest.importorskip("tensorboardX")
    callback = training.TensorBoard(tmp_path, update_freq=2)
    make().trainer.fit(points(), 2, validation_data=points(13), callbacks=[callback])
    parts = ("train", "validation")
    written = {part: b"".join(path.read_bytes() for path in (tmp_path / part).iterdir()) for part in parts}
    assert [name in written["train"] for name in (b"epoch_loss", b"batch_loss", b"epoch_val")] == [True, True, False]
    assert b"epoch_loss" in written["validation"]
    with pytest.raises(TypeError, match="`update_freq` must be"):
        training.TensorBoard(tmp_path, update_freq="step")


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Make) -> None:
    line = make(tmp_path)
    line.trainer.fit(points(), 4, callbacks=[training.ProgressBar(2), Noted(STEPS + 1)])
    assert f"training: {STEPS + 2}/{4 * STEPS}" in capsys.readouterr().err
    line.end()
    make(tmp_path).trainer.fit(points(), 4, callbacks=[training.ProgressBar(3)])
    output = capsys.readouterr().err
    assert f"resumed after epoch 1, step {STEPS + 2}" in output
    assert f"training: {4 * STEPS}/{4 * STEPS}" in output
    assert [f"epoch {number}: " in output for number in (2, 3, 4)] == [False, True, True]


def test_a_time_limit_pauses(tmp_path: Path, make: Make) -> None:
    clock = SetClock()

    class Passing(training.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clock.forward(1)

    line = make(tmp_path)
    line.trainer.fit(points(), 3, callbacks=[Passing(), training.TrainingTimeLimit(STEPS + 2, clock=clock)])
    assert (line.trainer.position.epoch, line.trainer.position.step) == (1, 3)
    line.end()
    assert make(tmp_path).trainer.fit(points(), 3) == make().trainer.fit(points(), 3)


def test_a_loss_that_is_no_number(caplog: pytest.LogCaptureFixture, make: Make) -> None:
    strategy = make().strategy
    losses = [1.0, math.nan, 1.0, 1.0, 1.0]
    trainer = mpidist.Trainer(strategy, lambda x: {"loss": np.full(len(x), losses.pop(0))})
    with caplog.at_level(logging.WARNING, "mpidist"):
        trainer.fit(mpidist.data.Dataset.range(10).batch(2), 5, callbacks=[training.TerminateOnNaN()])
    # The step after it is made, on one rank as on many.
    assert losses == [1.0, 1.0]
    assert "the training ends, since 'loss' of step 1" in caplog.text


def test_saves_after_steps_and_their_interval(tmp_path: Path, make: Make) -> None:
    line = make(tmp_path)
    saved: list[int] = []

    class Saved(training.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            assert line.manager is not None
            if len(line.manager.checkpoints) + len(saved) and line.manager.latest_checkpoint not in paths:
                paths.append(str(line.manager.latest_checkpoint))
                saved.append(self.trainer.position.total)

    paths: list[str] = []
    line.trainer.fit(points(), 2, callbacks=[training.ModelCheckpoint(4), Saved()])
    assert saved == [4, 8]
    assert line.manager is not None
    # The end of the training is new.
    assert line.manager.latest_checkpoint == str(tmp_path / "ckpt-4.h5")
    for wrong in ("step", 0, 1.5):
        with pytest.raises((TypeError, ValueError), match="`save_freq` must be"):
            training.ModelCheckpoint(wrong)  # type: ignore[arg-type]


def test_callbacks_of_keras(tmp_path: Path, make: Make) -> None:
    keras = pytest.importorskip("keras", reason="Keras is in the extra 'test'")
    line = make()
    losses: list[float] = []
    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"])),
        keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=2),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
    ]
    history = line.trainer.fit(points(), 9, callbacks=callbacks)
    assert history.epoch == [0, 1, 2]
    assert len(losses) == 3 * STEPS
    assert len((tmp_path / "log.csv").read_text().split()) == 4


@pytest.fixture
def _no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SLURM_JOB")]:
        monkeypatch.delenv(name)
    # Another test of this process may have left a handler.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


class EndedError(Exception):
    """Instead of the end of the program."""


def end() -> None:
    raise EndedError


@pytest.mark.usefixtures("_no_job")
@pytest.mark.parametrize(("where", "step"), [("a step", 3), ("an evaluation", STEPS), ("an epoch that begins", 0)])
def test_a_preempted_fit_continues_to_the_same_bits(tmp_path: Path, where: str, step: int, make: Make) -> None:
    """A signal in the middle of a step, in one of an evaluation, and before the first step of an epoch."""
    expected = (whole := make()).trainer.fit(points(), 3, validation_data=points(20))

    class Signalled(training.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if where == "a step" and self.trainer.position.total == STEPS + 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            if where == "an evaluation" and self.trainer.position.epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            # The next call of the handler hears of it, and the one after that saves: the first step of the next epoch.
            if where == "an epoch that begins" and self.trainer.position.epoch == 0 and batch == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    line = make(tmp_path)
    preemption = training.Preemption(TerminationConfig(exit_fn=end))
    with pytest.raises(EndedError):
        line.trainer.fit(points(), 3, validation_data=points(20), callbacks=[preemption, Signalled()])
    preemption.close()
    assert (line.trainer.position.epoch, line.trainer.position.step) == (1, step)
    line.end()
    again = make(tmp_path)
    assert again.trainer.fit(points(), 3, validation_data=points(20), callbacks=[preemption]) == expected
    preemption.close()
    assert again.weight.numpy().tobytes() == whole.weight.numpy().tobytes()


def test_what_is_saved_in_the_background_is_there_after_fit(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last state, where saves are left out while one is under way."""
    line = make()
    may_write, joined = threading.Event(), save.BackgroundSave.wait_until_written
    real = transfer.write_pieces

    def write(*arguments: Any) -> None:
        assert may_write.wait(60)
        real(*arguments)

    def wait(one: save.BackgroundSave) -> Exception | None:
        may_write.set()
        return joined(one)

    monkeypatch.setattr(copying, "write_pieces", write)
    monkeypatch.setattr(save.BackgroundSave, "wait_until_written", wait)
    with mpidist.CheckpointManager(
        line.checkpoint, tmp_path, 3, background=True, skip_while_saving=True
    ) as manager:
        mpidist.Trainer(line.strategy, line.step, checkpoint=manager).fit(points(), epochs=3)
        # The first one was under way until the end.
        assert [path[-4] for path in manager.checkpoints] == ["1", "2"]
        assert line.checkpoint.saving is None
        weight = line.weight.numpy()
        line.weight.assign(np.zeros((3, 1)))
        line.checkpoint.restore(manager.latest_checkpoint)
        assert line.weight.numpy().tolist() == weight.tolist()
