"""Strategies and communicators are closed by their owner, or given back later by all ranks together."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group import resource
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CollectiveTimeoutError
from mpidist.options import CommunicationOptions
from tests.helpers import amounts
from tests.helpers.leftovers import held_node_memory
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_closed_strategy_refuses_and_its_values_can_be_read(communicator: Communicator, layout: str) -> None:
    with make_strategy(communicator, layout) as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.arange(5.0))
        optimizer = mpidist.optimizers.SGD(0.5)
        optimizer.apply_gradients([(np.ones(5), variable)])
        handle = strategy.extended.all_reduce_async("SUM", np.ones(3))
    assert strategy.is_closed
    np.testing.assert_array_equal(variable.numpy(), np.arange(5.0) - 0.5 * communicator.size)
    # What had begun was completed: no rank waits for another.
    np.testing.assert_array_equal(handle.wait(), np.full(3, communicator.size))
    calls: list[Any] = [
        strategy.scope().__enter__,
        lambda: strategy.run(lambda: 1),
        lambda: strategy.reduce("SUM", 1.0, axis=None),
        lambda: strategy.gather(np.ones(2), axis=0),
        lambda: strategy.extended.all_reduce_async("SUM", np.ones(3)),
        lambda: strategy.reduce("SUM", np.ones(100_000, np.float32), axis=None),
        lambda: strategy.replicas.collective_for(CommunicationOptions(bytes_per_pack=1 << 12)),
        lambda: strategy.arena.collective.all_gather(np.ones(2)),
        lambda: optimizer.apply_gradients([(np.ones(5), variable)]),
        lambda: variable.assign(np.zeros(5)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    strategy.close()


def leave_with_an_error(strategy: ArenaStrategy) -> None:
    with strategy:
        strategy.reduce("SUM", 1.0, axis=None)
        raise KeyError("of this rank alone")


def test_leaving_with_an_exception_is_local(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    if communicator.rank == 0:
        with pytest.raises(KeyError, match="of this rank alone"):
            leave_with_an_error(strategy)
        assert strategy.is_closed
    else:
        strategy.reduce("SUM", 1.0, axis=None)
    communicator.barrier()
    # The others close it when they like: nobody waits.
    strategy.close()


@pytest.mark.mpi(min_size=2)
def test_what_was_dropped_is_given_back_with_a_later_creation(communicator: Communicator) -> None:
    communicator.split(0).close()
    before = resource.held_count()
    kept = communicator.split(communicator.rank % 2)
    dropped = communicator.split(0)
    if communicator.rank == 0:
        del dropped
        gc.collect()
    communicator.split(0).close()
    # Only one rank has dropped it: it stays.
    assert resource.held_count() == before + 2
    if communicator.rank > 0:
        del dropped
        gc.collect()
    communicator.split(0).close()
    assert resource.held_count() == before + 1
    kept.barrier()
    kept.close()
    assert resource.held_count() == before


@pytest.mark.mpi(min_size=2)
def test_a_users_communicator_takes_ours_with_it(communicator: Communicator) -> None:
    def use() -> None:
        mine = communicator.mpi.Split(communicator.rank % 2, communicator.rank)
        options = CommunicationOptions(timeout_seconds=20)
        strategy = mpidist.MultiWorkerMirroredStrategy(communicator=mine, communication_options=options)
        assert strategy.reduce("SUM", 1, axis=None) == mine.size
        strategy.extended.all_reduce_async("SUM", np.ones(3)).wait()
        strategy.close()
        mine.Free()

    communicator.split(0).close()
    before = resource.held_count()
    for _ in range(3):
        use()
    gc.collect()
    communicator.split(0).close()
    assert resource.held_count() == before


class Owned:
    """Something that all ranks free together, while they can still communicate."""

    def __init__(self, mpi: Any, freed: list[Owned]) -> None:
        self.mpi, self.freed = mpi, freed

    def Free(self) -> None:
        if self.mpi is not None:
            self.mpi.Barrier()
        self.freed.append(self)


def test_a_communicator_frees_what_it_owns(communicator: Communicator) -> None:
    freed: list[Owned] = []
    other = communicator.split(0)
    owned = [Owned(other.mpi, freed) for _ in range(2)]
    for one in owned:
        other.own(one)
    assert freed == []
    other.close()
    other.close()
    assert freed == owned


def test_time_limits_take_no_communicator(communicator: Communicator) -> None:
    """Each call with another limit has a meeting point of its own, and all of them one channel."""
    strategy = make_strategy(communicator, "node")
    for seconds in range(amounts.amount(60, 2000)):
        limited = strategy.replicas.collective_for(CommunicationOptions(timeout_seconds=100 + seconds))
        assert limited.all_reduce(np.ones(1))[0] == communicator.size
    before = resource.held_count()
    strategy.replicas.collective_for(CommunicationOptions(timeout_seconds=50)).barrier()
    assert resource.held_count() == before
    strategy.close()


@pytest.mark.mpi(min_size=2)
def test_a_strategy_whose_ranks_no_longer_meet_is_closed_locally(communicator: Communicator) -> None:
    strategy = ArenaStrategy(communicator, options=CommunicationOptions(timeout_seconds=0.2))
    if communicator.rank > 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 0"):
            strategy.reduce("SUM", 1.0, axis=None)
        strategy.close()
    communicator.barrier()
    if communicator.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"did not arrive|too late"):
            strategy.reduce("SUM", 1.0, axis=None)
        strategy.close()


@pytest.mark.timeout_seconds(240)
def test_many_strategies_one_after_another(communicator: Communicator) -> None:
    memory = held_node_memory()
    for number in range(amounts.amount(150, 5000)):
        options = CommunicationOptions(timeout_seconds=60.0 + number) if number % 2 else None
        strategy = ArenaStrategy(communicator, options=options)
        assert strategy.reduce("SUM", 1, axis=None) == communicator.size
        if number % 5 == 0:
            strategy.extended.all_reduce_async("SUM", np.ones(3)).wait()
        if number % 3 == 0:
            strategy.close()
    del strategy
    gc.collect()
    assert held_node_memory() <= memory
