"""The guide's Keras model, with `fit` of a dataset and of arrays, and in its custom training loop."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.parallel.documented_examples.test_loop import FIRST_WEIGHT, PRINTED, PRINTED_BY_ITERATOR

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras and PyTorch are in the extra 'keras'")
torch = pytest.importorskip("torch")

import mpidist.keras as keras  # noqa: E402 - the line of a program

pytestmark = [
    pytest.mark.mpi,
    # `input_shape` is the guide's; Keras 3 wants an `Input`.
    pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`", "ignore::DeprecationWarning"),
]

# What the guide prints; Keras drew the first weight, and this one gives the first loss: the mean over ten steps of
# (1 - w)^2 that shrinks by 0.96^2 each.
PRINTED_BY_FIT = [2.0391, 0.9013, 0.3984, 0.1761]
EVALUATED = 0.5597171783447266
STRATEGIES: dict[str, Callable[[], mpidist.Strategy]] = {
    "mirrored": mpidist.MirroredStrategy,
    "multi-worker": mpidist.MultiWorkerMirroredStrategy,
    "central storage": mpidist.CentralStorageStrategy,
    "one logical device": mpidist.TPUStrategy,
    "one device": lambda: mpidist.OneDeviceStrategy("cpu:0"),
}


@pytest.fixture(params=STRATEGIES)
def mirrored_strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[mpidist.Strategy]:
    """The guide's, and those to which it may be switched by changing its one line."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with STRATEGIES[request.param]() as strategy:
        yield strategy


def set_first_loss(model: Any) -> None:
    """Give the model the weights with which the guide's printed losses begin, up to their last digits."""
    # One step of SGD(0.01) makes the error of w + b smaller by 1 - 4 * 0.01.
    steps = 0.96 ** (2 * np.arange(10))
    error = math.sqrt(PRINTED_BY_FIT[0] / steps.mean())
    model.set_weights([np.array([[1 - error]], np.float32), np.zeros(1, np.float32)])


def test_fit_of_a_dataset_and_of_arrays(mirrored_strategy: mpidist.Strategy) -> None:
    with mirrored_strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])

    model.compile(loss="mse", optimizer="sgd")
    set_first_loss(model)

    dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    first = model.fit(dataset, epochs=2, verbose=0)
    evaluated = model.evaluate(dataset, verbose=0)

    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    second = model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)

    losses = first.history["loss"] + second.history["loss"]
    np.testing.assert_allclose(losses, PRINTED_BY_FIT, rtol=3e-4)
    np.testing.assert_allclose(evaluated, EVALUATED, rtol=3e-4)


def test_a_custom_training_loop(mirrored_strategy: mpidist.Strategy) -> None:
    global_batch_size = 5 * mirrored_strategy.num_replicas_in_sync
    with mirrored_strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        optimizer = keras.optimizers.SGD()
        seen = keras.metrics.Mean()
    model.set_weights([np.array([[FIRST_WEIGHT]], np.float32), np.zeros(1, np.float32)])

    examples = 100 * mirrored_strategy.num_replicas_in_sync
    dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(examples).batch(
        global_batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

    loss_object = keras.losses.BinaryCrossentropy(
        from_logits=True,
        reduction=None)

    def compute_loss(labels: Any, predictions: Any) -> Any:
        per_example_loss = loss_object(labels, predictions)
        return keras.ops.sum(per_example_loss) / global_batch_size

    def train_step(inputs: Any) -> Any:
        features, labels = inputs

        predictions = model(features, training=True)
        loss = compute_loss(labels, predictions)
        model.zero_grad()
        loss.backward()

        gradients = [variable.value.grad for variable in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.update_state(loss.detach() * mirrored_strategy.num_replicas_in_sync)
        return loss.detach()

    def distributed_train_step(dist_inputs: Any) -> Any:
        per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
        return mirrored_strategy.reduce(mpidist.ReduceOp.SUM, per_replica_losses,
                                        axis=None)

    losses = [float(distributed_train_step(dist_inputs)) for dist_inputs in dist_dataset]
    np.testing.assert_allclose(losses, PRINTED, rtol=2e-6)
    # The metric's result is that of all replicas.
    np.testing.assert_allclose(float(seen.result()), np.mean(PRINTED), rtol=2e-6)

    iterator = iter(dist_dataset)
    losses = [float(distributed_train_step(next(iterator))) for _ in range(10)]
    np.testing.assert_allclose(losses, PRINTED_BY_ITERATOR, rtol=2e-6)
