"""A batch that one rank takes alone: an error at the next call of all, where the dataset is that of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.options import CommunicationOptions, InputOptions
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi(min_size=2)

NAMED = r"after batch 2 of pass 1 of distributed dataset number \d+.*next\(iterator\)"


@pytest.fixture(params=["node", "each"])
def strategy(communicator: Communicator, request: pytest.FixtureRequest) -> ArenaStrategy:
    # In memory all ranks of the node hear of it: a rank that waits in MPI already would not.
    options = CommunicationOptions(implementation="NODE" if request.param == "node" else "AUTO")
    strategy = ArenaStrategy(lay_out(communicator, request.param), options=options)
    for _ in range(20):
        strategy.reduce("SUM", np.ones(3), axis=None)
    return strategy


def iterator(strategy: ArenaStrategy, depth: int = 0) -> Any:
    """Batches of eight numbers without an end, read ahead or not."""
    dataset = mpidist.data.Dataset.range(1000).batch(8).repeat()
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    return iter(strategy.experimental_distribute_dataset(dataset, options))


def compare(strategy: ArenaStrategy) -> None:
    """Calls that communicate; between nodes one of them is compared, and the answer is read 32 calls later."""
    for _ in range(1 if len(strategy.communicator.node_sizes) == 1 else 3 * USUAL.every):
        strategy.reduce("SUM", np.ones(3), axis=None)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_rank_that_looks_at_a_batch_alone(strategy: ArenaStrategy, depth: int) -> None:
    batches = iterator(strategy, depth)
    next(batches)
    compare(strategy)
    if strategy.communicator.rank == 0:
        next(batches)
    with pytest.raises(MismatchError, match=NAMED):
        compare(strategy)
    # The ranks agree again, until they take batches.
    compare(strategy)
    next(batches)
    with pytest.raises(MismatchError, match="of distributed dataset number"):
        compare(strategy)


def test_a_rank_that_begins_a_pass_alone(strategy: ArenaStrategy) -> None:
    """Its next pass would be another one than that of the others, in another order."""
    dataset = strategy.experimental_distribute_dataset(mpidist.data.Dataset.range(100).batch(4))
    if strategy.communicator.rank == 0:
        next(iter(dataset))
    with pytest.raises(MismatchError, match=r"after batch 1 of pass 1 of distributed dataset number \d+"):
        compare(strategy)


def test_a_rank_that_looks_at_a_pass_of_its_own_first(strategy: ArenaStrategy) -> None:
    """The last batch of all ranks is the same then, and what one of them has taken before it is told all the same."""
    dataset = strategy.experimental_distribute_dataset(mpidist.data.Dataset.range(100).batch(4))
    batches = iter(dataset)
    if strategy.communicator.rank == 0:
        next(iter(dataset))
    next(batches)
    told = r"of pass 1 of distributed dataset number \d+ on ranks 0, 1.*, or in the batches taken before it.*next\(iter"
    with pytest.raises(MismatchError, match=told):
        compare(strategy)


@pytest.mark.parametrize("take", [
    lambda batches: [next(batches), next(batches)], lambda batches: batches.get_next(),
    lambda batches: batches.get_next_as_optional(), lambda batches: batches.load_state(batches.state()),
])
def test_ranks_that_take_alike_go_on(strategy: ArenaStrategy, take: Callable[[Any], object]) -> None:
    batches = iterator(strategy)
    for _ in range(3):
        next(batches)
        take(batches)
        compare(strategy)


def test_two_iterators_in_another_order(strategy: ArenaStrategy) -> None:
    first, second = iterator(strategy), iterator(strategy)
    for batches in (first, second) if strategy.communicator.rank else (second, first):
        next(batches)
    with pytest.raises(MismatchError, match="of distributed dataset number"):
        compare(strategy)


def test_datasets_of_the_ranks_own(strategy: ArenaStrategy) -> None:
    """How far they are is their own affair, but for the end."""
    rank = strategy.communicator.rank
    dataset = strategy.distribute_datasets_from_function(lambda _: mpidist.data.Dataset.range(12).batch(4))
    batches = iter(dataset)
    if rank == 0:
        next(batches)
    compare(strategy)
    for _ in range(3 if rank else 2):
        next(batches)
    compare(strategy)
    if rank == 0:
        assert next(batches, None) is None
    with pytest.raises(MismatchError, match=r"after the end of pass 1 of distributed dataset number \d+"):
        compare(strategy)
    # A second look at the end is no other one.
    for _ in range(1 + (rank == 0)):
        assert next(batches, None) is None
    strategy.communicator.order.restart()
    compare(strategy)
