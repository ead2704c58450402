"""`ParameterServerStrategy` and `ClusterCoordinator`: a chief, workers and servers in one job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.errors import CancelledError
from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.heap.layout import HeapFullError
from mpidist.parameter_server.options import ServerOptions
from mpidist.parameter_server.queue.closures import QUEUE_SIZE
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.making.partitioners import Partitioner
from tests.optimizers import SETTINGS

pytestmark = pytest.mark.mpi(min_size=3)

SMALL = ServerOptions(heap_bytes=1 << 22)


def on_chief(
    communicator: Communicator, program: Callable[[ParameterServerStrategy, ClusterCoordinator], object],
    options: ServerOptions = SMALL, servers: int = 1, *, prefetch: bool = False,
    queue_size: int = QUEUE_SIZE, partitioner: Partitioner | None = None,
    arrange: Callable[[ParameterServerStrategy], object] | None = None, synchronous: bool = False,
) -> None:
    """Run a program on the chief of a chief, workers and servers; its error comes on every rank."""
    resolver = mpidist.cluster_resolver.MPIClusterResolver(communicator, num_ps=servers)
    strategy = ParameterServerStrategy(
        resolver, partitioner, serve=False, options=options, synchronous=synchronous
    )

    def act() -> None:
        if arrange is not None:
            arrange(strategy)
        if strategy.chief is None:
            strategy.serve()
            return
        try:
            program(strategy, ClusterCoordinator(strategy, prefetch=prefetch, queue_size=queue_size))
        finally:
            strategy.end_service()

    together(communicator, "the program of the chief", act)
    strategy.close()


CLIPPED_BY_NORM: dict[str, Callable[[], Optimizer]] = {
    "Nesterov, clipped": lambda: SETTINGS["Nesterov"](clipnorm=0.5),
    "RMSprop, clipped": lambda: SETTINGS["RMSprop"](global_clipnorm=0.5),
}
WITH_OPTIONS: dict[str, Callable[[], Optimizer]] = {
    "momentum, scheduled": lambda: SETTINGS["momentum"](lambda step: 0.1 / (1 + step)),
    "Adam, decayed": lambda: SETTINGS["Adam"](weight_decay=0.01),
    "AMSGrad, clipped": lambda: SETTINGS["AMSGrad"](clipvalue=0.3),
}
AVERAGED: dict[str, Callable[[], Optimizer]] = {
    "averaged": lambda: SETTINGS["SGD"](use_ema=True, ema_momentum=0.5),
}
MAKERS: dict[str, Callable[[], Optimizer]] = {**SETTINGS, **WITH_OPTIONS, **CLIPPED_BY_NORM, **AVERAGED}


def test_the_chief_uses_its_window_in_one_thread_at_a_time(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path
) -> None:
    """A thread of the coordinator's takes messages while the program does something else."""
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        chief = strategy.chief
        assert chief is not None
        lock: Any = chief.lock._lock  # of the standard library

        def checked(call: Callable[..., Any]) -> Callable[..., Any]:
            def checked_call(*arguments: Any) -> Any:
                assert lock._is_owned(), f"{call.__name__} without the lock"
                return call(*arguments)

            return checked_call

        for name in ("ring", "poll", "put", "get", "flush", "close"):
            monkeypatch.setattr(chief.station.window, name, checked(getattr(chief.station.window, name)))
        with strategy.scope():
            weight, mean = mpidist.Variable(np.zeros(3)), mpidist.metrics.Mean()
            optimizer = mpidist.optimizers.SGD(0.5)
        optimizer.build([weight])
        weight.assign(np.ones(3))
        numbers = iter(coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(8)))
        values = coordinator.create_per_worker_value(lambda: 3)
        coordinator.schedule(lambda given, more: mean.update_state(next(given) + more), (numbers, values))
        result = coordinator.schedule(lambda: optimizer.apply_gradients([(np.ones(3), weight)]))
        coordinator.join()
        coordinator.fetch(result)
        assert coordinator.done()
        assert weight.numpy().tolist() == [0.5] * 3
        checkpoint = mpidist.Checkpoint(weight=weight, optimizer=optimizer)
        checkpoint.restore(checkpoint.save(mpi_tmp_path / "c"))
        del values
        strategy.end_service()

    on_chief(communicator, program)


def test_a_function_reads_what_was_written_before_it_was_scheduled(communicator: Communicator) -> None:
    # So large that a server takes longer for the write than a worker for its beginning.
    size, rounds = 1_000_000, 20

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(size, "float32"))
        values = np.empty(size, np.float32)
        for number in range(1, rounds + 1):
            values.fill(number)
            variable.assign(values)
            got = coordinator.schedule(lambda: (float(variable.value()[0]), float(variable.value()[-1])))
            assert got.fetch() == (number, number)

    # Two slots for each rank but the server's, and two copies of the variable.
    on_chief(communicator, program, ServerOptions(heap_bytes=communicator.size << 24, slot_bytes=1 << 23))


