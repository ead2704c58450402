"""Data sets of the program that functions take or capture: each travels once to a worker."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.protocol.messages import Do, Send
from mpidist.parameter_server.protocol.wire import encode
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

# So many bytes has a data set that is to travel once.
LARGE = 1 << 20


def total(dataset: mpidist.data.Dataset) -> int:
    return int(sum(part.sum() for part in dataset))


def test_a_data_set_travels_once(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        assert strategy.chief is not None
        station, sent = strategy.chief.station, []
        send_on = station.send

        def send(one: Send) -> None:
            sent.append(one.message)
            send_on(one)

        monkeypatch.setattr(station, "send", send)
        with strategy.scope():
            factor = mpidist.Variable(1, dtype="int64")
        array = np.arange(LARGE // 8)
        # It names a variable itself.
        dataset = mpidist.data.Dataset.from_tensor_slices(array).batch(1 << 15).map(lambda part: part * int(factor))
        alone = mpidist.data.Dataset.from_tensor_slices(array).batch(1 << 15)

        def bytes_of(*calls: Any) -> list[int]:
            """The bytes of all messages of each call, without those of its plain arguments."""
            counts = []
            for function, args in calls:
                sent.clear()
                assert coordinator.schedule(function, args, worker=0).fetch() == array.sum()
                counts.append(sum(len(encode(message)) for message in sent))
                assert sum(isinstance(message, Do) for message in sent) == 1
            return counts

        # As an argument, in a nest, captured by a function and by another one, and as the data set of each worker.
        first, *later = bytes_of(
            (total, (dataset,)), (total, (dataset,)), (total, (dataset,)), (lambda: total(dataset), ()),
            (lambda nest: total(nest["a"]), ({"a": dataset},)), (lambda nest: total(nest["a"]), ({"a": dataset},)),
        )
        assert first > LARGE
        assert later[0] <= 256
        assert later[1] <= 256
        # The functions travel, too; those of the first lines are `total` and this module's.
        assert max(later) < 4096
        first, *later = bytes_of((total, (alone,)), (total, (alone,)))
        assert first > LARGE
        assert later[0] <= 256
        sent.clear()
        numbers = coordinator.create_per_worker_dataset(alone)
        assert coordinator.schedule(total, (numbers,), worker=0).fetch() == array.sum()
        others = communicator.size - 3
        assert sum(len(encode(message)) for message in sent) < (others + 0.5) * (LARGE + 4096)

    on_chief(communicator, program)


def test_each_function_begins_with_the_first_pass(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        dataset = mpidist.data.Dataset.range(50).shuffle(50, seed=3)
        expected = [[int(one) for one in dataset] for _ in range(2)]
        assert expected[0] != expected[1]

        def read(given: mpidist.data.Dataset) -> list[list[int]]:
            return [[int(one) for one in given] for _ in range(2)]

        for _ in range(3):
            assert coordinator.schedule(read, (dataset,), worker=0).fetch() == expected

    on_chief(communicator, program)


def test_a_data_set_that_the_program_drops_leaves_the_workers(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy

        def count() -> int:
            home: Any = mpidist.get_strategy().home
            return sum(kind == "dataset" for kind, _ in (*home._named, *home._codes))

        dataset = mpidist.data.Dataset.range(5)
        assert coordinator.schedule(total, (dataset,), worker=0).fetch() == 10
        assert coordinator.schedule(count, worker=0).fetch() == 1
        del dataset
        gc.collect()
        assert coordinator.schedule(count, worker=0).fetch() == 0

    on_chief(communicator, program)


def test_a_data_set_that_cannot_travel_says_the_way_out(communicator: Communicator, mpi_tmp_path: Path) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        path = str(mpi_tmp_path / "numbers.h5")
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(6)
            lazy = mpidist.data.Dataset.from_tensor_slices(file["x"])
            way = r".* of type Dataset, which cannot be sent to a worker: h5py .*`create_per_worker_dataset\(function"
            with pytest.raises(TypeError, match="'total' is given argument 0, " + way):
                coordinator.schedule(total, (lazy,))
            with pytest.raises(TypeError, match="captures 'lazy', " + way):
                coordinator.schedule(lambda: total(lazy))
            with pytest.raises(TypeError, match=way):
                coordinator.create_per_worker_dataset(lazy)

        def make() -> mpidist.data.Dataset:
            return mpidist.data.Dataset.from_tensor_slices(h5py.File(path, "r")["x"])

        dataset = coordinator.create_per_worker_dataset(make)
        assert coordinator.schedule(total, (dataset,)).fetch() == 15

    on_chief(communicator, program)
