"""Training that goes on after a restart: the coordinator's example without its coordinator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.parallel.documented_examples.dense import Dense

pytestmark = pytest.mark.mpi

STEPS_PER_EPOCH = 3
BATCH_SIZE = 4


def load_checkpoint(checkpoint_manager: mpidist.CheckpointManager, optimizer: Any) -> int:
    """The document's own function, which infers the initial epoch from `optimizer.iterations`."""
    checkpoint_manager.restore_or_initialize()
    return int(optimizer.iterations) // STEPS_PER_EPOCH


def train(checkpoint_dir: Path, num_epoch: int) -> tuple[int, list[float], Any, list[str]]:
    """The example; gives the initial epoch, the metric of each epoch, the kernel and the checkpoints kept."""
    # Prepare a strategy to use with the cluster.
    strategy = mpidist.MultiWorkerMirroredStrategy()

    # Prepare a distributed dataset.
    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.data.Dataset:
        features = np.linspace(-1, 1, 12, dtype=np.float32)[:, np.newaxis]
        dataset = mpidist.data.Dataset.from_tensor_slices((features, 3 * features))
        return dataset.repeat().shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(
            BATCH_SIZE)

    distributed_dataset = strategy.distribute_datasets_from_function(dataset_fn)

    with strategy.scope():
        model = Dense(1)
        optimizer, metrics = mpidist.optimizers.SGD(0.1, momentum=0.5), mpidist.metrics.Mean()
        checkpoint = mpidist.Checkpoint(model=model, optimizer=optimizer)
        checkpoint_manager = mpidist.CheckpointManager(
            checkpoint, checkpoint_dir, max_to_keep=2)
        # `load_checkpoint` infers initial epoch from `optimizer.iterations`.
        initial_epoch = load_checkpoint(checkpoint_manager, optimizer) or 0

    def worker_fn(iterator: Any) -> None:

        def replica_fn(inputs: Any) -> None:
            batch_data, labels = inputs
            errors = model(batch_data) - labels
            gradients = model.gradients(batch_data, 2 * errors / (len(errors) * strategy.num_replicas_in_sync))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            metrics.update_state(errors**2)

        strategy.run(replica_fn, args=(next(iterator),))

    results = []
    for _epoch in range(initial_epoch, num_epoch):
        distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
        for _step in range(STEPS_PER_EPOCH):
            worker_fn(distributed_iterator)

        results.append(metrics.result())
        logging.info("Metric result: %r", metrics.result())
        metrics.reset_states()
        checkpoint_manager.save()

    kept = [Path(path).name for path in checkpoint_manager.checkpoints]
    checkpoint_manager.close()
    return initial_epoch, results, model.kernel.numpy(), kept


def test_a_restarted_program_goes_on(mpi_tmp_path: Path) -> None:
    first, undisturbed, kernel, kept = train(mpi_tmp_path / "undisturbed", num_epoch=4)
    assert (first, kept) == (0, ["ckpt-3.h5", "ckpt-4.h5"])
    assert undisturbed == sorted(undisturbed, reverse=True)

    first, results, _, _ = train(mpi_tmp_path / "restarted", num_epoch=2)
    assert first == 0
    # As a new start of the program: new strategy, model, optimizer and manager.
    first, more, restarted_kernel, kept = train(mpi_tmp_path / "restarted", num_epoch=4)
    assert (first, kept) == (2, ["ckpt-3.h5", "ckpt-4.h5"])
    assert results + more == undisturbed
    assert np.array_equal(restarted_kernel, kernel)