@pytest.mark.parametrize("name", MAKERS)
def test_updates_have_the_bits_of_one_process(communicator: Communicator, name: str) -> None:
    make = MAKERS[name]
    starts = [np.linspace(-1, 1, 70_000, dtype="float32"), np.ones(3, "float32")]

    def gradients(step: int) -> list[Any]:
        return [np.cos(np.arange(start.size, dtype="float32") + step) for start in starts]

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variables = [mpidist.Variable(start) for start in starts]
            optimizer = make()
            optimizer.build(variables)

        def step(number: int) -> None:
            optimizer.apply_gradients(zip(gradients(number), variables, strict=True))

        alone = [mpidist.Variable(start) for start in starts]
        expected = make()
        for number in range(5):
            coordinator.schedule(step, (number,))
            coordinator.join()
            expected.apply_gradients(zip(gradients(number), alone, strict=True))
        assert optimizer.iterations == 5
        pairs = [*zip(variables, alone, strict=True), *zip(optimizer.variables, expected.variables, strict=True)]
        for one, other in pairs:
            assert one.numpy().tobytes() == other.numpy().tobytes(), one.name

    # More ranks share the half that is of slots.
    on_chief(communicator, program, ServerOptions(heap_bytes=communicator.size << 21))


def test_functions_change_variables_and_metrics_of_the_servers(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = mpidist.Variable(0, dtype="int64")
            wide = mpidist.Variable(np.zeros((3, 5)))
            mean = mpidist.metrics.Mean()
        assert count.device == "/job:ps/replica:0/task:0/device:CPU:0"

        def work(number: int, *, factor: float) -> float:
            assert mpidist.get_strategy() is strategy

            def replica() -> float:
                before = int(count)
                count.assign_add(1)
                # A closure reads what it has written.
                assert int(count) == before + 1
                wide.assign_add(np.full((3, 5), float(number)))
                mean.update_state(float(number))
                return number * factor

            return strategy.run(replica)

        values = [coordinator.schedule(work, (number,), {"factor": 0.5}) for number in range(40)]
        coordinator.join()
        assert coordinator.done()
        assert coordinator.fetch({"all": values}) == {"all": [number / 2 for number in range(40)]}
        assert int(count) == 40
        assert (wide.numpy() == sum(range(40))).all()
        assert mean.result() == sum(range(40)) / 40
        count.assign(7)
        assert int(count) == 7
        # Without a `join` between.
        assert coordinator.schedule(lambda: int(count)).fetch() == 7
        first = coordinator.schedule(lambda: 20)
        assert coordinator.schedule(lambda x: x + 1, (first,)).get() == 21

    on_chief(communicator, program)


def test_a_value_that_is_not_there_yet_is_an_argument(communicator: Communicator, mpi_tmp_path: Path) -> None:
    gate = mpi_tmp_path / "gate"

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = mpidist.Variable(0, dtype="int64")

        def wait(number: int) -> tuple[int, Any]:
            while not gate.exists():
                time.sleep(0.01)
            count.assign_add(number)
            return number, count

        def add(first: tuple[int, Any], *others: Any, **named: Any) -> tuple[int, Any]:
            one, variable = first
            numbers = [pair[0] for pair in (*others, *named.get("more", ()))]
            # Who has a value sees the update of its function.
            assert int(variable) >= min(one + sum(numbers), 3)
            return one + sum(numbers), variable

        first, second = (coordinator.schedule(wait, (number,)) for number in (1, 2))
        third = coordinator.schedule(add, (first, second))
        last = coordinator.schedule(add, (third,), {"more": [third, second]})
        # All of this came before the first function has ended.
        assert not coordinator.done()
        gate.touch()
        assert [number for number, _ in coordinator.fetch([first, third, last])] == [1, 3, 8]
        assert coordinator.schedule(add, (last,)).fetch()[0] == 8

        gate.unlink()

        def fail() -> int:
            while not gate.exists():
                time.sleep(0.01)
            raise LookupError("of the input")

        failed = coordinator.schedule(fail, on_error="keep")
        without = coordinator.schedule(add, (failed,), on_error="keep")
        other = coordinator.schedule(lambda: 3, on_error="keep")
        gate.touch()
        coordinator.join()
        assert other.fetch() == 3
        with pytest.raises(LookupError, match="of the input"):
            without.fetch()
        with pytest.raises(LookupError, match="of the input"):
            coordinator.schedule(add, (failed,))
        # A worker's value is made with the value itself.
        made = coordinator.create_per_worker_value(lambda value: value + 1, (coordinator.schedule(lambda: 41),))
        assert coordinator.schedule(lambda value: value, (made,)).fetch() == 42

    on_chief(communicator, program)


def test_a_closure_reads_what_it_has_added_before_it_first_reads(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = mpidist.Variable(np.arange(3.0))

        def work() -> list[float]:
            count.assign_add(np.ones(3))
            count.assign_sub(np.full(3, 3.0))
            first = count.value().tolist()
            count.assign_add(np.ones(3))
            second = count.value().tolist()
            count.assign(np.zeros(3))
            return [*first, *second, *count.value().tolist()]

        assert coordinator.schedule(work).fetch() == [-2, -1, 0, -1, 0, 1, 0, 0, 0]
        assert count.numpy().tolist() == [0, 0, 0]

    on_chief(communicator, program)


def test_a_worker_that_has_its_next_functions_sees_what_it_did_before(communicator: Communicator) -> None:
    """Each function needs the value that the one before it has given; none waits for the coordinator."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            first, second = mpidist.Variable(0, dtype="int64"), mpidist.Variable(np.zeros(50_000))

        def work(number: int) -> None:
            first.assign(int(first) * 2 + 1)
            assert (second.value() == number).all()
            second.assign_add(np.ones(50_000))

        for number in range(40):
            coordinator.schedule(work, (number,), worker=0)
        coordinator.join()
        assert int(first) == 2**40 - 1
        assert (second.numpy() == 40).all()

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 24, slot_bytes=1 << 20), prefetch=True)


def test_reads_are_whole_and_come_to_an_end_while_others_write_all_the_time(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(1_000_000))

        def read() -> float:
            value = weight.value()
            assert (value == value[0]).all()
            return float(value[0])

        values = [coordinator.schedule(read, worker=0) for _ in range(20)]
        number = 0
        while not all(value.is_done for value in values):
            number += 1
            weight.assign(np.full(1_000_000, float(number)))
        seen = coordinator.fetch(values)
        assert seen == sorted(seen)
        assert seen[-1] <= number

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 27, slot_bytes=1 << 23))


@pytest.mark.parametrize("consistency", ["whole", "relaxed"])
def test_what_a_function_keeps_of_a_variable_stays_as_it_was(communicator: Communicator, consistency: Any) -> None:
    """The memory of a value is used again for the next one, but not while the program holds it."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(5000))
        kept_here = coordinator.create_per_worker_value(dict)

        def work(kept: dict[int, Any], number: int, keeps: bool) -> tuple[list[float], int]:
            value = weight.value()
            assert (value == number).all()
            if keeps:
                kept[number] = value[7:9]
            return [float(one[0]) for one in kept.values()], value.ctypes.data

        places = []
        for number in range(8):
            for _ in range(2):
                seen, place = coordinator.schedule(work, (kept_here, number, number < 4), worker=0).fetch()
                assert seen == list(range(min(number + 1, 4)))
                places.append(place)
            weight.assign_add(np.ones(5000))
            assert weight.numpy()[0] == number + 1
        # Four values are held. The others share one place.
        assert len(set(places[10:])) == 1

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22, consistency=consistency))


