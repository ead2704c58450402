"""Batches on GPUs, simulated: each rank's piece, and empty ones where a rank has no data left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist.comm.communicator import Communicator
from mpidist.data import Dataset
from mpidist.data.distribution.distributed_dataset import DistributedDataset, distribute_datasets_from_function
from tests.simulated_cuda import simulated_gpus

pytestmark = pytest.mark.mpi


@pytest.fixture
def xp() -> Iterator[Any]:
    with simulated_gpus() as module:
        yield module


def test_pieces_are_those_of_host_memory(communicator: Communicator, xp: Any) -> None:
    dataset = Dataset.from_tensor_slices({"x": np.arange(30.0).reshape(15, 2), "y": np.arange(15)}).batch(4)
    on_host = list(DistributedDataset(dataset, communicator))
    on_gpu = list(DistributedDataset(dataset, communicator, namespace=xp))
    for batch, expected in zip(on_gpu, on_host, strict=True):
        for key in ("x", "y"):
            assert isinstance(batch[key], xp.ndarray)
            np.testing.assert_array_equal(batch[key].get(), expected[key])
            assert batch[key].shape == expected[key].shape


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_rank_without_data_gets_empty_batches_on_its_gpu(
    communicator: Communicator, xp: Any, is_counted: bool
) -> None:
    rank, size = communicator.rank, communicator.size

    def dataset_fn(_: object) -> Dataset:
        rows = np.arange(3.0 * (rank + 1)).reshape(-1, 3)
        dataset = Dataset.from_tensor_slices(rows) if is_counted else Dataset.from_iterable(lambda: iter(rows))
        return dataset.batch(1)

    steps = list(distribute_datasets_from_function(dataset_fn, communicator, namespace=xp))
    assert [batch.shape for batch in steps] == [(1, 3)] * (rank + 1) + [(0, 3)] * (size - rank - 1)
    assert all(isinstance(batch, xp.ndarray) for batch in steps)
