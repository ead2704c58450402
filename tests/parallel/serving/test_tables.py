"""Sharded variables and tables on one to three servers: where they lie, and what many ranks do to them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.experimental import partitioners
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.kinds.sharded import ShardedVariable
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)


def test_shards_lie_on_distinct_servers_while_there_are_enough(communicator: Communicator) -> None:
    ps = communicator.size - 2

    def program(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        with strategy.scope():
            # A server that has much already gets a shard all the same.
            mpidist.Variable(np.zeros((1, 50_000)))
            made: Any = [mpidist.Variable(np.zeros((4, 10)), sparse_gradient=is_table) for is_table in (True, False)]
        for one in made:
            assert isinstance(one, ShardedVariable)
            shards = [part.device for part in one.variables]
            counts = [shards.count(device) for device in set(shards)]
            assert (len(counts), max(counts) - min(counts)) == (min(4, ps), int(4 % ps != 0))

    on_chief(communicator, program, servers=ps, partitioner=partitioners.FixedShardsPartitioner(4))


def test_functions_train_a_table_over_servers(communicator: Communicator, mpi_tmp_path: Path) -> None:
    start = np.random.default_rng(1).normal(size=(50, 6))
    batches = [np.random.default_rng(seed).integers(0, 50, (4, 3)) for seed in range(12)]
    expected: list[Any] = []
    saved: list[str] = []

    def alone() -> list[Any]:
        table, optimizer = mpidist.Variable(start, sparse_gradient=True), mpidist.optimizers.Adagrad(0.1)
        for ids in batches:
            gradient = mpidist.embedding_gradient(table, ids, np.cos(mpidist.embedding_lookup(table, ids)))
            optimizer.apply_gradients([(gradient, table)])
        return [table.numpy(), *(one.numpy() for one in optimizer.variables)]

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            table = mpidist.Variable(start, sparse_gradient=True, name="table")
            looked_up = mpidist.metrics.Sum()
        optimizer = mpidist.optimizers.Adagrad(0.1)
        optimizer.build([table])

        def step(ids: Any) -> Any:
            found = mpidist.embedding_lookup(table, ids)
            optimizer.apply_gradients([(mpidist.embedding_gradient(table, ids, np.cos(found)), table)])
            looked_up.update_state(ids.size)
            return found.shape

        # One after another, so that one process does the same.
        assert {coordinator.schedule(step, (ids,)).fetch() for ids in batches} == {(4, 3, 6)}
        assert float(looked_up.result()) == 12 * len(batches)
        expected.extend(alone())
        for mine, other in zip((table, *optimizer.variables), expected, strict=True):
            assert np.array_equal(mine.numpy(), other)
        saved.append(mpidist.Checkpoint(table=table, optimizer=optimizer).save(mpi_tmp_path / "c"))

    def restored(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        """On one server, in other shards, read in functions."""
        with strategy.scope():
            table = mpidist.Variable(np.zeros((50, 6)), sparse_gradient=True, name="other")
        optimizer = mpidist.optimizers.Adagrad(0.1)
        optimizer.build([table])
        mpidist.Checkpoint(table=table, optimizer=optimizer).restore(saved[0])
        found = coordinator.schedule(lambda: table.sparse_read(range(50))).fetch()
        assert np.array_equal(found, expected[0])
        for mine, other in zip(optimizer.variables, expected[1:], strict=True):
            assert np.array_equal(mine.numpy(), other)
        assert optimizer.iterations == len(batches)

    for run, servers, shards in ((program, communicator.size - 2, 3), (restored, 1, 7)):
        on_chief(communicator, run, servers=servers, partitioner=partitioners.FixedShardsPartitioner(shards))


def test_a_row_is_read_whole_while_others_change_it(communicator: Communicator) -> None:
    # So wide that a read takes as long as a change.
    width, rounds = 30_000, 60

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            table = mpidist.Variable(np.zeros((6, width)), sparse_gradient=True)

        def add(rows: Any) -> bool:
            found = table.sparse_read([0, 5, 3])
            table.scatter_add(mpidist.IndexedSlices(np.ones((len(rows), width)), np.array(rows)))
            return bool((found == found[:, :1]).all())

        values = [coordinator.schedule(add, ((0, 3) if number % 2 else (5,),)) for number in range(rounds)]
        seen = set()
        while not coordinator.done():
            found = table.sparse_read([5, 0])
            assert (found == found[:, :1]).all()
            seen.add(found[0, 0])
            whole = table.value()
            assert (whole == whole[:, :1]).all()
            assert whole[0, 0] == whole[3, 0], "both change in one step"
        assert len(seen) > 1, "it was read while it changed"
        assert all(coordinator.fetch(values))
        assert table.numpy()[:, -1].tolist() == [rounds / 2, 0, 0, rounds / 2, 0, rounds / 2]

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 25))


def test_a_worker_reads_rows_that_it_has_changed_before(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            table = mpidist.Variable(np.zeros((9, 2)), sparse_gradient=True)
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([table])

        def step(number: int) -> float:
            found = table.sparse_read([8, 0])
            gradient = mpidist.IndexedSlices(-np.ones((3, 2)), np.array([8, 0, 8]))
            optimizer.apply_gradients([(gradient, table)])
            return float(found[0, 0] - 2 * number)

        values = [coordinator.schedule(step, (number,), worker=0) for number in range(30)]
        assert set(coordinator.fetch(values)) == {0.0}
        coordinator.join()
        table.scatter_update(mpidist.IndexedSlices(np.ones((1, 2)), np.array([0])))
        table.scatter_mul(mpidist.IndexedSlices(np.full((2, 2), 3.0), np.array([0, 8])))
        assert table[0].tolist() == [3, 3], "the chief reads what it has written"
        assert coordinator.schedule(lambda: float(table[8, 1])).fetch() == 180

    on_chief(
        communicator, program, servers=communicator.size - 2, prefetch=True,
        partitioner=partitioners.MaxSizePartitioner(48),
    )


def test_shards_and_wholes_travel_as_names(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            whole: Any = mpidist.Variable(np.arange(6.0), name="whole")
        first, second = whole.variables
        assert coordinator.schedule(lambda: whole).fetch() is whole
        assert coordinator.schedule(lambda given: (given, second), (first,)).fetch() == (first, second)
        names = coordinator.schedule(lambda: (second.whole.name, second.whole is whole, float(whole[4]))).fetch()
        assert names == ("whole", True, 4.0)

    on_chief(
        communicator, program, servers=communicator.size - 2, partitioner=partitioners.FixedShardsPartitioner(2)
    )


def test_a_checkpoint_holds_one_moment_of_a_table_that_changes(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    rows, rounds, touched = 40_000, 300, [0, 20_001, 39_999]

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            table = mpidist.Variable(np.zeros((rows, 16)), sparse_gradient=True)
        optimizer = mpidist.optimizers.SGD(1.0, momentum=1.0)
        optimizer.build([table])

        def step() -> None:
            optimizer.apply_gradients([(mpidist.IndexedSlices(-np.ones((3, 16)), np.array(touched)), table)])

        checkpoint = mpidist.Checkpoint(table=table, optimizer=optimizer)
        for _ in range(rounds):
            coordinator.schedule(step)
        path = checkpoint.save(mpi_tmp_path / "c")
        coordinator.join()
        others = np.setdiff1d(np.arange(rows), touched)

        def steps_of() -> int:
            (momentum,) = optimizer.variables
            count = -int(momentum[0, 0])
            assert count == optimizer.iterations
            assert (momentum.sparse_read(touched) == -count).all()
            assert (table.sparse_read(touched) == count * (count + 1) // 2).all()
            assert not table.value()[others].any()
            return count

        assert steps_of() == rounds
        checkpoint.restore(path)
        assert steps_of() <= rounds

    # Room for the copies of the blocks with these rows, of the table and its state, and not for all blocks.
    options = ServerOptions(heap_bytes=1 << 25, copy_bytes=7 << 20)
    on_chief(
        communicator, program, options, communicator.size - 2, partitioner=partitioners.FixedShardsPartitioner(2)
    )
