"""`Strategy.distribute_datasets_from_function`: its reference's text, and the dataset functions of the examples."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi


def test_dataset_fn_batches_and_shards(communicator: Communicator) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    n = strategy.num_replicas_in_sync
    contexts = []

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.data.Dataset:
        contexts.append(input_context)
        batch_size = input_context.get_per_replica_batch_size(2 * n)
        dataset = mpidist.data.Dataset.range(4 * n)
        return dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(batch_size)

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    # Called once; one rank is one pipeline and one replica.
    assert contexts == [mpidist.InputContext(n, communicator.rank, n)]
    batches = [batch.tolist() for batch in dist_dataset]
    # Nothing is batched or sharded a second time.
    assert batches == [[communicator.rank + n * i for i in pair] for pair in ((0, 1), (2, 3))]
    assert dist_dataset.element_spec == mpidist.data.ArraySpec((None,), np.dtype(np.int64))


def test_endless_replicas_that_differ_in_their_seed(communicator: Communicator) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.data.Dataset:
        dataset = mpidist.data.Dataset.range(64)
        return dataset.shuffle(64, seed=input_context.input_pipeline_id).repeat().batch(16)

    batches = itertools.islice(strategy.distribute_datasets_from_function(dataset_fn), 4)
    epoch = np.concatenate(list(batches))
    assert sorted(epoch) == list(range(64))
    orders = communicator.all_gather_object(epoch.tolist())
    assert len({tuple(order) for order in orders}) == communicator.size


def test_dataset_fn_with_an_input_context(communicator: Communicator) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.data.Dataset:
        dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0]))
        return (
            dataset.repeat()
            .shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
            .batch(input_context.get_per_replica_batch_size(4 * communicator.size))
            .prefetch(2)
        )

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    assert dist_dataset.cardinality == mpidist.data.INFINITE_CARDINALITY
    for features, labels in itertools.islice(dist_dataset, 3):
        assert features.shape == labels.shape == (4, 1)


def test_dataset_fn_of_file_names() -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()

    def dataset_fn() -> mpidist.data.Dataset:
        filenames = ["a.h5", "b.h5", "c.h5", "d.h5"]
        dataset = mpidist.data.Dataset.from_tensor_slices(filenames)

        # Dataset is recommended to be shuffled, and repeated.
        return dataset.shuffle(buffer_size=4).repeat().batch(batch_size=2)

    distributed_dataset = strategy.distribute_datasets_from_function(lambda _: dataset_fn())
    seen: list[Any] = []
    for batch in itertools.islice(distributed_dataset, 4):
        assert batch.shape == (2,)
        seen.extend(str(name) for name in batch)
    # Shuffled, then repeated: every pass over the names has each once.
    assert sorted(seen[:4]) == sorted(seen[4:]) == ["a.h5", "b.h5", "c.h5", "d.h5"]
