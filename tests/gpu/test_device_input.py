"""Metrics and batches on a GPU: what they are in host memory; copies and kernels wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.comm.communicator import Communicator
from mpidist.data import Dataset
from mpidist.data.distribution.device import DeviceReader
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from tests.gpu.test_device_collectives import CYCLES, SLOW
from tests.parallel.metrics.test_families import CASES, WEIGHTS

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_metric_is_that_of_host_memory(cupy: Any, name: str, is_weighted: bool) -> None:
    make, values = CASES[name]
    on_host, on_gpu = make(), make()
    for part in (slice(0, 20), slice(20, 20), slice(20, None)):
        weights = WEIGHTS[part] if is_weighted else None
        on_host.update_state(*(value[part] for value in values), sample_weight=weights)
        on_gpu.update_state(
            *(cupy.asarray(value[part]) for value in values),
            sample_weight=None if weights is None else cupy.asarray(weights),
        )
    np.testing.assert_allclose(on_gpu.result(), on_host.result(), rtol=1e-9)


def test_pieces_are_those_of_host_memory(cupy: Any, communicator: Communicator) -> None:
    dataset = Dataset.from_tensor_slices({"x": np.arange(300.0).reshape(150, 2), "y": np.arange(150)}).batch(40)
    on_host = list(DistributedDataset(dataset, communicator))
    on_gpu = list(DistributedDataset(dataset, communicator, namespace=cupy))
    for batch, expected in zip(on_gpu, on_host, strict=True):
        for key in ("x", "y"):
            assert isinstance(batch[key], cupy.ndarray)
            np.testing.assert_array_equal(cupy.asnumpy(batch[key]), expected[key])


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
