"""`fit` on several ranks gives the weights and the history of one rank, from any input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras

import mpidist.keras
from tests.helpers.amounts import turns

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

# The last batch has one row: on several ranks all but the first have none.
ROWS, BATCH, VALIDATION = 321, 64, 149
layers = keras.layers


def digits() -> tuple[Any, Any, Any, Any]:
    """Training and validation data that a linear model does not learn at once."""
    random = np.random.default_rng(4)
    x = random.standard_normal((ROWS + VALIDATION, 16)).astype("float32")
    y = np.argmax(np.tanh(x @ random.standard_normal((16, 8))) @ random.standard_normal((8, 5)), axis=1).astype("int32")
    return x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:]


X, Y, X_VALIDATION, Y_VALIDATION = digits()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """The same batches, by number."""

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        return X[index * BATCH:(index + 1) * BATCH], Y[index * BATCH:(index + 1) * BATCH]


class Subclass(keras.Model):  # type: ignore[misc]
    """A model that is built by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(12, activation="tanh"), layers.Dense(5)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))


def make_model(kind: str) -> Any:
    if kind == "subclass":
        return Subclass()
    regularizer = keras.regularizers.L2(1e-3)
    return keras.Sequential([
        *([] if kind == "unbuilt" else [keras.Input((16,))]),
        layers.Dense(12, activation="tanh", kernel_regularizer=regularizer, activity_regularizer=regularizer),
        layers.Dense(5, dtype="float32"),
    ])


def compile_model(model: Any, kind: str) -> None:
    optimizer = {
        "clip": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
        "accumulate": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    }.get(kind, lambda: keras.optimizers.Adam(0.01))()
    model.compile(
        optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
    )


def batches() -> Iterator[Any]:
    while True:
        yield from Batches()


