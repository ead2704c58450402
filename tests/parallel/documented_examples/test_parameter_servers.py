"""The blocks of the `ParameterServerStrategy` document that a coordinator runs, on a chief, workers and servers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.documented_examples.dense import Dense
from tests.parallel.documented_examples.test_checkpoint import BATCH_SIZE, STEPS_PER_EPOCH, load_checkpoint
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)


def train(strategy: ParameterServerStrategy, checkpoint_dir: Path, num_epoch: int) -> tuple[int, list[float], Any]:
    """The coordinator's example; gives the initial epoch, the metric of each epoch, and the kernel."""
    coordinator = mpidist.experimental.coordinator.ClusterCoordinator(
        strategy=strategy)

    def dataset_fn() -> mpidist.data.Dataset:
        features = np.linspace(-1, 1, 12, dtype=np.float32)[:, np.newaxis]
        return mpidist.data.Dataset.from_tensor_slices((features, 3 * features)).shuffle(12).repeat().batch(BATCH_SIZE)

    # Prepare a distribute dataset that will place datasets on the workers.
    distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn=dataset_fn)

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
            gradients = model.gradients(batch_data, 2 * errors / len(errors))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            metrics.update_state(errors**2)

        strategy.run(replica_fn, args=(next(iterator),))

    results = []
    for _epoch in range(initial_epoch, num_epoch):
        distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
        for _step in range(STEPS_PER_EPOCH):

            # Asynchronously schedule the `worker_fn` to be executed on an arbitrary
            # worker. This call returns immediately.
            coordinator.schedule(worker_fn, args=(distributed_iterator,))

        # `join` blocks until all scheduled `worker_fn`s finish execution. Once it
        # returns, we can read the metrics and save checkpoints as needed.
        coordinator.join()
        results.append(float(metrics.result()))
        logging.info("Metric result: %r", metrics.result())
        metrics.reset_states()
        checkpoint_manager.save()

    assert int(optimizer.iterations) == num_epoch * STEPS_PER_EPOCH
    checkpoint_manager.close()
    return initial_epoch, results, model.kernel.numpy()