def test_an_error_cancels_what_waits_and_comes_once(communicator: Communicator, mpi_tmp_path: Path) -> None:
    gate = mpi_tmp_path / "gate"

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = mpidist.Variable(0, dtype="int64")

        def fail() -> None:
            # Else the error may come before all are scheduled.
            while not gate.exists():
                time.sleep(0.001)
            count.assign_add(100)
            raise LookupError("of the function")

        failed = coordinator.schedule(fail, worker=0)
        behind = [coordinator.schedule(lambda: count.assign_add(1), worker=0) for _ in range(50)]
        gate.touch()
        with pytest.raises(LookupError, match="of the function"):
            coordinator.join()
        coordinator.join()
        with pytest.raises(LookupError, match="of the function"):
            failed.fetch()
        with pytest.raises(CancelledError, match="Please reschedule"):
            behind[-1].fetch()
        assert int(count) < 50, "what a failed function has pushed is dropped"
        kept = coordinator.schedule(fail, on_error="keep")
        coordinator.join()
        with pytest.raises(LookupError, match="of the function"):
            kept.fetch()

    on_chief(communicator, program)


def test_values_and_data_sets_of_workers(communicator: Communicator) -> None:
    workers = communicator.size - 2

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        process = coordinator.create_per_worker_value(os.getpid)
        seen = {coordinator.schedule(lambda here: here, (process,), worker=index).fetch() for index in range(workers)}
        assert len(seen) == workers
        assert os.getpid() not in seen
        dataset = coordinator.create_per_worker_dataset(
            lambda place: mpidist.data.Dataset.range(30).shard(place.num_input_pipelines, place.input_pipeline_id)
        )
        for _ in range(2):
            iterator = iter(dataset)
            got = [
                int(coordinator.schedule(next, (iterator,), worker=index).fetch())
                for _ in range(3) for index in range(workers)
            ]
            assert got == list(range(3 * workers))
        with pytest.raises(NotImplementedError, match="on the worker only"):
            next(iterator)
        with pytest.raises(ValueError, match="Unexpected dataset type"):
            coordinator.create_per_worker_dataset(3)  # type: ignore[arg-type]

    on_chief(communicator, program)


