"""Models under parameter servers where one process is chief, worker and server: values, files, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras and PyTorch are in the extra 'keras'")
pytest.importorskip("torch")

import keras

import mpidist
import mpidist.keras
from mpidist.keras.served.optimizer import served_optimizer
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Skipping variable loading")

layers = keras.layers
DatasetCreator = mpidist.keras.utils.experimental.DatasetCreator
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((24, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
IDS = RANDOM.integers(0, 9, (24, 3)).astype("int32")


def dense_data(context: mpidist.InputContext) -> mpidist.data.Dataset:
    return mpidist.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()


def id_data(context: mpidist.InputContext) -> mpidist.data.Dataset:
    return mpidist.data.Dataset.from_tensor_slices((IDS, Y)).batch(8).repeat()


@pytest.fixture
def strategy() -> Iterator[ParameterServerStrategy]:
    partitioner = mpidist.experimental.partitioners.FixedShardsPartitioner(2)
    with ParameterServerStrategy(None, partitioner, options=mpidist.ServerOptions(heap_bytes=1 << 22)) as made:
        yield made


def make_model(*, has_table: bool = False, optimizer: Any = None) -> Any:
    keras.utils.set_random_seed(2)
    inner = [keras.Input((3,), dtype="int32"), layers.Embedding(40, 4), layers.Flatten()] if has_table else [
        keras.Input((4,)), layers.Dense(6, activation="tanh")
    ]
    model = keras.Sequential([*inner, layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize("has_table", [False, True])
def test_values_and_history_are_those_of_plain_keras(strategy: ParameterServerStrategy, has_table: bool) -> None:
    x, data = (IDS, id_data) if has_table else (X, dense_data)
    # Adam of plain Keras also moves rows without a gradient.
    plain, model = (make_model(has_table=has_table, optimizer=keras.optimizers.SGD(0.3, 0.9 * (not has_table)))
                    for _ in range(2))
    expected = plain.fit(x, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
    mpidist.keras.distribute(model, strategy)
    history = model.fit(DatasetCreator(data), epochs=3, steps_per_epoch=3, verbose=0).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    others = plain.get_weights()
    if has_table:
        table = model.layers[0].embeddings
        assert [one.shape for one in table.variables] == [(20, 4), (20, 4)]
        np.testing.assert_allclose(table.numpy(), others.pop(0), atol=1e-6)
    for mine, other in zip(model.get_weights(), others, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    evaluated = model.evaluate(DatasetCreator(data), steps=3)
    np.testing.assert_allclose(evaluated, plain.evaluate(x, Y, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(x, Y, verbose=0), evaluated, rtol=1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)


@pytest.mark.parametrize("make", [
    lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.Adam(0.01, amsgrad=True, clipnorm=0.01),
    lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.9), lambda: keras.optimizers.RMSprop(0.01),
    lambda: keras.optimizers.AdamW(0.01), lambda: keras.optimizers.Nadam(0.01), lambda: keras.optimizers.Lamb(0.01),
    lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), nesterov=True, momentum=0.9),
    lambda: keras.optimizers.Adagrad(0.01), lambda: keras.optimizers.Ftrl(0.01), lambda: keras.optimizers.Lion(0.01),
    lambda: keras.optimizers.Adadelta(0.01), lambda: keras.optimizers.Adamax(0.01),
])
def test_our_optimizer_of_the_same_name_makes_the_same_steps(make: Callable[[], Any]) -> None:
    start = np.linspace(-1, 1, 50, dtype="float32")
    plain, variable = make(), keras.Variable(start.copy())
    plain.build([variable])
    served, ours = served_optimizer(make()), mpidist.Variable(start.copy())
    for step in range(6):
        # So small that it shows where epsilon is added.
        gradient = 1e-4 * np.cos(np.arange(50, dtype="float32") + step)
        plain.apply([keras.ops.convert_to_tensor(gradient)])
        served.apply_gradients([(gradient.copy(), ours)])
    expected = keras.ops.convert_to_numpy(variable)
    moved = float(np.abs(expected - start).max())
    assert moved > 0
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=2e-3 * moved + 3e-7)


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends a training in an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


def test_a_training_that_was_broken_off_goes_on(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    def train(*callbacks: Any) -> Any:
        model = make_model(has_table=True)
        mpidist.keras.distribute(model, strategy)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)
        try:
            model.fit(DatasetCreator(id_data), epochs=4, steps_per_epoch=3, verbose=0, callbacks=[backup, *callbacks])
        except KeyboardInterrupt:
            return None
        return model

    undisturbed = train()
    for file in (tmp_path / "backup").iterdir():
        file.unlink()
    assert train(Interrupt()) is None
    seen: list[int] = []
    logger = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    model = train(logger, keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras")))
    assert seen == [2, 3]
    # Twice the same three batches in each epoch, with the moments of Adam.
    for mine, other in zip(model.get_weights(), undisturbed.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    table = model.layers[0].embeddings.numpy()
    np.testing.assert_allclose(table, undisturbed.layers[0].embeddings.numpy(), atol=1e-6)
    assert int(model.optimizer.iterations) == 12
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is keras.layers.Embedding
    np.testing.assert_array_equal(loaded.layers[0].get_weights()[0], table)
    np.testing.assert_allclose(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0), atol=1e-6)


def test_callbacks_see_executions_and_set_the_rate(strategy: ParameterServerStrategy) -> None:
    model = make_model()
    model.steps_per_execution = 2
    mpidist.keras.distribute(model, strategy)
    ended: list[int] = []

    def end(batch: int, logs: Any) -> None:
        assert logs["loss"] > 0
        ended.append(batch)

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=end),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch else rate),
    ]
    before = model.get_weights()
    model.fit(DatasetCreator(dense_data), epochs=1, steps_per_epoch=5, verbose=0, callbacks=callbacks)
    assert ended == [1, 3, 4]
    between = model.get_weights()
    assert not np.array_equal(before[0], between[0])
    model.fit(
        DatasetCreator(dense_data), epochs=2, initial_epoch=1, steps_per_epoch=5, verbose=0, callbacks=callbacks
    )
    np.testing.assert_array_equal(model.get_weights()[0], between[0])


class OwnStep(keras.Sequential):  # type: ignore[misc]
    """A model with a step of its own."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Counted(keras.layers.Layer):  # type: ignore[misc]
    """A layer with a state that no gradient changes."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any) -> Any:
        self.calls.assign(self.calls + 1)
        return inputs


def fitted(strategy: ParameterServerStrategy, model: Any, data: Any = None, **given: Any) -> None:
    mpidist.keras.distribute(model, strategy)
    model.fit(data if data is not None else DatasetCreator(dense_data), verbose=0, **{"steps_per_epoch": 2, **given})


def with_layer(layer: Any, **compiled: Any) -> Any:
    kind = compiled.pop("kind", keras.Sequential)
    model = kind([keras.Input((4,)), layer, layers.Dense(2)])
    model.compile(**{"optimizer": "sgd", "loss": keras.losses.SparseCategoricalCrossentropy(True), **compiled})
    return model


def dense(**given: Any) -> Any:
    return layers.Dense(4, **given)


REFUSED: dict[str, tuple[Callable[[ParameterServerStrategy], object], str]] = {
    "arrays": (lambda one: fitted(one, make_model(), X, y=Y), r"DatasetCreator\(dataset_fn\).* got ndarray"),
    "no steps": (lambda one: fitted(one, make_model(), steps_per_epoch=None), "`steps_per_epoch` must be a number"),
    "batch size": (lambda one: fitted(one, make_model(), batch_size=8), "expected no `batch_size` beside"),
    "no validation steps": (
        lambda one: fitted(one, make_model(), validation_data=DatasetCreator(dense_data)), "`validation_steps` must"
    ),
    "own step": (lambda one: fitted(one, with_layer(dense(), kind=OwnStep)), "OwnStep has a `train_step` of its own"),
    "statistics": (lambda one: fitted(one, with_layer(layers.BatchNormalization())), "BatchNormalization.* statistics"),
    "state": (lambda one: fitted(one, with_layer(Counted())), "calls' changes in a step without being trained"),
    "constraint": (lambda one: fitted(one, with_layer(dense(kernel_constraint="max_norm"))), "has a constraint"),
    "scale": (
        lambda one: fitted(one, with_layer(
            dense(), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        )),
        "LossScaleOptimizer.* cannot run on parameter servers",
    ),
    "accumulation": (
        lambda one: fitted(one, with_layer(dense(), optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2))),
        "`gradient_accumulation_steps` has no meaning",
    ),
    "whole table": (
        lambda one: mpidist.keras.distribute(keras.Sequential([
            keras.Input((3,)), layers.Embedding(9, 2, embeddings_regularizer="l2")
        ]), one), "`embeddings_regularizer` needs the whole table",
    ),
    "end of the data": (
        lambda one: fitted(one, make_model(), DatasetCreator(
            lambda _: mpidist.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        ), steps_per_epoch=4), r"ended after 3 steps, expected steps_per_epoch=4.*\.repeat\(\)",
    ),
    "prediction": (
        lambda one: mpidist.keras.distribute(make_model(), one).predict(DatasetCreator(dense_data)), "runs on the chief"
    ),
    "a batch": (lambda one: mpidist.keras.distribute(make_model(), one).train_on_batch(X, Y), "does not train"),
    "optimizer": (
        lambda one: mpidist.keras.distribute(make_model(), one).optimizer.apply([X]), "updates variables on servers"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_and_the_way_out(strategy: ParameterServerStrategy, name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        function(strategy)


def test_a_table_that_is_made_in_the_scope_is_in_shards_on_servers(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        embedding = mpidist.keras.layers.Embedding(input_dim=10, output_dim=4)
    assert isinstance(embedding, keras.layers.Embedding)
    assert [one.shape for one in embedding.embeddings.variables] == [(5, 4), (5, 4)]
    assert embedding.variables == []
    rows = keras.ops.convert_to_numpy(embedding(np.array([[9, 0], [4, 9]])))
    np.testing.assert_array_equal(rows, embedding.embeddings.numpy()[[[9, 0], [4, 9]]])
