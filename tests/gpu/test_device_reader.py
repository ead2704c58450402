"""Batches on their way to a GPU: all arrive, few rooms are used, and what ends early leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data import Dataset
from mpidist.data.distribution.device import DeviceReader
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from mpidist.options import InputOptions
from tests.gpu.host_runtime import streams

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture
def last_gpu(cupy: Any) -> int:
    """The last GPU, made current: a new thread begins on the first one."""
    device = cupy.cuda.Device(cupy.cuda.runtime.getDeviceCount() - 1)
    device.use()
    return int(device.id)


def batches(count: int) -> Iterator[Any]:
    """Of growing and shrinking size, with arrays of several kinds."""
    for number in range(count):
        rows = (number * 7) % 11
        yield {
            "x": np.full((rows, 3), number, np.float32), "y": np.arange(rows) + number, "flag": np.bool_(number % 2),
            "T": np.asfortranarray(np.arange(12.0).reshape(3, 4) + number), ">": np.array([number], ">i4"),
            "name": np.array(["a", str(number)]), "none": None,
        }


def check(batch: Any, expected: Any, cupy: Any) -> None:
    for key in ("x", "y", "flag", "T", ">"):
        assert isinstance(batch[key], cupy.ndarray)
        assert batch[key].shape == expected[key].shape
        np.testing.assert_array_equal(batch[key].get(), expected[key])
    assert batch[">"].dtype == np.int32
    assert batch["name"].tolist() == expected["name"].tolist()
    assert batch["none"] is None


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_batch_arrives_and_stays_as_it_is(cupy: Any, depth: int) -> None:
    reader = DeviceReader(batches(40), depth, cupy)
    kept = []
    for number, batch in enumerate(reader):
        if number % 5 == 0:
            time.sleep(0.002)  # simulates work: copies are ready before their batch is taken
        # What the program computes at once, with what has arrived until then.
        kept.append((batch, batch["x"] + 1))
    assert len(kept) == 40
    for (batch, more), expected in zip(kept, batches(40), strict=True):
        check(batch, expected, cupy)
        np.testing.assert_array_equal(more.get(), expected["x"] + 1)
    reader.close()
    reader.close()


@pytest.mark.host_gpus
def test_the_next_batch_is_on_its_way_while_one_is_used(cupy: Any) -> None:
    reader = DeviceReader(iter([np.zeros(4), np.ones(4), np.full(4, 2.0)]), 3, cupy)
    wait_for_batches(reader, 3)
    first = reader.read()
    # Of this batch, for which nobody has waited yet, and of the next one.
    assert count_copies(stream_of(reader)) == 2
    np.testing.assert_array_equal(first.get(), np.zeros(4))
    assert count_copies(stream_of(reader)) == 1
    np.testing.assert_array_equal(reader.read().get(), np.ones(4))
    np.testing.assert_array_equal(reader.read().get(), np.full(4, 2.0))
    with pytest.raises(StopIteration):
        reader.read()


def test_rooms_are_few_and_belong_to_the_programs_gpu(
    cupy: Any, last_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus_of_rooms: list[int] = []
    allocate = cupy.cuda.alloc_pinned_memory

    def noting_allocate(byte_count: int) -> Any:
        # Pinned memory belongs to the GPU that is current in the thread that asks for it.
        gpus_of_rooms.append(cupy.cuda.Device().id)
        return allocate(byte_count)

    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", noting_allocate)
    for batch in DeviceReader((np.full(5, n) for n in range(100)), 2, cupy):
        assert batch.device.id == last_gpu
    # One is filled, two are ready, one is copied from.
    assert 1 <= len(gpus_of_rooms) <= 4
    assert set(gpus_of_rooms) == {last_gpu}


@pytest.mark.host_gpus
@pytest.mark.parametrize("closes", [True, False])
def test_what_nobody_took_is_waited_for_before_its_memory_is_given_up(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    # The thread has ended by then, and waits for no room.
    reader = DeviceReader(iter([np.zeros(1000), np.ones(1000)]), 2, cupy)
    wait_for_batches(reader, 2)
    reader.read()
    stream = stream_of(reader)
    assert count_copies(stream) == 2
    (sent,) = [weakref.ref(sent.batch) for sent in reader._ahead]
    was_there: list[bool] = []
    wait = reader._copier.wait

    def noting_wait(ticket: Any) -> None:
        was_there.append(sent() is not None)
        wait(ticket)

    monkeypatch.setattr(reader._copier, "wait", noting_wait)
    if closes:
        reader.close()
    del reader
    gc.collect()
    assert count_copies(stream) == 0
    assert was_there == [True]
    assert sent() is None


def test_a_forgotten_reader_ends_its_thread(cupy: Any) -> None:
    reader = DeviceReader((np.zeros(5) for _ in itertools.count()), 2, cupy)
    reader.read()
    del reader
    gc.collect()
    wait_until(lambda: not any(thread.name == "mpidist-prefetch" for thread in threading.enumerate()))


def test_an_error_comes_after_the_batches_before_it(cupy: Any) -> None:
    def fails() -> Iterator[Any]:
        yield np.zeros(2)
        raise OSError("the disk is gone")

    reader = DeviceReader(fails(), 2, cupy)
    np.testing.assert_array_equal(reader.read().get(), np.zeros(2))
    with pytest.raises(OSError, match="the disk is gone"):
        reader.read()


def test_arrays_that_lie_there_already_stay(cupy: Any) -> None:
    mine = cupy.asarray([1, 2])
    ((batch, other),) = DeviceReader(iter([(mine, np.zeros(1))]), 1, cupy)
    assert batch is mine
    assert isinstance(other, cupy.ndarray)


def test_a_distributed_dataset_delivers_arrays_of_the_device_and_resumes(cupy: Any) -> None:
    dataset = Dataset.from_tensor_slices((np.arange(20.0), np.arange(20))).shuffle(20, seed=3).batch(6)
    on_host = [[leaf.tolist() for leaf in batch] for batch in DistributedDataset(dataset, SoloCommunicator())]
    iterator = iter(DistributedDataset(dataset, SoloCommunicator(), namespace=cupy))
    seen = []
    for _ in range(2):
        x, y = next(iterator)
        assert isinstance(x, cupy.ndarray)
        seen.append([x.get().tolist(), y.get().tolist()])
    # What was only sent ahead does not count.
    state = iterator.state()
    resumed = iter(DistributedDataset(dataset, SoloCommunicator(), namespace=cupy))
    resumed.load_state(state)
    seen += [[x.get().tolist(), y.get().tolist()] for x, y in resumed]
    assert seen == on_host


@pytest.mark.parametrize(("fetches", "is_on_gpu"), [(None, True), (True, True), (False, False)])
def test_the_options_say_where_batches_lie(cupy: Any, fetches: bool | None, is_on_gpu: bool) -> None:
    options = InputOptions(experimental_fetch_to_device=fetches, experimental_per_replica_buffer_size=0)
    (batch,) = DistributedDataset(Dataset.range(4).batch(4), SoloCommunicator(), options=options, namespace=cupy)
    assert isinstance(batch, cupy.ndarray) == is_on_gpu


def stream_of(reader: DeviceReader) -> streams.Stream:
    """The simulated stream of a reader's copies."""
    copier: Any = reader._copier
    return streams.streams[copier._out.ptr]


def count_copies(stream: streams.Stream) -> int:
    """How many copies were given to the stream and have not run yet."""
    return sum("memcpy" in work.__qualname__ for work in stream.waiting)


def wait_for_batches(reader: DeviceReader, count: int) -> None:
    wait_until(lambda: reader._prefetcher is not None and len(reader._prefetcher._channel._ready) == count)


def wait_until(condition: Any) -> None:
    while not condition():
        time.sleep(0.001)