def test_a_checkpoint_goes_from_servers_to_one_process_and_back(communicator: Communicator, tmp_path: Path) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.ones(9), name="weight")
            optimizer = mpidist.optimizers.Adam(0.1)
        optimizer.build([weight])
        step = lambda: optimizer.apply_gradients([(np.ones(9), weight)])  # noqa: E731
        for _ in range(3):
            coordinator.schedule(step)
        coordinator.join()
        path = mpidist.Checkpoint(weight=weight, optimizer=optimizer).save(str(tmp_path / "ck"))
        alone, other = mpidist.Variable(np.zeros(9), name="weight"), mpidist.optimizers.Adam(0.1)
        other.build([alone])
        mpidist.Checkpoint(weight=alone, optimizer=other).restore(path).assert_consumed()
        assert alone.numpy().tobytes() == weight.numpy().tobytes()
        other.apply_gradients([(np.ones(9), alone)])
        weight.assign(np.zeros(9))
        optimizer.iterations = 0
        mpidist.Checkpoint(weight=weight, optimizer=optimizer).restore(path)
        coordinator.schedule(step)
        coordinator.join()
        assert (optimizer.iterations, other.iterations) == (4, 4)
        assert alone.numpy().tobytes() == weight.numpy().tobytes()

    on_chief(communicator, program)


def test_what_cannot_be_done_is_told(communicator: Communicator) -> None:
    mirrored = mpidist.Variable(1.0, name="mine")

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.ones(5), name="weight")
            optimizer = mpidist.optimizers.SGD(0.1)
            with pytest.raises(HeapFullError, match=r"variable 'large' of shape \(1000000,\) .* a larger heap_bytes"):
                mpidist.Variable(np.ones(1_000_000), name="large")
        with pytest.raises(TypeError, match=r"captures 'mirrored', .*variable 'mine' is not on a parameter server"):
            coordinator.schedule(lambda: float(mirrored))
        other = mpidist.optimizers.SGD(0.1)
        other.build([mirrored])
        with pytest.raises(TypeError, match="optimizer 'SGD' is not on parameter servers: use one for"):
            coordinator.schedule(lambda: other.apply_gradients([(np.ones(5), weight)]))
        optimizer.build([weight])
        with pytest.raises(RuntimeError, match="call the optimizer inside a function"):
            optimizer.apply_gradients([(np.ones(5), weight)])
        with pytest.raises(RuntimeError, match=r"strategy.run outside a scheduled function"):
            strategy.run(lambda: None)

        def read_late() -> Any:
            optimizer.apply_gradients([(np.ones(5), weight)])
            return weight.numpy()

        with pytest.raises(RuntimeError, match="reads it afterwards"):
            coordinator.schedule(read_late).fetch()
        # It was raised.
        coordinator.join()
        with pytest.raises(ValueError, match="a variable cannot be made inside a function"):
            coordinator.schedule(lambda: mpidist.Variable(1.0), on_error="keep").fetch()
        large = mpidist.data.Dataset.range(3)
        with pytest.raises(TypeError, match="`fn` must be a function, got 3"):
            coordinator.schedule(3)  # type: ignore[arg-type]
        assert coordinator.schedule(lambda: len(list(large))).fetch() == 3
        assert ClusterCoordinator(strategy) is coordinator
        assert weight.numpy().tolist() == [1.0] * 5

    on_chief(communicator, program)


def test_another_strategy_has_no_workers() -> None:
    with pytest.raises(ValueError, match="must be a ParameterServerStrategy"):
        ClusterCoordinator(mpidist.get_strategy())  # type: ignore[arg-type]


def test_strategies_leave_nothing_behind(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = mpidist.Variable(0)
        coordinator.schedule(lambda: count.assign_add(1)).get()

    for _ in range(5):
        on_chief(communicator, program)
