"""Many new variables: servers hear of them in few messages, and each is there when somebody uses it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.chief import making
from mpidist.parameter_server.options import ServerOptions
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.making.partitioners import FixedShardsPartitioner
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

OPTIONS = ServerOptions(heap_bytes=1 << 25, slot_bytes=1 << 20)
MANY = 400


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what this rank asks others."""
    names: list[str] = []
    post = Station.post

    def noted(self: Station, rank: int, name: str, *arguments: Any) -> int:
        names.append(name)
        return post(self, rank, name, *arguments)

    monkeypatch.setattr(Station, "post", noted)
    return names


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.mpi(min_size=4))])
def test_many_small_ones_take_few_messages(communicator: Communicator, posted: list[str], servers: int) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variables = [mpidist.Variable(np.full(3, number, "float32")) for number in range(MANY)]
        assert posted.count("create") == 0

        def read() -> list[float]:
            return [float(variable.value()[2]) for variable in variables]

        assert coordinator.schedule(read).fetch() == [float(number) for number in range(MANY)]
        optimizer = mpidist.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
        optimizer.build(variables)
        # A message has some thousand of them at most.
        assert posted.count("create") == 2 * servers
        state: Any = optimizer.variables
        assert sum(np.all(one.numpy() == 0.5) for one in state if np.shape(one.numpy()) == (3,)) == MANY

    on_chief(communicator, program, OPTIONS, servers)


def test_small_and_large_ones_and_those_in_the_memory_of_dropped_ones(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, posted: list[str]
) -> None:
    # A message after each few, so that some are known and some are not when one is dropped; and little memory ahead.
    monkeypatch.setattr(making, "_MESSAGE_BYTES", 7 * making._ENTRY_BYTES)
    monkeypatch.setattr(making, "_PIECE_BYTES", 1 << 12)
    random = np.random.default_rng(3)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        kept: dict[int, tuple[Any, float]] = {}
        for number in range(300):
            size = int(random.choice([1, 5, 300, 20_000]))
            with strategy.scope():
                kept[number] = mpidist.Variable(np.full(size, float(number))), float(number)
            for _ in range(int(random.integers(3)) if len(kept) > 9 else 0):
                kept.pop(int(random.choice(list(kept))), None)
            if number % (50 if number > 50 else 6) == 5:
                chosen = int(random.choice(list(kept)))
                variable, value = kept[chosen]
                variable.assign_add(np.ones(variable.shape))
                kept[chosen] = variable, value + 1

                def read(variables: Any) -> list[set[float]]:
                    return [set(one.value().tolist()) for one in variables]

                seen = coordinator.schedule(read, ([one for one, _ in kept.values()],)).fetch()
                assert seen == [{value} for _, value in kept.values()]
                assert all((one.numpy() == value).all() for one, value in kept.values())

    on_chief(communicator, program, OPTIONS)
    assert posted.count("create") > 40 or communicator.rank


def test_an_interrupt_while_servers_make_them_loses_none(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Station.wait
    waits: list[int] = []

    def interrupted(self: Station, rank: int, name: str, number: int) -> Any:
        if name == "create":
            waits.append(number)
            if len(waits) == 1:
                raise KeyboardInterrupt
        return wait(self, rank, name, number)

    monkeypatch.setattr(Station, "wait", interrupted)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variables = [mpidist.Variable(float(number)) for number in range(20)]

        def read() -> list[float]:
            return [float(variable.value()) for variable in variables]

        with pytest.raises(KeyboardInterrupt):
            coordinator.schedule(read)
        assert coordinator.schedule(read).fetch() == [float(number) for number in range(20)]
        assert waits == waits[:1] * 2

    on_chief(communicator, program, OPTIONS)


@pytest.mark.parametrize("kind", ["RandomUniform", "RandomNormal", "Constant"])
@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize("is_table", [False, True])
def test_a_server_draws_the_values_of_one_process(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, kind: str, shards: int, is_table: bool
) -> None:
    """The chief holds none of them, and puts none of them into a heap."""
    make = getattr(mpidist.initializers, kind)
    shape = (30_000, 3)
    # On every rank, and before there is a strategy: one that has the variable in its own memory.
    right = mpidist.Variable(make(0.01), shape=shape, dtype="float32").numpy()

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        puts: list[int] = []
        station: Any = strategy._station
        put = station.window.put

        def noted(rank: int, offset: int, array: Any) -> None:
            puts.append(rank)
            put(rank, offset, array)

        monkeypatch.setattr(station.window, "put", noted)
        with strategy.scope():
            table = mpidist.Variable(make(0.01), shape=shape, dtype="float32", sparse_gradient=is_table)
        assert puts == []
        assert table.numpy().tobytes() == right.tobytes()

        def read() -> bytes:
            return np.concatenate([one.value() for one in table.parts]).tobytes()

        assert coordinator.schedule(read).fetch() == right.tobytes()

    on_chief(communicator, program, OPTIONS, partitioner=FixedShardsPartitioner(shards) if shards else None)


@pytest.mark.parametrize(("kind", "megabytes"), [("drawn", 1), ("of the dtype", 8), ("converted", 16), ("whole", 32)])
def test_the_chief_holds_no_more_than_a_function_gives_at_a_time(
    communicator: Communicator, kind: str, megabytes: int
) -> None:
    """A table of 32 MB in four shards, whose values go into heaps, and are converted, in pieces."""
    shape = (1 << 17, 64)
    functions: dict[str, Any] = {
        "drawn": mpidist.initializers.RandomUniform(),
        "of the dtype": lambda shard_info: np.full(shard_info.shape, shard_info.offset[0], "float32"),
        "converted": lambda shard_info: np.full(shard_info.shape, shard_info.offset[0], "float64"),
        "whole": lambda: np.full(shape, 0.0, "float32"),
    }

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del coordinator
        tracemalloc.start()
        try:
            with strategy.scope():
                table: Any = mpidist.Variable(functions[kind], shape=shape, dtype="float32", sparse_gradient=True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # And a piece that is on its way.
        assert peak < (megabytes << 20) + making._PIECE_BYTES + (1 << 20), peak
        if kind != "drawn":
            for shard in range(4):
                first = shard << 15
                rows = table.sparse_read([first, first + (1 << 15) - 1])
                assert (rows == (0 if kind == "whole" else first)).all()

    options = ServerOptions(heap_bytes=96 << 20, slot_bytes=1 << 20)
    on_chief(communicator, program, options, partitioner=FixedShardsPartitioner(4))


def test_what_cannot_be_made_is_refused_as_by_other_strategies(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del coordinator
        draw = mpidist.initializers.RandomUniform()
        with strategy.scope():
            with pytest.raises(ValueError, match=r"variable 'v': aggregation MEAN needs a floating dtype, got int32"):
                mpidist.Variable(draw, shape=(5, 2), dtype="int32", aggregation="mean", name="v")
            with pytest.raises(ValueError, match=r"variable 'v': sparse_gradient=True is for variables of at least"):
                mpidist.Variable(draw, shape=(), dtype="float32", sparse_gradient=True, name="v")
            for shape in ((), (0,), (0, 3), (3, 0), (4,)):
                made = mpidist.Variable(draw, shape=shape, dtype="float32").numpy()
                assert made.shape == shape
                assert made.dtype == np.float32

    on_chief(communicator, program, OPTIONS)