def test_a_coordinator_with_a_training_loop_and_its_restart(communicator: Communicator, mpi_tmp_path: Path) -> None:
    kernels = []

    def first(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        initial_epoch, results, kernel = train(strategy, mpi_tmp_path, num_epoch=5)
        assert initial_epoch == 0
        assert results[4] < results[0] / 2
        kernels.append(kernel)

    def restarted(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        initial_epoch, results, kernel = train(strategy, mpi_tmp_path, num_epoch=5)
        assert (initial_epoch, results) == (5, []), "nothing is left to do"
        assert np.array_equal(kernel, kernels[0])
        initial_epoch, results, kernel = train(strategy, mpi_tmp_path, num_epoch=12)
        assert (initial_epoch, len(results)) == (5, 7)
        np.testing.assert_allclose(kernel, 3, atol=0.5)

    on_chief(communicator, first)
    on_chief(communicator, restarted)


def test_variables_inside_and_outside_of_the_scope(communicator: Communicator) -> None:
    # As printed on five ranks, which have three servers.
    ps = communicator.size - 2

    def program(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        # Variables should be created inside scope to be placed on parameter servers.
        # If created outside scope such as `v1` here, it would be placed on the
        # coordinator.
        v1 = mpidist.Variable(initial_value=0.0)

        with strategy.scope():
            v2 = mpidist.Variable(initial_value=1.0)
            v3 = mpidist.Variable(initial_value=2.0)
            v4 = mpidist.Variable(initial_value=3.0)
            v5 = mpidist.Variable(initial_value=4.0)

        # v2 through v5 are created in scope and are distributed on parameter servers.
        # Default placement is round-robin but the order should not be relied on.
        assert v2.device == f"/job:ps/replica:0/task:{0 % ps}/device:CPU:0"
        assert v3.device == f"/job:ps/replica:0/task:{1 % ps}/device:CPU:0"
        assert v4.device == f"/job:ps/replica:0/task:{2 % ps}/device:CPU:0"
        assert v5.device == f"/job:ps/replica:0/task:{3 % ps}/device:CPU:0"
        assert [float(v) for v in (v1, v2, v3, v4, v5)] == [0.0, 1.0, 2.0, 3.0, 4.0]

    on_chief(communicator, program, servers=ps)


def test_dataset_fn_of_file_names(communicator: Communicator, mpi_tmp_path: Path) -> None:
    def program(_: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        for number in range(4):
            np.save(mpi_tmp_path / f"{number}.npy", np.full(3, number))

        def dataset_fn() -> mpidist.data.Dataset:
            filenames = [str(mpi_tmp_path / f"{number}.npy") for number in range(4)]
            dataset = mpidist.data.Dataset.from_tensor_slices(filenames)

            # Dataset is recommended to be shuffled, and repeated.
            return dataset.shuffle(buffer_size=4).repeat().batch(batch_size=2)

        distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn)

        iterator = iter(distributed_dataset)
        values = [
            coordinator.schedule(
                lambda names: [int(np.load(str(name))[0]) for name in next(names)], (iterator,), worker=0)
            for _ in range(2)
        ]
        # A pass over all files, in some order.
        first, second = coordinator.fetch(values)
        assert sorted(first + second) == [0, 1, 2, 3]

    on_chief(communicator, program)


def test_the_simplest_way_of_creating_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    # On several ranks TF_CONFIG "needs to specify the configuration of parameter servers and workers".
    with pytest.raises(ValueError, match=r"TF_CONFIG, .* or let MPIClusterResolver\(num_ps=1\) deal"):
        mpidist.experimental.ParameterServerStrategy()


def test_a_partitioner_of_an_embedding(communicator: Communicator) -> None:
    # Partition the embedding layer into 2 shards.
    variable_partitioner = (
        mpidist.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=(256 << 10),
            max_shards=2))

    class Embedding(mpidist.Module):
        """Keras's layer of that name, whose variable is there at once."""

        def __init__(self, input_dim: int, output_dim: int) -> None:
            self.embeddings = mpidist.Variable(
                np.arange(input_dim * output_dim, dtype=np.float32).reshape(input_dim, output_dim),
                sparse_gradient=True)

        def __call__(self, ids: Any) -> Any:
            return mpidist.embedding_lookup(self.embeddings, ids)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            embedding = Embedding(input_dim=1024, output_dim=1024)
        assert len(embedding.variables) == 2
        assert isinstance(embedding.variables[0], mpidist.Variable)
        assert isinstance(embedding.variables[1], mpidist.Variable)
        assert embedding.variables[0].shape == (512, 1024)
        assert embedding.variables[1].shape == (512, 1024)
        # The text's servers in turn, a conversion to an array, and a lookup.
        servers = {one.device for one in embedding.variables}
        assert len(servers) == min(2, communicator.size - 2)
        assert np.array_equal(2 * embedding.embeddings[:, 0], 2048 * np.arange(1024))
        ids = np.array([[1023, 0], [512, 511]])
        found = coordinator.schedule(embedding, (ids,)).fetch()
        assert np.array_equal(found[..., 0], 1024 * ids)

    options = mpidist.ServerOptions(heap_bytes=1 << 24)
    on_chief(communicator, program, options, communicator.size - 2, partitioner=variable_partitioner)


def test_thirteen_ids_in_five_shards(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        with strategy.scope():
            ids = mpidist.Variable(np.arange(13))
        shards = [one.numpy().tolist() for one in ids.parts]
        assert shards == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12]]

    on_chief(
        communicator, program, servers=communicator.size - 2,
        partitioner=mpidist.experimental.partitioners.FixedShardsPartitioner(5),
    )