def inputs_of(kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What is passed to `fit`."""
    validation: dict[str, Any] = {"validation_data": (X_VALIDATION, Y_VALIDATION), "validation_batch_size": BATCH}
    if kind == "generator":
        return (batches(),), {"steps_per_epoch": len(Batches()), **validation}
    if kind == "dataset":
        return (mpidist.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH),), validation
    if kind == "py_dataset":
        return (Batches(),), validation
    if kind == "threads":
        return (Batches(workers=2),), validation
    if kind == "processes":
        return (Batches(workers=2, use_multiprocessing=True),), validation
    if kind == "loader":
        data = pytest.importorskip("torch.utils.data")
        torch = pytest.importorskip("torch")
        tensors = data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
        generator = torch.Generator().manual_seed(5)
        return (data.DataLoader(tensors, batch_size=BATCH, shuffle=True, generator=generator),), validation
    if kind == "split":
        both = np.concatenate([X, X_VALIDATION]), np.concatenate([Y, Y_VALIDATION])
        return both, {"batch_size": BATCH, "validation_split": (VALIDATION + 0.5) / (ROWS + VALIDATION)}
    others: dict[str, dict[str, Any]] = {
        "class_weight": {"class_weight": {0: 3.0, 2: 0.2}}, "sample_weight": {"sample_weight": np.linspace(0, 2, ROWS)},
        "batch": {"shuffle": "batch"},
    }
    return (X, Y), {"batch_size": BATCH, **validation, **others.get(kind, {})}


def train(kind: str, strategy: Strategy, **more: Any) -> tuple[Any, Any, Any]:
    """A model after two epochs, its history, and its predictions."""
    keras.utils.set_random_seed(1 + strategy.communicator.rank)
    np.random.seed(5)
    keras.mixed_precision.set_global_policy("mixed_float16" if kind == "half" else "float32")
    try:
        model = make_model(kind)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    compile_model(model, kind)
    mpidist.keras.distribute(model, strategy)
    if kind == "recompile":
        compile_model(model, kind)
    positional, named = inputs_of(kind)
    callbacks = [keras.callbacks.ReduceLROnPlateau(patience=1)]
    history = model.fit(*positional, epochs=2, verbose=0, callbacks=callbacks, **named)
    return model, history.history, model.predict(X_VALIDATION, batch_size=BATCH, verbose=0)


def require_alike(kind: str, one: tuple[Any, Any, Any], other: tuple[Any, Any, Any], tolerance: float) -> None:
    for mine, expected in zip(one[0].get_weights(), other[0].get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=tolerance, err_msg=kind)
    assert one[1].keys() == other[1].keys()
    for name, values in one[1].items():
        np.testing.assert_allclose(values, other[1][name], rtol=tolerance, atol=tolerance, err_msg=f"{kind} {name}")
    # Of another number of rows, which BLAS adds in another order.
    np.testing.assert_allclose(one[2], other[2], rtol=0, atol=10 * tolerance, err_msg=kind)


KINDS = (
    "plain", "clip", "accumulate", "average", "recompile", "subclass", "unbuilt", "half", "split", "class_weight",
    "sample_weight", "batch", "generator", "dataset", "loader", "py_dataset", "threads", "processes",
)


def chosen() -> list[str]:
    """The kinds of this run: all where one is asked for by name, as `tests/system/keras/test_jax.py` does."""
    return list(KINDS) if os.environ["KERAS_BACKEND"] == "jax" else turns(KINDS, 7)


@pytest.mark.parametrize("kind", chosen())
def test_weights_history_and_predictions_are_those_of_one_rank(kind: str, strategy: Strategy, alone: Strategy) -> None:
    expected = train(kind, alone)
    got = train(kind, strategy)
    flat = np.concatenate([np.ravel(one) for one in got[0].get_weights()])
    everyone = np.asarray(strategy.gather(flat[None], axis=0))
    np.testing.assert_array_equal(everyone, np.broadcast_to(everyone[0], everyone.shape))
    require_alike(kind, got, expected, 5e-4 if kind == "half" else 1e-6)


def test_ranks_begin_with_the_first_ones_weights_and_draw_their_own_dropout(strategy: Strategy) -> None:
    keras.utils.set_random_seed(strategy.communicator.rank)
    model = keras.Sequential([keras.Input((16,)), layers.Dropout(0.5, seed=3), layers.Dense(5)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    mpidist.keras.distribute(model, strategy)
    ones = np.ones((64, 16), "float32")
    mask = np.asarray(keras.ops.convert_to_numpy(model.layers[0](ones, training=True)))
    masks = np.asarray(strategy.gather(mask[None], axis=0))
    weights = np.asarray(strategy.gather(model.layers[1].get_weights()[0][None], axis=0))
    for rank in range(1, len(weights)):
        np.testing.assert_array_equal(weights[rank], weights[0])
        assert (masks[rank] != masks[0]).any()
    # What is saved is the same everywhere.
    state = np.asarray(keras.ops.convert_to_numpy(model.layers[0].seed_generator.state))
    states = np.asarray(strategy.gather(state[None], axis=0))
    assert (states == states[0]).all()


def test_statistics_of_batch_normalization_are_averaged_before_they_are_used(strategy: Strategy) -> None:
    model = keras.Sequential([keras.Input((16,)), layers.BatchNormalization(momentum=0.0), layers.Dense(5)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    mpidist.keras.distribute(model, strategy)
    model.fit(X[:64], Y[:64], batch_size=64, shuffle=False, verbose=0)
    parts = np.array_split(X[:64], strategy.num_replicas_in_sync)
    # Without momentum they are those of the last batch.
    means = np.mean([part.mean(axis=0) for part in parts], axis=0)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model.layers[0].moving_mean), means, atol=1e-6)


def test_a_saved_model_loads_as_plain_keras_and_only_the_first_rank_writes(strategy: Strategy, tmp_path: Path) -> None:
    model = make_model("plain")
    compile_model(model, "plain")
    mpidist.keras.distribute(model, strategy)
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    assert path.exists() == (strategy.communicator.rank == 0)
    predicted = model.predict(X, batch_size=BATCH, verbose=0)
    if path.exists():
        loaded = keras.models.load_model(path)
        assert type(loaded) is keras.Sequential
        assert not hasattr(type(loaded.optimizer), "_mpidist_plain")
        np.testing.assert_allclose(loaded.predict(X, verbose=0), predicted, atol=1e-5)
    # A copy trains on its own.
    copy = keras.models.clone_model(model)
    compile_model(copy, "plain")
    copy.train_on_batch(X[:4], Y[:4])


def test_one_batch_is_global(strategy: Strategy, alone: Strategy) -> None:
    answers = []
    for one in (alone, strategy):
        keras.utils.set_random_seed(1)
        model = make_model("plain")
        compile_model(model, "plain")
        mpidist.keras.distribute(model, one)
        # One row more than ranks, then fewer than ranks; the row of a rank without rows is the first, so that with one
        # row alone means would not show it.
        answers.append([
            *model.train_on_batch(X[:5], Y[:5]), *model.train_on_batch(X[:1], Y[:1]),
            *model.train_on_batch(X[:2], Y[:2]),
            *model.test_on_batch(X[:7], Y[:7]), *np.ravel(model.predict_on_batch(X[:3])),
            *np.ravel(model.get_weights()[0]),
        ])
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-5, atol=1e-6)
