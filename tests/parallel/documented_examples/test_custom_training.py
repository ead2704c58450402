"""TensorFlow's tutorials "Custom training with tf.distribute.Strategy" and "Custom training loop with Keras and
MultiWorkerMirroredStrategy", with a layer by hand in the place of Keras's network.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.parallel.documented_examples.dense import Array

pytestmark = pytest.mark.mpi

CLASSES = 3


def images_and_labels(number: int, seed: int) -> tuple[Array, Array]:
    """Stands for `fashion_mnist.load_data()`: points near the corners of a triangle."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, number)
    corners = np.array([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]])
    return (corners[labels] + random.normal(0, 0.2, (number, 2))).astype(np.float32), labels


class Model(mpidist.Module):
    """Stands for the tutorials' Sequential model, with its regularization losses."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = mpidist.Variable(np.zeros((2, CLASSES), np.float32))
        self.bias = mpidist.Variable(np.zeros(CLASSES, np.float32))

    @property
    def losses(self) -> list[Any]:
        return [1e-5 * np.sum(self.kernel.value() ** 2)]

    def __call__(self, images: Array, training: bool = False) -> Array:
        return np.asarray(images @ self.kernel.value() + self.bias.value())

    def gradients(self, images: Array, delta: Array, replicas: int) -> list[Array]:
        """Stands for `tape.gradient(loss, model.trainable_variables)`: of bias and kernel, in the order of names."""
        return [delta.sum(axis=0), images.T @ delta + 2e-5 * self.kernel.value() / replicas]


def sparse_crossentropy(labels: Array, logits: Array) -> tuple[Array, Array]:
    """Keras's `SparseCategoricalCrossentropy(from_logits=True, reduction=NONE)`, and its gradient by the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    chances = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    right = (np.arange(len(labels)), labels)
    losses = -np.log(chances[right])
    chances[right] -= 1
    return losses, chances


def test_the_custom_loop_with_evaluation_and_a_restored_model(mpi_tmp_path: Path) -> None:
    train_images, train_labels = images_and_labels(120, seed=1)
    test_images, test_labels = images_and_labels(60, seed=2)
    strategy = mpidist.MirroredStrategy()

    BUFFER_SIZE = len(train_images)  # noqa: N806
    BATCH_SIZE_PER_REPLICA = 8  # noqa: N806
    GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync  # noqa: N806
    EPOCHS = 4  # noqa: N806

    train_dataset = mpidist.data.Dataset.from_tensor_slices((train_images, train_labels)).shuffle(BUFFER_SIZE).batch(
        GLOBAL_BATCH_SIZE)
    test_dataset = mpidist.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(GLOBAL_BATCH_SIZE)
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
    test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

    # Create a checkpoint directory to store the checkpoints.
    checkpoint_dir = str(mpi_tmp_path / "training_checkpoints")
    checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")

    with strategy.scope():
        def compute_loss(labels: Array, predictions: Array, model_losses: list[Any]) -> tuple[Any, Array]:
            per_example_loss, delta = sparse_crossentropy(labels, predictions)
            loss = mpidist.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
            if model_losses:
                loss += mpidist.scale_regularization_loss(sum(model_losses))
            return loss, delta / GLOBAL_BATCH_SIZE

        test_loss = mpidist.metrics.Mean(name="test_loss")
        train_accuracy = mpidist.metrics.SparseCategoricalAccuracy(
            name="train_accuracy")
        test_accuracy = mpidist.metrics.SparseCategoricalAccuracy(
            name="test_accuracy")
        model = Model()
        optimizer = mpidist.optimizers.Adam(learning_rate=0.1)
        checkpoint = mpidist.Checkpoint(optimizer=optimizer, model=model)

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        predictions = model(images, training=True)
        loss, delta = compute_loss(labels, predictions, model.losses)
        gradients = model.gradients(images, delta, strategy.num_replicas_in_sync)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        predictions = model(images, training=False)
        t_loss, _ = sparse_crossentropy(labels, predictions)
        test_loss.update_state(t_loss)
        test_accuracy.update_state(labels, predictions)

    def distributed_train_step(dataset_inputs: Any) -> Any:
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(mpidist.ReduceOp.SUM, per_replica_losses,
                               axis=None)

    def distributed_test_step(dataset_inputs: Any) -> None:
        return strategy.run(test_step, args=(dataset_inputs,))

    results = []
    for epoch in range(EPOCHS):
        # TRAIN LOOP
        total_loss = 0.0
        num_batches = 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        train_loss = total_loss / num_batches

        # TEST LOOP
        for x in test_dist_dataset:
            distributed_test_step(x)

        if epoch % 2 == 0:
            checkpoint.save(checkpoint_prefix)

        results.append((train_loss, train_accuracy.result(), test_loss.result(), test_accuracy.result()))
        test_loss.reset_states()
        train_accuracy.reset_states()
        test_accuracy.reset_states()
    assert results[3][0] < results[0][0]
    assert results[3][1] > 0.9
    assert results[3][2] < results[0][2]
    assert results[3][3] > 0.9

    # Restore the latest checkpoint and test, without a strategy.
    eval_accuracy = mpidist.metrics.SparseCategoricalAccuracy(
        name="eval_accuracy")
    new_model = Model()
    new_optimizer = mpidist.optimizers.Adam()
    restored = mpidist.Checkpoint(optimizer=new_optimizer, model=new_model)
    restored.restore(mpidist.latest_checkpoint(checkpoint_dir))
    for images, labels in test_dataset:
        predictions = new_model(images, training=False)
        eval_accuracy(labels, predictions)
    assert eval_accuracy.result() == results[2][3]

    # Iterating over a dataset: with an iterator, and within a function.
    for _ in range(2):
        train_iter = iter(train_dist_dataset)
        total_loss = sum(distributed_train_step(next(train_iter)) for _ in range(3))
        assert total_loss / 3 < results[0][0]

    def distributed_train_epoch(dataset: Any) -> Any:
        total_loss = 0.0
        num_batches = 0
        for x in dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        return total_loss / num_batches

    assert distributed_train_epoch(train_dist_dataset) < results[0][0]


