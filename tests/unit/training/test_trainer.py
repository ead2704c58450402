"""The trainer of one process: what `fit` does, what it returns, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import training
from mpidist.data import Dataset
from tests.helpers.fitting import STEPS, Line, Make, Noted, Y, points


def test_an_epoch_has_the_means_of_its_examples_and_the_metrics(make: Make) -> None:
    line, noted = make(), Noted()
    # The first step sees the initial weight, and with a rate of 0 all others do.
    line.optimizer.learning_rate = 0.0
    history = line.trainer.fit(points(), epochs=2, validation_data=points(13), callbacks=[noted])
    assert history.epoch == [0, 1]
    np.testing.assert_allclose(history["loss"], np.mean(Y**2))
    np.testing.assert_allclose(history["error"], np.mean(np.abs(Y)))
    np.testing.assert_allclose(history["val_loss"], np.mean(Y[:13] ** 2))
    np.testing.assert_allclose(history["val_error"], np.mean(np.abs(Y[:13])))
    names = "['error', 'loss']"
    both = "['error', 'loss', 'val_error', 'val_loss']"
    epochs = [
        call for epoch in (0, 1)
        for call in (f"epoch {epoch} begin", "test begin", f"test end {names}", f"epoch {epoch} end {both}")
    ]
    assert noted.calls == ["train begin", *epochs, f"train end {both}"]
    assert len(noted.losses) == 2 * STEPS
    evaluated = line.trainer.evaluate(points(13))
    assert evaluated == {"error": history["val_error"][0], "loss": history["val_loss"][0]}
    assert line.trainer.evaluate(points(), steps=1).keys() == {"error", "loss"}


def test_rows_of_several_numbers_and_of_truth_values_count_by_their_elements() -> None:
    strategy = mpidist.MirroredStrategy()

    def step(x: Any) -> dict[str, Any]:
        return {"all": np.stack([x, 3 * x], 1), "large": x > 4, "half": x.astype("f2")}

    history = mpidist.Trainer(strategy, step).fit(Dataset.range(10).batch(4))
    assert history.history == {"all": [9.0], "half": [4.5], "large": [0.5]}


@pytest.mark.parametrize("steps_per_epoch", [None, 4])
def test_a_resumed_fit_continues_in_the_epoch_to_the_same_bits(
    tmp_path: Path, make: Make, steps_per_epoch: int | None
) -> None:
    whole = make()
    seen = Noted()
    expected = whole.trainer.fit(points(), 3, steps_per_epoch, points(13), [seen])
    parts: list[float] = []
    for stops in (2, 1, 6, None):
        line, noted = make(tmp_path), Noted(stops)
        history = line.trainer.fit(points(), 3, steps_per_epoch, points(13), [noted])
        line.end()
        parts += noted.losses
    assert history == expected
    assert parts == seen.losses
    assert line.weight.numpy().tobytes() == whole.weight.numpy().tobytes()


def test_a_checkpoint_that_the_program_restores_itself(tmp_path: Path, make: Make) -> None:
    """Before the first `fit`, and between two of them."""
    whole, first = make(), make()
    expected = whole.trainer.fit(points(), 2)
    trainer = mpidist.Trainer(first.strategy, first.step, checkpoint=first.checkpoint)
    trainer.fit(points(), 2, callbacks=[Noted(STEPS + 1)])
    path = first.checkpoint.write(str(tmp_path / "middle"))
    for _ in range(2):
        second = make()
        trainer = mpidist.Trainer(second.strategy, second.step, checkpoint=second.checkpoint)
        second.checkpoint.read(path)
        for _ in range(2):
            assert trainer.fit(points(), 2) == expected
            assert second.weight.numpy().tobytes() == whole.weight.numpy().tobytes()
            second.checkpoint.read(path)


def test_several_fits_of_a_program_that_is_started_again(tmp_path: Path, make: Make) -> None:
    """Those that were complete return at once; the others continue."""
    whole = make()
    expected = [whole.trainer.fit(points(), 2), whole.trainer.fit(points(20), 2)]
    first = make(tmp_path)
    assert first.trainer.fit(points(), 2) == expected[0]
    # In the middle of the second epoch: batches of 20 points are three.
    first.trainer.fit(points(20), 2, callbacks=[Noted(4)])
    first.end()
    again, noted = make(tmp_path), Noted()
    assert again.trainer.fit(points(), 2, callbacks=[noted]) == expected[0]
    assert noted.losses == []
    noted = Noted()
    assert again.trainer.fit(points(20), 2, callbacks=[noted]) == expected[1]
    assert len(noted.losses) == 1
    assert again.weight.numpy().tobytes() == whole.weight.numpy().tobytes()


def test_other_arguments_after_a_restart(tmp_path: Path, make: Make) -> None:
    line = make(tmp_path)
    line.trainer.fit(points(), 2, 4, callbacks=[Noted(5)])
    line.end()
    again = make(tmp_path)
    with pytest.raises(ValueError, match=r"step 2 of an epoch with steps_per_epoch=4, got `steps_per_epoch=None`"):
        again.trainer.fit(points(), 2)
    # More epochs: those that are missing. Then fewer: none.
    again = make(tmp_path)
    assert again.trainer.fit(points(), 3, 4).epoch == [0, 1, 2]
    again.end()
    last, noted = make(tmp_path), Noted()
    assert last.trainer.fit(points(), 1, None, callbacks=[noted]).epoch == [0, 1, 2]
    assert noted.losses == []


def test_epochs_by_steps_continue_with_the_data() -> None:
    """The data end in the middle of an epoch, and at its end."""
    seen: list[int] = []
    strategy = mpidist.MirroredStrategy()

    def step(batch: Any) -> dict[str, Any]:
        seen.extend(batch.tolist())
        return {}

    mpidist.Trainer(strategy, step).fit(Dataset.range(6).batch(2), epochs=3, steps_per_epoch=2)
    assert seen == [0, 1, 2, 3, 4, 5] * 2
    seen.clear()
    mpidist.Trainer(strategy, step).fit(Dataset.range(4).batch(2), epochs=2, steps_per_epoch=3)
    assert seen == [0, 1, 2, 3] * 3


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
@pytest.mark.parametrize("dataset", [Dataset.range(0).batch(2), Dataset.range(1).batch(2, drop_remainder=True)])
def test_data_without_a_batch(dataset: Dataset, steps_per_epoch: int | None) -> None:
    trainer = mpidist.Trainer(mpidist.MirroredStrategy(), lambda _: {})
    with pytest.raises(ValueError, match="the dataset gave no batch"):
        trainer.fit(dataset, steps_per_epoch=steps_per_epoch)


@pytest.mark.parametrize(("value", "error", "text"), [
    (None, TypeError, "`step` must return a dict of values by name, got None"),
    (3.0, TypeError, "must return a dict"),
    ({"loss": 3.0}, TypeError, "as 'loss', one number for the batch"),
    ({"loss": np.float32(3)}, TypeError, "as 'loss', one number for the batch"),
    ({"loss": np.zeros(3)}, ValueError, r"shape \(3,\) as 'loss', expected one row for each of the 2 examples"),
    ({"loss": np.array(["a", "b"])}, TypeError, "as 'loss', expected numbers"),
    ({"loss": np.zeros(2, complex)}, TypeError, "as 'loss', expected numbers"),
    ({"loss": [object(), object()]}, TypeError, "as 'loss'"),
    ({"loss": [[1, 2], [3]]}, TypeError, "as 'loss'"),
    ({3: np.zeros(2)}, TypeError, "the name 3"),
    ({"": np.zeros(2)}, TypeError, "the name ''"),
    ({"val_loss": np.zeros(2)}, TypeError, "the name 'val_loss'"),
])
def test_a_step_that_returns_something_else(value: Any, error: type[Exception], text: str) -> None:
    trainer = mpidist.Trainer(mpidist.MirroredStrategy(), lambda _: value, evaluate_step=lambda _: value)
    with pytest.raises(error, match=text):
        trainer.fit(Dataset.range(2).batch(2))
    with pytest.raises(error, match=text.replace("`step`", "`evaluate_step`")):
        trainer.evaluate(Dataset.range(2).batch(2))


def test_one_name_for_an_array_and_a_metric() -> None:
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        matrix = mpidist.metrics.ConfusionMatrix(3)
    kinds: list[Any] = [matrix, np.zeros(2)]
    trainer = mpidist.Trainer(strategy, lambda _: {"loss": kinds.pop(0)})
    with pytest.raises(ValueError, match="returned 'loss' as array, and before as ConfusionMatrix"):
        trainer.fit(Dataset.range(4).batch(2))


WRONG: dict[str, tuple[Callable[[Line], object], type[Exception], str]] = {
    "strategy": (lambda line: mpidist.Trainer("mirrored", line.step), TypeError, "`strategy` must be"),  # type: ignore[arg-type]
    "step": (lambda line: mpidist.Trainer(line.strategy, 3), TypeError, "`step` must be"),  # type: ignore[arg-type]
    "evaluate_step": (
        lambda line: mpidist.Trainer(line.strategy, line.step, evaluate_step=3),  # type: ignore[arg-type]
        TypeError, "`evaluate_step` must be",
    ),
    "checkpoint": (
        lambda line: mpidist.Trainer(line.strategy, line.step, checkpoint="run"),  # type: ignore[arg-type]
        TypeError, "`checkpoint` must be",
    ),
    "second trainer": (
        lambda line: [mpidist.Trainer(line.strategy, line.step, checkpoint=line.checkpoint) for _ in range(2)],
        ValueError, "has an object 'trainer' already",
    ),
    "epochs": (lambda line: line.trainer.fit(points(), 1.5), TypeError, "`epochs` must be"),  # type: ignore[arg-type]
    "steps": (lambda line: line.trainer.fit(points(), 1, 0), ValueError, "`steps_per_epoch` must be"),
    "dataset": (lambda line: line.trainer.fit([1, 2]), TypeError, "`dataset` must be a mpidist.data.Dataset"),
    "validation": (
        lambda line: line.trainer.fit(points(), validation_data=[1]), TypeError, "`validation_data` must be",
    ),
    "no evaluation": (
        lambda line: mpidist.Trainer(line.strategy, line.step).fit(points(), validation_data=points()),
        ValueError, "`validation_data` needs an `evaluate_step`",
    ),
    "callbacks": (lambda line: line.trainer.fit(points(), callbacks=3), TypeError, "`callbacks` must be a list"),  # type: ignore[arg-type]
    "no callback": (
        lambda line: line.trainer.fit(points(), callbacks=[object()]), TypeError, "lacks set_model, set_params",
    ),
    "a class": (
        lambda line: line.trainer.fit(points(), callbacks=[Noted]), TypeError, "the class Noted: make an object of it",
    ),
    "twice": (lambda line: line.trainer.fit(points(), callbacks=[Noted()] * 2), ValueError, "one callback twice"),
    "no manager": (
        lambda line: line.trainer.fit(points(), callbacks=[training.ModelCheckpoint()]),
        ValueError, "ModelCheckpoint needs a CheckpointManager",
    ),
    "no manager to save": (lambda line: line.trainer.save(), ValueError, "saving needs a CheckpointManager"),
    "no manager for preemption": (
        lambda line: line.trainer.fit(points(), callbacks=[training.Preemption()]),
        ValueError, "Preemption needs a CheckpointManager",
    ),
    "no manager for an evaluator": (
        lambda line: training.train_and_evaluate(line.trainer, points(), points()),
        ValueError, "needs a Trainer with checkpoint=",
    ),
    "attribute": (lambda line: setattr(line.trainer, "steps", 3), AttributeError, "steps cannot be set"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str, make: Make) -> None:
    call, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        call(make())


def test_a_trainer_after_its_strategy_is_closed_and_a_fit_within_another(make: Make) -> None:
    line = make()

    class Nested(training.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            line.trainer.fit(points())

    with pytest.raises(RuntimeError, match="inside another `fit`"):
        line.trainer.fit(points(), callbacks=[Nested()])
    # The error has left nothing behind.
    assert line.trainer.fit(points()).epoch == [0]
    with pytest.raises(RuntimeError, match="run"):
        line.strategy.run(lambda: line.trainer.fit(points()))
    line.strategy.close()
    for call in (line.trainer.fit, line.trainer.evaluate):
        with pytest.raises(RuntimeError, match="this strategy is closed"):
            call(points())


def test_two_trainers_take_turns(tmp_path: Path, make: Make) -> None:
    lines = [make(tmp_path / str(number)) for number in range(2)]
    for _ in range(2):
        histories = [line.trainer.fit(points(), 1) for line in lines]
        assert histories[0] == histories[1]
    assert math.isclose(lines[0].loss(), lines[1].loss(), rel_tol=0)


def test_a_process_with_parameter_servers_trains_by_the_same_program(tmp_path: Path, make: Make) -> None:
    with mpidist.ParameterServerStrategy(
        mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), options=mpidist.ServerOptions(heap_bytes=1 << 20)
    ) as strategy:
        line = Line(strategy, tmp_path)
        history = line.trainer.fit(points(), 3, validation_data=points(13), callbacks=[noted := Noted()])
        expected = make().trainer.fit(points(), 3, validation_data=points(13))
        for name, values in expected.history.items():
            np.testing.assert_allclose(history[name], values)
        assert len(noted.losses) == 3 * STEPS
        assert line.trainer.fit(points(), 2, 4).epoch == [0, 1]
        assert line.optimizer.iterations == 3 * STEPS + 8
        assert line.trainer.evaluate(points(seed=None))["loss"] == pytest.approx(line.loss())
        line.end()
