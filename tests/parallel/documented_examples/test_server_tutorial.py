"""The custom loop of TensorFlow's tutorial "Parameter server training with ParameterServerStrategy", and evaluation.

Its Keras model is made by hand: a table of 16,384 embeddings of four numbers, their mean, and a dense layer. Words are
numbers. `optimizer` is built by its first step.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

FEATURE_VOCAB = 5
LABEL_YES = [0, 1]


class Model:
    """Embeddings, their mean, and the probability of "yes"."""

    def __init__(self) -> None:
        self.emb_layer: Any = mpidist.Variable(
            mpidist.initializers.RandomUniform(), shape=(16384, 4), dtype="float32", name="embeddings"
        )
        self.kernel: Any = mpidist.Variable(np.full((4, 1), 0.1, "float32"))
        self.bias: Any = mpidist.Variable(np.zeros(1, "float32"))

    @property
    def trainable_variables(self) -> list[Any]:
        return [self.emb_layer, self.kernel, self.bias]

    def __call__(self, batch_data: AnyArray, training: bool = False) -> AnyArray:
        self.mean = mpidist.embedding_lookup(self.emb_layer, batch_data).mean(axis=1)
        return np.asarray(1 / (1 + np.exp(-(self.mean @ self.kernel.value() + self.bias.value()))))

    def gradients(self, batch_data: AnyArray, delta: AnyArray) -> list[Any]:
        """Of the loss whose gradients by the logits are `delta`."""
        rows = np.repeat((delta @ self.kernel.value().T / batch_data.shape[1])[:, np.newaxis], batch_data.shape[1], 1)
        whole = np.zeros(self.emb_layer.shape, np.float32)
        np.add.at(whole, batch_data, rows)
        return [whole, self.mean.T @ delta, delta.sum(axis=0)]


def feature_and_label_gen(num_examples: int = 200) -> dict[str, list[Any]]:
    examples: dict[str, list[Any]] = {"features": [], "label": []}
    draw = random.Random(1)
    for _ in range(num_examples):
        features = draw.sample(range(FEATURE_VOCAB), 3)
        label = [1] if min(LABEL_YES) in features else [0]
        examples["features"].append(features)
        examples["label"].append(label)
    return examples


def tutorial(strategy: ParameterServerStrategy) -> None:
    examples = feature_and_label_gen()

    def dataset_fn(_: Any) -> mpidist.data.Dataset:
        raw_dataset = mpidist.data.Dataset.from_tensor_slices(examples)

        return raw_dataset.map(
            lambda x: (
                np.asarray(x["features"]),
                np.asarray(x["label"]),
            )).shuffle(200).batch(32).repeat()

    # These variables created under the `Strategy.scope` will be placed on parameter
    # servers in a round-robin fashion.
    with strategy.scope():
        model = Model()
        emb_layer = model.emb_layer

        optimizer = mpidist.optimizers.RMSprop(learning_rate=0.1)
        accuracy = mpidist.metrics.Accuracy()

    parts = emb_layer.variables
    assert len(parts) == 2
    assert parts[0].shape == (8192, 4)
    assert parts[1].shape == (8192, 4)
    assert parts[0].device == "/job:ps/replica:0/task:0/device:CPU:0"

    def step_fn(iterator: Any) -> Any:

        def replica_fn(batch_data: AnyArray, labels: AnyArray) -> Any:
            pred = model(batch_data, training=True)
            per_example_loss = -np.log(np.where(labels, pred, 1 - pred))
            loss = mpidist.compute_average_loss(per_example_loss)
            gradients = model.gradients(batch_data, ((pred - labels) / len(labels)).astype("float32"))

            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            actual_pred = np.greater(pred, 0.5).astype("int64")
            accuracy.update_state(labels, actual_pred)
            return loss

        batch_data, labels = next(iterator)
        losses = strategy.run(replica_fn, args=(batch_data, labels))
        return strategy.reduce(mpidist.ReduceOp.SUM, losses, axis=None)

    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)

    def per_worker_dataset_fn() -> Any:
        return strategy.distribute_datasets_from_function(dataset_fn)

    per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    per_worker_iterator: Any = iter(per_worker_dataset)

    num_epochs = 4
    steps_per_epoch = 5
    for i in range(num_epochs):
        accuracy.reset_states()
        for _ in range(steps_per_epoch):
            coordinator.schedule(step_fn, args=(per_worker_iterator,))
        # Wait at epoch boundaries.
        coordinator.join()
        print(f"Finished epoch {i}, accuracy is {accuracy.result():f}.")
    assert float(accuracy.result()) > 0.9

    loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
    print(f"Final loss is {loss.fetch():f}")
    assert float(loss.fetch()) < 0.5
    assert int(optimizer.iterations) == num_epochs * steps_per_epoch + 1

    # Direct evaluation: on the coordinator.
    eval_dataset = mpidist.data.Dataset.from_tensor_slices(
        feature_and_label_gen(num_examples=160)).map(
            lambda x: (
                np.asarray(x["features"]),
                np.asarray(x["label"]),
            )).batch(8)

    eval_accuracy = mpidist.metrics.Accuracy()

    for batch_data, labels in eval_dataset:
        pred = model(batch_data, training=False)
        actual_pred = np.greater(pred, 0.5).astype("int64")
        eval_accuracy.update_state(labels, actual_pred)

    print(f"Evaluation accuracy: {eval_accuracy.result():f}")
    assert float(eval_accuracy.result()) > 0.9

    # Distributed evaluation: on workers.
    with strategy.scope():
        # Define the eval metric on parameter servers.
        eval_accuracy = mpidist.metrics.Accuracy()

    def eval_step(iterator: Any) -> None:

        def replica_fn(batch_data: AnyArray, labels: AnyArray) -> None:
            pred = model(batch_data, training=False)
            actual_pred = np.greater(pred, 0.5).astype("int64")
            eval_accuracy.update_state(labels, actual_pred)

        batch_data, labels = next(iterator)
        strategy.run(replica_fn, args=(batch_data, labels))

    def eval_dataset_fn() -> mpidist.data.Dataset:
        return mpidist.data.Dataset.from_tensor_slices(
            feature_and_label_gen(num_examples=160)).map(
                lambda x: (
                    np.asarray(x["features"]),
                    np.asarray(x["label"]),
                )).shuffle(160).repeat().batch(8)

    per_worker_eval_dataset = coordinator.create_per_worker_dataset(eval_dataset_fn)
    per_worker_eval_iterator: Any = iter(per_worker_eval_dataset)

    eval_steps_per_epoch = 2
    for _ in range(eval_steps_per_epoch):
        coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
    coordinator.join()
    print(f"Evaluation accuracy: {eval_accuracy.result():f}")
    assert float(eval_accuracy.result()) > 0.8


@pytest.mark.parametrize("servers", [pytest.param(2, marks=pytest.mark.mpi(min_size=4))])
def test_the_custom_loop(communicator: Communicator, servers: int) -> None:
    on_chief(
        communicator, lambda strategy, _: tutorial(strategy), ServerOptions(heap_bytes=1 << 24), servers,
        partitioner=mpidist.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=(128 << 10),
            max_shards=servers),
    )
