"""What GPUs do as late as they may: simulated streams, on which a missing wait shows as wrong numbers every time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist.comm.cross_device import asynchronous as background
from mpidist.comm.cross_device.asynchronous import open_asynchronous
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communication_thread import Handle, communication_thread
from mpidist.comm.group.communicator import Communicator
from mpidist.data import Dataset
from mpidist.data.distribution.device import DeviceReader
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from mpidist.options import ReduceOp
from tests.gpu.host_runtime import streams

pytestmark = [pytest.mark.host_gpus, pytest.mark.mpi]

Opener = Callable[..., CollectiveFront]


@pytest.mark.parametrize("own_stream", [False, True])
def test_batches_of_every_epoch_are_right(cupy: Any, communicator: Communicator, own_stream: bool) -> None:
    values = np.arange(4 * 256, dtype=np.float32).reshape(4, 256)
    dataset = Dataset.from_tensor_slices(values).batch(2 * communicator.size)
    expected = [batch.tolist() for _ in range(3) for batch in DistributedDataset(dataset, communicator)]
    with cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null:
        distributed = DistributedDataset(dataset, communicator, namespace=cupy)
        batches = [batch for _ in range(3) for batch in distributed]
        assert [batch.get().tolist() for batch in batches] == expected


@pytest.mark.parametrize("ends", ["close", "forgotten"])
def test_the_room_of_the_last_batch_is_given_up_after_its_copy(cupy: Any, ends: str) -> None:
    reader = DeviceReader(iter([np.ones(1000, np.float32)]), 0, cupy)
    (batch,) = reader
    if ends == "close":
        reader.close()
    else:
        del reader
        gc.collect()
    # CuPy's pool gives the same room to the next one.
    np.frombuffer(cupy.cuda.alloc_pinned_memory(4000), np.uint8)[:] = 0xFF
    np.testing.assert_array_equal(batch.get(), np.ones(1000))


@pytest.mark.parametrize("ends", ["close", "forgotten"])
def test_results_of_a_collective_that_is_given_up_are_right(
    cupy: Any, open_collective: Opener, ends: str
) -> None:
    collective = open_collective("staged")
    size = collective.communicator.size
    result: Any = collective.all_reduce(cupy.ones(1000, np.float32))
    if ends == "close":
        collective.backend.close()
    del collective
    gc.collect()
    rooms = [cupy.cuda.alloc_pinned_memory(1 << 22) for _ in range(8)]
    for room in rooms:
        np.frombuffer(room, np.uint8)[:] = 0xFF
    np.testing.assert_array_equal(result.get(), np.full(1000, size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "staged", "cuda-aware"])
def test_a_reduction_in_the_background_is_on_the_gpu_of_its_rank(
    cupy: Any, communicator: Communicator, open_collective: Opener, transport: str
) -> None:
    assert cupy.cuda.Device().id == communicator.node.rank % streams.COUNT
    with open_asynchronous(open_collective(transport)) as asynchronous:
        assert asynchronous.has_thread
        arrays = [cupy.full(1000, communicator.rank + number, np.float32) for number in range(3)]
        handles = [asynchronous.all_reduce_async(array) for array in arrays]
        whole = asynchronous.all_reduce_async(arrays[0].astype(np.int32) * 0 + 3, ReduceOp.MEAN, in_place=False)
        for number, (handle, array) in enumerate(zip(handles, arrays, strict=True)):
            assert handle.wait() is array
            total = sum(rank + number for rank in range(communicator.size))
            np.testing.assert_array_equal(array.get(), np.full(1000, total))
        result = whole.wait()
        assert result.device.id == cupy.cuda.Device().id
        np.testing.assert_array_equal(result.get(), np.full(1000, 3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "staged", "cuda-aware"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_a_result_of_the_background_is_not_overwritten_while_it_is_read(
    cupy: Any, open_collective: Opener, transport: str, op: ReduceOp
) -> None:
    gate = threading.Event()
    with open_asynchronous(open_collective(transport)) as asynchronous, cupy.cuda.Stream(non_blocking=True):
        size = asynchronous.communicator.size
        first = asynchronous.all_reduce_async(cupy.full(1000, 3, np.int64), op, in_place=False)
        closed = Handle("gate", lambda: (gate.wait(60), None), lambda _: None)
        communication_thread().put(closed)
        second = asynchronous.all_reduce_async(cupy.full(1000, 5, np.int64), op, in_place=False)
        result = first.wait()
        doubled = result * 2
        # CuPy's pool may give its memory to the next one that allocates for the same stream.
        del result, first
        gate.set()
        communication_thread().wait_for(closed)
        factor = size if op is ReduceOp.SUM else 1
        np.testing.assert_array_equal(second.wait().get(), np.full(1000, 5 * factor))
        np.testing.assert_array_equal(doubled.get(), np.full(1000, 6 * factor))


@pytest.mark.parametrize("in_place", [False, True])
def test_without_a_thread_a_reduction_sees_what_was_there_when_it_began(
    cupy: Any, open_collective: Opener, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(background, "_why_no_thread", lambda _: "this test is without it")
    with open_asynchronous(open_collective("staged")) as asynchronous:
        assert not asynchronous.has_thread
        with cupy.cuda.Stream(non_blocking=True):
            handle = asynchronous.all_reduce_async(cupy.ones(1000, np.float32), in_place=in_place)
        np.testing.assert_array_equal(handle.wait().get(), np.full(1000, asynchronous.communicator.size))


class Lent:
    """An array of another library on a GPU."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "staged", "cuda-aware"])
def test_another_librarys_array_has_its_result_when_the_wait_returns(
    cupy: Any, open_collective: Opener, transport: str
) -> None:
    with open_asynchronous(open_collective(transport)) as asynchronous, cupy.cuda.Stream(non_blocking=True):
        array = Lent(cupy.ones(1000, np.float32))
        assert asynchronous.all_reduce_async(array).wait() is array
        np.testing.assert_array_equal(array.array.get(), np.full(1000, asynchronous.communicator.size))


def test_staging_gives_mpi_no_memory_of_gpus(cupy: Any, open_collective: Opener) -> None:
    collective = open_collective("staged")
    with streams.memory.kept_closed():
        result: Any = collective.all_reduce(cupy.ones(1000, np.float32))
        gathered: Any = collective.all_gather(cupy.ones(7, np.float32))
        assert float(result.get().sum() + gathered.get().sum()) == 1007 * collective.communicator.size
