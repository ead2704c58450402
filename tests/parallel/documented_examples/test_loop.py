"""The guide's custom training loop, from the global batch size to the explicit iterator, with the printed losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.parallel.documented_examples.dense import BinaryCrossentropy, Dense

pytestmark = pytest.mark.mpi

BATCH_SIZE_PER_REPLICA = 5

# What the guide prints, with one replica, in the loop over the dataset and in that over the iterator.
PRINTED = [
    0.80679005, 0.8006732, 0.7946168, 0.78862023, 0.782683, 0.77680445, 0.77098423, 0.7652217, 0.7595164, 0.75386775,
    0.7482752, 0.74273825, 0.7372565, 0.7318293, 0.7264561, 0.7211364, 0.71586984, 0.7106557, 0.7054935, 0.7003829,
]
PRINTED_BY_ITERATOR = [
    0.69532317, 0.690314, 0.68535477, 0.680445, 0.67558426, 0.67077184, 0.66600746, 0.66129065, 0.6566208, 0.6519975,
]
# Keras drew the guide's first weight; this one gives the first printed loss.
FIRST_WEIGHT = -math.log(math.expm1(PRINTED[0]))

STRATEGIES: dict[str, Callable[[], mpidist.Strategy]] = {
    "mirrored": mpidist.MirroredStrategy,
    "multi-worker": mpidist.MultiWorkerMirroredStrategy,
    "experimental multi-worker": mpidist.experimental.MultiWorkerMirroredStrategy,
    "one device": lambda: mpidist.OneDeviceStrategy("cpu:0"),
    "default": mpidist.get_strategy,
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> mpidist.Strategy:
    """The guide's `mirrored_strategy`, and those to which it may be switched by changing its one line."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return STRATEGIES[request.param]()


def test_global_batch_size(strategy: mpidist.Strategy) -> None:
    # Compute global batch size using number of replicas.
    BATCH_SIZE_PER_REPLICA = 5  # noqa: N806
    global_batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
    dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100)
    dataset = dataset.batch(global_batch_size)

    LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15, 15: 0.175, 20: 0.2}  # noqa: N806
    learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]

    assert mpidist.optimizers.SGD(learning_rate).learning_rate == learning_rate
    features, labels = next(iter(strategy.experimental_distribute_dataset(dataset)))
    assert features.shape == labels.shape == (BATCH_SIZE_PER_REPLICA, 1)


class Program:
    """The guide's blocks up to `distributed_train_step`, for the loops that follow."""

    def __init__(self, mirrored_strategy: mpidist.Strategy, examples: int) -> None:
        global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync

        with mirrored_strategy.scope():
            model = Dense(1, initial_weight=FIRST_WEIGHT)
            optimizer = mpidist.optimizers.SGD()

        dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(examples).batch(
            global_batch_size)
        self.dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

        loss_object = BinaryCrossentropy()

        def compute_loss(labels: Any, predictions: Any) -> Any:
            per_example_loss = loss_object(labels, predictions)
            return mpidist.compute_average_loss(per_example_loss, global_batch_size=global_batch_size)

        def train_step(inputs: Any) -> Any:
            features, labels = inputs

            predictions = model(features)
            loss = compute_loss(labels, predictions)

            gradients = model.gradients(features, loss_object.gradients(labels, predictions) / global_batch_size)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def distributed_train_step(dist_inputs: Any) -> Any:
            per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
            return mirrored_strategy.reduce(mpidist.ReduceOp.SUM, per_replica_losses,
                                            axis=None)

        self.distributed_train_step = distributed_train_step
        self.model = model
        self.optimizer = optimizer


def test_loops_over_dataset_and_iterator(strategy: mpidist.Strategy) -> None:
    # As many steps as the guide's, whatever the number of replicas.
    program = Program(strategy, examples=100 * strategy.num_replicas_in_sync)
    dist_dataset, distributed_train_step = program.dist_dataset, program.distributed_train_step
    losses = []
    for dist_inputs in dist_dataset:
        losses.append(distributed_train_step(dist_inputs))
    assert [(loss.shape, loss.dtype) for loss in losses] == [((), np.float32)] * len(PRINTED)
    np.testing.assert_allclose(losses, PRINTED, rtol=1e-6)

    losses = []
    iterator = iter(dist_dataset)
    for _ in range(10):
        losses.append(distributed_train_step(next(iterator)))
    np.testing.assert_allclose(losses, PRINTED_BY_ITERATOR, rtol=1e-6)
    assert program.optimizer.iterations == 30


def test_a_hundred_examples_on_any_number_of_replicas(strategy: mpidist.Strategy) -> None:
    program = Program(strategy, examples=100)
    losses = [program.distributed_train_step(dist_inputs) for dist_inputs in program.dist_dataset]
    global_batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
    expected = np.array(PRINTED[: math.ceil(100 / global_batch_size)])
    # The sum is divided by the full global batch size, also in the last, smaller step of 3 replicas.
    expected[-1] *= (100 % global_batch_size or global_batch_size) / global_batch_size
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
