"""Pulling ahead: while a function computes, its worker pulls what the next one will read."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.options import WindowOptions
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

SIZE = 5000
# A read begins with a look at the version; what has not changed is not fetched.
_LOOK_BYTES = 16
_LIMIT_SECONDS = 60
# What happens in this process, in order: (bytes, name of the thread) of a Get, or the number of a function.
_events: list[Any] = []


class Recording:
    """Passes all calls on to a window, and takes note of each Get."""

    def __init__(self, window: Any) -> None:
        self._window = window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)

    def get(self, rank: int, offset: int, into: Any) -> None:
        """Local. See `Window.get`."""
        self._window.get(rank, offset, into)
        _events.append((into.nbytes, threading.current_thread().name))


def record(strategy: ParameterServerStrategy) -> None:
    """Let this rank's window be a recording one."""
    _events.clear()
    station: Any = strategy._station
    station.window = Recording(station.window)


def note(number: int) -> None:
    """Take note that a function runs in this process."""
    _events.append(number)


def pulls_since(number: int, byte_count: int) -> list[str]:
    """The threads that have got so many bytes since the function of this number was noted."""
    after = _events[_events.index(number):]
    return [one[1] for one in after if isinstance(one, tuple) and one[0] == byte_count]


def wait_for_pull(number: int, byte_count: int, count: int = 1) -> None:
    """Wait until so many Gets of this size have begun in the thread that pulls ahead."""
    while pulls_since(number, byte_count).count("mpidist-ahead") < count:
        time.sleep(0.001)


@pytest.mark.parametrize("way", ["RMA", "SOCKETS"])
def test_the_next_function_s_pull_comes_before_the_function_returns(communicator: Communicator, way: str) -> None:
    rounds = 6

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(SIZE))
            optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([weight])

        def work(number: int) -> tuple[float, float, list[str]]:
            note(number)
            value = weight.value()
            pulled = pulls_since(number, value.nbytes)
            if 0 < number < rounds - 1:
                # The version that the second one reads is not yet replaced when it is read for the third.
                wait_for_pull(number, value.nbytes if number > 1 else _LOOK_BYTES)
            optimizer.apply_gradients([(np.full(SIZE, -1.0), weight)])
            return float(value.min()), float(value.max()), pulled

        results = [coordinator.schedule(work, (number,), worker=0) for number in range(rounds)]
        coordinator.join()
        found = coordinator.fetch(results)
        # The first two had nobody to pull for them. The others find the value there, without the last step of theirs.
        assert [low for low, _, _ in found] == [0, 1, 1, 2, 3, 4]
        assert all(low == high for low, high, _ in found)
        assert [len(pulled) for _, _, pulled in found] == [1, 1, 0, 0, 0, 0]
        assert (weight.numpy() == rounds).all()

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22, window=WindowOptions(way=way)), prefetch=True,
             arrange=record)


@pytest.mark.parametrize("way", ["RMA", "SOCKETS"])
def test_a_function_sees_what_the_one_before_has_written_after_it_was_pulled(
    communicator: Communicator, way: str
) -> None:
    rounds = 5

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            chosen, summed, rows = (mpidist.Variable(np.zeros((SIZE, 1))) for _ in range(3))
            weight = mpidist.Variable(np.zeros(7))

        def work(number: int) -> list[float]:
            note(number)
            values = [one.value() for one in (chosen, summed, rows, weight)]
            if 0 < number < rounds - 1:
                wait_for_pull(number, _LOOK_BYTES, len(values))
            chosen.assign(values[0] + 1)
            summed.assign_add(np.ones((SIZE, 1)))
            rows.scatter_add(mpidist.IndexedSlices(np.ones((2, 1)), np.array([3, SIZE - 1]), (SIZE, 1)))
            # It sees its own writes, too.
            assert float(summed.value()[5, 0]) == number + 1
            return [float(values[0][9, 0]), float(values[1][9, 0]), float(values[2][3, 0]), float(values[2][9, 0])]

        results = [coordinator.schedule(work, (number,), worker=0) for number in range(rounds)]
        coordinator.join()
        assert coordinator.fetch(results) == [[number, number, number, 0] for number in range(rounds)]

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22, window=WindowOptions(way=way)), prefetch=True,
             arrange=record)


def test_all_shards_of_a_variable_are_of_one_moment(communicator: Communicator) -> None:
    rounds = 12

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros((SIZE, 2)))
            optimizer = mpidist.optimizers.SGD(1.0)
        assert len(weight.parts) == 3
        optimizer.build([weight])

        def work(number: int) -> tuple[float, float]:
            note(number)
            value = weight.value()
            if number % 2 and number < rounds - 1:
                # The first shard is there, and the others may be.
                wait_for_pull(number, _LOOK_BYTES)
            optimizer.apply_gradients([(np.full((SIZE, 2), -1.0), weight)])
            return float(value.min()), float(value.max())

        results = [coordinator.schedule(work, (number,), worker=0) for number in range(rounds)]
        coordinator.join()
        for number, (low, high) in enumerate(coordinator.fetch(results)):
            assert low == high
            assert number - 1 <= low <= number

    partitioner = mpidist.experimental.partitioners.FixedShardsPartitioner(3)
    on_chief(communicator, program, prefetch=True, partitioner=partitioner, arrange=record)


def test_a_wrong_guess_costs_time_only(communicator: Communicator) -> None:
    """A function that reads another variable each time, and one that fails after its reads."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            several = [mpidist.Variable(np.full(SIZE, float(number))) for number in range(4)]

        def work(number: int) -> float:
            value = several[number % 4].value()
            if number % 5 == 3:
                raise ValueError("as it is asked to")
            several[number % 4].assign_add(np.full(SIZE, 10.0))
            return float(value[-1])

        results = [coordinator.schedule(work, (number,), worker=0, on_error="keep") for number in range(20)]
        coordinator.join()
        done = dict.fromkeys(range(4), 0)
        for number, result in enumerate(results):
            if number % 5 == 3:
                with pytest.raises(ValueError, match="as it is asked to"):
                    result.fetch()
                continue
            assert result.fetch() == number % 4 + 10 * done[number % 4]
            done[number % 4] += 1

    on_chief(communicator, program, prefetch=True)


def test_where_two_threads_must_not_use_mpi_functions_are_only_sent_early(
    communicator: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(strategy: ParameterServerStrategy) -> None:
        """As after a start of MPI without THREAD_MULTIPLE."""
        station: Any = strategy._station
        station.window.is_for_threads = False

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(SIZE))

        def work() -> bool:
            weight.assign_add(np.ones(SIZE) + weight.value())
            return any(thread.name == "mpidist-ahead" for thread in threading.enumerate())

        results = [coordinator.schedule(work) for _ in range(4)]
        assert coordinator.fetch(results) == [False] * 4
        if communicator.size == 3:
            assert (weight.numpy() == 15).all()

    on_chief(communicator, program, prefetch=True, arrange=refuse)
    warned = [record for record in caplog.records if "are not prefetched" in record.getMessage()]
    is_worker = 0 < communicator.rank < communicator.size - 1
    assert len(warned) <= is_worker
    assert len(warned) == is_worker or communicator.size > 3


def test_without_prefetch_no_thread_pulls(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(SIZE))

        def work() -> list[str]:
            weight.assign_add(np.ones(SIZE) + weight.value())
            return [thread.name for thread in threading.enumerate()]

        results = [coordinator.schedule(work, worker=0) for _ in range(4)]
        assert not [name for names in coordinator.fetch(results) for name in names if name == "mpidist-ahead"]

    on_chief(communicator, program)