def train(checkpoint_dir: str, num_epochs: int) -> list[tuple[int, float, float]]:
    """`main.py` of the multi-worker tutorial: the lines that it prints."""
    per_worker_batch_size = 8
    num_steps_per_epoch = 5
    # Checkpoint saving and restoring: one directory for all, where the tutorial needs a temporary one for each worker.
    strategy = mpidist.MultiWorkerMirroredStrategy()
    num_workers = strategy.num_replicas_in_sync
    global_batch_size = per_worker_batch_size * num_workers

    def dataset_fn(global_batch_size: int, input_context: mpidist.InputContext) -> mpidist.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = mpidist.data.Dataset.from_tensor_slices(images_and_labels(240, seed=1)).shuffle(240)
        dataset = dataset.shard(input_context.num_input_pipelines,
                                input_context.input_pipeline_id)
        return dataset.batch(batch_size)

    with strategy.scope():
        # Model building needs to be within `strategy.scope()`.
        multi_worker_model = Model()

        multi_worker_dataset = strategy.distribute_datasets_from_function(
            lambda input_context: dataset_fn(global_batch_size, input_context))
        optimizer = mpidist.optimizers.RMSprop(learning_rate=0.05)
        train_accuracy = mpidist.metrics.SparseCategoricalAccuracy(
            name="train_accuracy")

    def train_step(iterator: Any) -> Any:
        """Training step function."""

        def step_fn(inputs: Any) -> Any:
            """Per-Replica step function."""
            x, y = inputs
            predictions = multi_worker_model(x, training=True)
            per_example_loss, delta = sparse_crossentropy(y, predictions)
            loss = mpidist.compute_average_loss(per_example_loss)
            model_losses = multi_worker_model.losses
            if model_losses:
                loss += mpidist.scale_regularization_loss(sum(model_losses))

            grads = multi_worker_model.gradients(x, delta / global_batch_size, num_workers)
            optimizer.apply_gradients(
                zip(grads, multi_worker_model.trainable_variables, strict=True))
            train_accuracy.update_state(y, predictions)
            return loss

        per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
        return strategy.reduce(
            mpidist.ReduceOp.SUM, per_replica_losses, axis=None)

    with strategy.scope():
        epoch = mpidist.Variable(
            initial_value=np.asarray(0, dtype=np.int64), name="epoch")
        step_in_epoch = mpidist.Variable(
            initial_value=np.asarray(0, dtype=np.int64),
            name="step_in_epoch")
    resolver = strategy.cluster_resolver
    assert resolver is not None
    task_type, task_id, cluster_spec = (resolver.task_type,
                                        resolver.task_id,
                                        resolver.cluster_spec())
    # What the tutorial's `_is_chief` asks.
    assert task_type == "worker"
    assert "chief" not in cluster_spec.as_dict()
    assert (task_id == 0) == mpidist.is_first_rank()

    checkpoint = mpidist.Checkpoint(
        model=multi_worker_model, epoch=epoch, step_in_epoch=step_in_epoch)
    checkpoint_manager = mpidist.CheckpointManager(
        checkpoint, directory=checkpoint_dir, max_to_keep=1)

    # Restoring the checkpoint
    latest_checkpoint = mpidist.latest_checkpoint(checkpoint_dir)
    if latest_checkpoint:
        checkpoint.restore(latest_checkpoint)

    # Resume our CTL training
    printed = []
    while epoch.numpy() < num_epochs:
        iterator = iter(multi_worker_dataset)
        total_loss = 0.0
        num_batches = 0

        while step_in_epoch.numpy() < num_steps_per_epoch:
            total_loss += train_step(iterator)
            num_batches += 1
            step_in_epoch.assign_add(1)

        train_loss = total_loss / num_batches
        printed.append((int(epoch.numpy()), float(train_accuracy.result()), float(train_loss)))
        train_accuracy.reset_states()

        # The program may be preempted here: the epoch counts when it has been saved.
        epoch.assign_add(1)
        step_in_epoch.assign(0)
        checkpoint_manager.save()
    checkpoint_manager.close()
    return printed


def test_the_loop_of_several_workers_goes_on(mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    folder = str(mpi_tmp_path / "ckpt")
    first = train(folder, num_epochs=2)
    assert [epoch for epoch, _, _ in first] == [0, 1]
    # As a new start of the program.
    then = train(folder, num_epochs=4)
    assert [epoch for epoch, _, _ in then] == [2, 3]
    assert then[1][1] > 0.9
    assert then[1][2] < first[0][2]
    assert train(folder, num_epochs=4) == []
