"""A strategy whose groups differ: replicas of several ranks, which combine over some ranks and agree over all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy
from mpidist.variables.arena import Arena
from mpidist.variables.replicas import Replicas
from tests.parallel.variables.shelf import Shelf

pytestmark = pytest.mark.mpi(min_size=2)

PARTS = 2  # ranks of a replica, where there are enough


@pytest.fixture
def column(communicator: Communicator) -> Iterator[Communicator]:
    """The ranks that do the same part of each replica's work."""
    with communicator.split(communicator.rank % PARTS) as group:
        yield group


@pytest.fixture
def strategy(communicator: Communicator, column: Communicator) -> Iterator[Strategy]:
    with Strategy(Replicas(column, everyone=communicator), Shelf(communicator)) as made:
        yield made


def test_values_are_combined_over_the_replicas(strategy: Strategy, communicator: Communicator) -> None:
    mine = list(range(communicator.rank % PARTS, communicator.size, PARTS))
    assert strategy.num_replicas_in_sync == len(mine)
    assert strategy.reduce("SUM", communicator.rank, axis=None) == sum(mine)
    assert strategy.gather(np.array([communicator.rank]), axis=0).tolist() == mine
    assert strategy.gather_object(communicator.rank) == mine
    assert strategy.extended.broadcast_to(communicator.rank) == mine[0]
    handle = strategy.extended.all_reduce_async("SUM", np.array([communicator.rank]))
    assert handle.wait().tolist() == [sum(mine)]

    def look() -> tuple[int, int, Any]:
        replica = mpidist.get_replica_context()
        assert replica is not None
        count = replica.num_replicas_in_sync
        return replica.replica_id_in_sync_group, count, replica.all_reduce("MEAN", communicator.rank)

    assert strategy.run(look) == (communicator.rank // PARTS, len(mine), np.mean(mine))


def test_variables_are_those_of_all_ranks(
    strategy: Strategy, communicator: Communicator, mpi_tmp_path: Path
) -> None:
    with strategy.scope():
        variable = mpidist.Variable(np.arange(12.0).reshape(6, 2))
    assert variable.distribute_strategy is strategy
    assert variable.group is communicator
    path = mpidist.Checkpoint(variable=variable).save(mpi_tmp_path / "c")
    variable.assign(np.zeros((6, 2)))
    mpidist.Checkpoint(variable=variable).restore(path)
    assert variable.numpy().tolist() == np.arange(12.0).reshape(6, 2).tolist()


def test_the_ranks_of_a_replica_read_the_same_examples(strategy: Strategy, communicator: Communicator) -> None:
    rows, n = 6 * strategy.num_replicas_in_sync, strategy.num_replicas_in_sync
    dataset, places = mpidist.data.Dataset.range(rows), []

    def own(place: mpidist.InputContext) -> mpidist.data.Dataset:
        places.append(place)
        return dataset.shard(n, place.input_pipeline_id).shuffle(rows).batch(2)

    if communicator.size % PARTS:
        # Columns of different lengths have other datasets here, so ranks of one replica would read other examples.
        with pytest.raises(MismatchError, match="dataset must be the same on all ranks"):
            strategy.experimental_distribute_dataset(dataset.shuffle(rows).batch(2 * n))
        with pytest.raises(MismatchError, match="of the ranks of replica 0 must be the same on all ranks"):
            strategy.distribute_datasets_from_function(own)
        return
    for distributed in (
        strategy.experimental_distribute_dataset(dataset.shuffle(rows).batch(2 * n)),
        strategy.distribute_datasets_from_function(own),
    ):
        for _ in range(2):
            read = [batch.tolist() for batch in distributed]
            everyone = communicator.all_gather_object(read)
            for first in range(0, communicator.size, PARTS):
                assert everyone[first : first + PARTS] == [everyone[first]] * PARTS
            mine = [number for rank in range(communicator.rank % PARTS, communicator.size, PARTS)
                    for batch in everyone[rank] for number in batch]
            assert sorted(mine) == list(range(rows))
    assert places == [mpidist.InputContext(n, communicator.rank // PARTS, n)]


def test_an_arena_is_for_ranks_that_are_all_replicas(communicator: Communicator, column: Communicator) -> None:
    with (
        Replicas(column, everyone=communicator) as replicas,
        pytest.raises(NotImplementedError, match="use a home for parts of variables"),
    ):
        Arena(replicas)


def test_all_ranks_agree_on_the_options(communicator: Communicator, column: Communicator) -> None:
    # Alike in each column, and different between them.
    options = CommunicationOptions(bytes_per_pack=64 + communicator.rank % PARTS)
    with pytest.raises(MismatchError, match="bytes_per_pack"):
        Replicas(column, options, everyone=communicator)


def test_input_may_have_other_pipelines_than_replicas(communicator: Communicator, column: Communicator) -> None:
    """As where groups of replicas do not wait for each other, and all of them read different examples."""
    with Strategy(Replicas(column, everyone=communicator, pipelines=communicator), Shelf(communicator)) as strategy:
        dataset, places = mpidist.data.Dataset.range(8 * communicator.size), []

        def own(place: mpidist.InputContext) -> mpidist.data.Dataset:
            places.append(place)
            return dataset.batch(1)

        strategy.distribute_datasets_from_function(own)
        assert places == [mpidist.InputContext(communicator.size, communicator.rank, column.size)]
        mine = [int(one) for batch in strategy.experimental_distribute_dataset(dataset.batch(communicator.size))
                for one in batch]
        read = [number for one in communicator.all_gather_object(mine) for number in one]
        assert sorted(read) == list(range(8 * communicator.size))
