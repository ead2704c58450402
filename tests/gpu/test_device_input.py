"""Batches on a GPU: each rank's piece, also where it has no data left; copies and kernels wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.data import Dataset
from mpidist.data.distribution.device import DeviceReader
from mpidist.data.distribution.distributed_dataset import DistributedDataset, distribute_datasets_from_function
from tests.gpu.test_device_collectives import CYCLES, SLOW

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.mark.parametrize(("rows", "batch_size"), [(150, 40), (15, 4)])
def test_pieces_are_those_of_host_memory(cupy: Any, communicator: Communicator, rows: int, batch_size: int) -> None:
    values = {"x": np.arange(2.0 * rows).reshape(rows, 2), "y": np.arange(rows)}
    dataset = Dataset.from_tensor_slices(values).batch(batch_size)
    on_host = list(DistributedDataset(dataset, communicator))
    on_gpu = list(DistributedDataset(dataset, communicator, namespace=cupy))
    for batch, expected in zip(on_gpu, on_host, strict=True):
        for key in ("x", "y"):
            assert isinstance(batch[key], cupy.ndarray)
            np.testing.assert_array_equal(cupy.asnumpy(batch[key]), expected[key])
            assert batch[key].shape == expected[key].shape


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_rank_without_data_gets_empty_batches_on_its_gpu(
    cupy: Any, communicator: Communicator, is_counted: bool
) -> None:
    rank, size = communicator.rank, communicator.size

    def dataset_fn(_: object) -> Dataset:
        rows = np.arange(3.0 * (rank + 1)).reshape(-1, 3)
        dataset = Dataset.from_tensor_slices(rows) if is_counted else Dataset.from_iterable(lambda: iter(rows))
        return dataset.batch(1)

    steps = list(distribute_datasets_from_function(dataset_fn, communicator, namespace=cupy))
    assert [batch.shape for batch in steps] == [(1, 3)] * (rank + 1) + [(0, 3)] * (size - rank - 1)
    assert all(isinstance(batch, cupy.ndarray) for batch in steps)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_kernels_see_whole_batches_and_keep_them_until_they_are_done(cupy: Any, depth: int, own_stream: bool) -> None:
    slow = cupy.RawKernel(SLOW, "slow")
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    count = 4_000_000
    sums = []
    with stream:
        scratch = cupy.zeros(1, np.float32)
        for batch in DeviceReader((np.full(count, n, np.float32) for n in range(12)), depth, cupy):
            # The sum is computed long after the batch, and perhaps its successor, came; its memory is given up at once.
            slow((1,), (1,), (scratch, np.int64(1), np.float32(0), np.int64(CYCLES // 10)))
            sums.append(batch.sum(dtype=np.float64))
            del batch
        assert [float(one) for one in sums] == [float(n) * count for n in range(12)]


def test_memory_of_a_batch_that_nobody_took_is_not_written_to_later(cupy: Any) -> None:
    for _ in range(20):
        reader = DeviceReader((np.ones(4_000_000, np.float32) for _ in range(3)), 2, cupy)
        reader.read()
        reader.close()
        del reader
        mine = [cupy.zeros(4_000_000, np.float32) for _ in range(4)]
        assert all(float(one.sum()) == 0 for one in mine)
