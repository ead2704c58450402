"""`Strategy.experimental_distribute_dataset`: the examples of its reference, and the input of the guide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.arithmetic.slices import even_sizes
from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi


def test_distributed_range(devices: list[str], communicator: Communicator) -> None:
    global_batch_size = 2
    # Passing the devices is optional.
    strategy = mpidist.MirroredStrategy(devices=devices)
    dataset = mpidist.data.Dataset.range(4).batch(global_batch_size)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    def replica_fn(input: Any) -> Any:  # noqa: A002
        return input * 2

    result = []
    for x in dist_dataset:
        assert isinstance(x, mpidist.DistributedValues)
        result.append(strategy.run(replica_fn, args=(x,)))

    assert all(x.dtype == np.int64 for x in result)
    assert [len(x) for x in result] == [even_sizes(global_batch_size, communicator.size)[communicator.rank]] * 2
    global_batches = [strategy.gather(x, axis=0).tolist() for x in result]
    assert global_batches == [[0, 2], [4, 6]]
    if communicator.size == 2:
        # As printed: [{0: [0], 1: [2]}, {0: [4], 1: [6]}].
        assert [x.tolist() for x in result] == ([[0], [4]], [[2], [6]])[communicator.rank]


def test_distributed_files(communicator: Communicator, mpi_tmp_path: Path) -> None:
    GLOBAL_BATCH_SIZE = 5  # noqa: N806  # the document's name
    paths = [mpi_tmp_path / f"{number}.npy" for number in (1, 2, 3, 4)]
    if communicator.rank == 0:
        for number, path in enumerate(paths):
            np.save(path, np.arange(3) + 3 * number)
    communicator.barrier()

    strategy = mpidist.MirroredStrategy()
    # Create a dataset
    dataset = mpidist.data.Dataset.from_files(map(str, paths), np.load).batch(GLOBAL_BATCH_SIZE)
    # Distribute that dataset
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    # Input files are sharded when there is at least one per worker: worker w reads the files w, w + n, ...
    files = range(communicator.rank, 4, communicator.size)
    mine = [3 * number + row for number in files for row in range(3)]
    steps = []
    for x in dist_dataset:
        steps.append(strategy.run(lambda x: x + 1, args=(x,)))
    assert np.concatenate(steps).tolist() == [row + 1 for row in mine]
    # All replicas together get a batch of GLOBAL_BATCH_SIZE while every worker has data, and each row once.
    batches = [strategy.gather(x, axis=0).tolist() for x in steps]
    assert sorted(row for batch in batches for row in batch) == list(range(1, 13))
    assert len(batches[0]) == GLOBAL_BATCH_SIZE


def test_each_batch_of_ten_is_divided(communicator: Communicator) -> None:
    mirrored_strategy = mpidist.MirroredStrategy()
    dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    batches = list(mirrored_strategy.experimental_distribute_dataset(dataset))
    assert len(batches) == 10  # "10/10" in the printed progress
    size = even_sizes(10, communicator.size)[communicator.rank]
    for features, labels in batches:
        assert features.shape == labels.shape == (size, 1)
        assert features.dtype == labels.dtype == np.float32
        assert (features == 1).all()
    if communicator.size == 2:
        assert size == 5  # as the text says


def test_numpy_arrays_as_input(communicator: Communicator) -> None:
    mirrored_strategy = mpidist.MirroredStrategy()
    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    dataset = mpidist.data.Dataset.from_tensor_slices((inputs, targets)).batch(10)
    batches = list(mirrored_strategy.experimental_distribute_dataset(dataset))
    assert len(batches) == 10
    total = sum(len(features) for features, _ in batches)
    assert mirrored_strategy.reduce("SUM", total, axis=None) == 100


def test_a_dataset_without_batches_is_one_error(communicator: Communicator) -> None:
    strategy = mpidist.MirroredStrategy()
    # The document's files as they stand there, unbatched: the text below them speaks of global batches.
    dataset = mpidist.data.Dataset.from_tensor_slices(["/a/1.tfr", "/a/2.tfr", "/a/3.tfr", "/a/4.tfr"])
    with pytest.raises(ValueError, match="Call the `batch` method on the dataset") as caught:
        strategy.experimental_distribute_dataset(dataset)
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


def test_element_spec_tells_shapes_and_dtypes() -> None:
    strategy = mpidist.MirroredStrategy()
    dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    features, labels = strategy.experimental_distribute_dataset(dataset).element_spec
    assert features == labels == mpidist.data.ArraySpec((None, 1), np.dtype(np.float32))


def test_nothing_can_be_added_to_a_distributed_dataset() -> None:
    strategy = mpidist.MirroredStrategy()
    dist_dataset = strategy.experimental_distribute_dataset(mpidist.data.Dataset.range(4).batch(2))
    assert isinstance(dist_dataset, mpidist.DistributedDataset)
    for transformation in ("map", "batch", "shuffle", "repeat"):
        assert not hasattr(dist_dataset, transformation)
