"""State in shards as variables: who has what, how it is read and written, and checkpoints of every other setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import MismatchError
from mpidist.optimizers import Adam, LossScaleOptimizer, Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.kinds.sharded_state import ShardedState
from mpidist.variables.step.arena_plan import ArenaPlan
from tests.helpers.amounts import turns
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import make_strategy
from tests.parallel.optimizers.sharded import (
    ALL_LAYOUTS,
    SHAPES,
    everything,
    make_model,
    pairs_of,
    require_alike,
    shard_counts,
    train,
)

pytestmark = pytest.mark.mpi


def state_bytes(optimizer: Optimizer) -> int:
    """The memory of the state that this rank sees: of its node, or its own."""
    assert isinstance(optimizer.plan, ArenaPlan)
    plan = optimizer.plan._plan
    holders: list[Any] = [*plan.bundles, *plan.tables.values()]
    return sum(slab.writable.nbytes for holder in holders for slab in holder.slots.values())


@pytest.mark.parametrize("layout", turns(ALL_LAYOUTS, 2, always=("each",)))
def test_each_node_has_its_part_of_the_state(communicator: Communicator, layout: str) -> None:
    sizes = []
    for shard_optimizer in (False, True):
        strategy = make_strategy(communicator, layout, shard_optimizer=shard_optimizer)
        with strategy.scope():
            variables = [
                mpidist.Variable(np.zeros((300, 300), "f")), mpidist.Variable(np.zeros(70_001)),
                mpidist.Variable(np.zeros((480, 64), "f"), sparse_gradient=True),
            ]
        optimizer = Adam(0.1, use_ema=False)
        optimizer.build(variables)
        sizes.append(state_bytes(optimizer))
        if shard_optimizer:
            # Whatever a step selects, the state does not move.
            train_a_part = [(np.ones((300, 300), "f"), variables[0])]
            strategy.run(optimizer.apply_gradients, args=(train_a_part,))
            assert state_bytes(optimizer) == sizes[-1]
    count = shard_counts(communicator, layout)
    # Each of three pieces is cut at a cache line, or at a row.
    assert abs(sizes[1] - sizes[0] / count) <= 3 * 2 * 64 * 4


@pytest.mark.parametrize("layout", turns(("node", "cyclic", "uneven", "full"), 1, always=("cyclic",)))
def test_a_slot_is_read_and_written_as_a_whole(communicator: Communicator, layout: str) -> None:
    plain, sharded = (make_strategy(communicator, layout, shard_optimizer=one) for one in (False, True))
    results = []
    for strategy in (plain, sharded):
        variables, optimizer = make_model(strategy, "float64", table=True), Adam(0.01)
        optimizer.build(variables)
        for number, slot in enumerate(optimizer.variables):
            slot.assign(np.arange(slot.size).reshape(slot.shape) + number)
            slot.assign_add(np.ones(slot.shape))
            slot.assign_sub(np.full(slot.shape, 0.5))
        # In replica context the first replica's value counts, as for all variables without an aggregation.
        largest = optimizer.variables[4]
        strategy.run(largest.assign_add, args=(np.full(largest.shape, float(communicator.rank)),))
        results.append([slot.numpy() for slot in optimizer.variables])
        assert float(largest[7]) == 4 + 7 + 0.5
        assert float(np.sum(largest)) == results[-1][4].sum()
    require_alike(*results, exact=True, tolerance=0)


def test_showing_a_slot_does_not_communicate(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "each", shard_optimizer=True)
    variables, optimizer = make_model(strategy), Adam(0.01)
    optimizer.build(variables)
    slot = optimizer.variables[4]
    if communicator.rank == 0:
        texts = [repr(slot), str(slot), f"{slot}", repr(optimizer), repr(optimizer.variables)]
        assert len(slot) == 9001
        assert hash(slot) == id(slot)
        if communicator.size > 1:
            assert "elements [0, " in texts[0]
            assert "Collective" in texts[0]
    communicator.barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_read_other_slots_are_told(communicator: Communicator) -> None:
    """The two moments of one variable look alike."""
    strategy = make_strategy(communicator, "each", shard_optimizer=True)
    variables, optimizer = make_model(strategy), Adam(0.01)
    train(strategy, optimizer, variables)
    first, second = (optimizer.variables[number * len(variables) + 4] for number in range(2))
    assert isinstance(first, ShardedState)

    # Calls between nodes are compared at once where they are new. An earlier test may have made one of these two: a
    # rank that knows its call would not compare it, and the others would wait for that.
    assert first.numpy().shape == second.numpy().shape

    def read_often() -> None:
        # Known calls are compared once in a while.
        for _ in range(200):
            (first if communicator.rank else second).numpy()

    with pytest.raises(MismatchError, match="value of variable number 4"):
        read_often()
    assert first.numpy().any()


def test_rows_are_not_scattered_into_shards(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "each", shard_optimizer=True)
    variables, optimizer = make_model(strategy), Adam(0.01)
    optimizer.build(variables)
    if communicator.size > 1:
        with pytest.raises(NotImplementedError, match="scatter_add is not defined for an optimizer's state"):
            optimizer.variables[0].scatter_add(mpidist.IndexedSlices(np.ones((1, 4)), np.array([0])))


def made(communicator: Communicator, setting: str) -> Strategy:
    """A strategy whose setting is a layout, sharded or not, or one rank alone."""
    kind, _, layout = setting.partition(" ")
    if kind == "alone":
        return ArenaStrategy(SoloCommunicator())
    return make_strategy(communicator, layout, shard_optimizer=kind == "sharded")


SAVERS = ("sharded pairs", "sharded cyclic", "sharded uneven", "sharded private", "sharded full", "plain pairs")
RESTORERS = ("plain node", "plain pairs", "sharded each", "sharded cyclic", "sharded full", "alone")


@pytest.mark.parametrize("saver", turns(SAVERS, 2))
def test_checkpoints_of_every_setting_restore_under_every_other(
    communicator: Communicator, mpi_tmp_path: Path, saver: str
) -> None:
    before_build = SAVERS.index(saver) % 2

    def make() -> LossScaleOptimizer:
        return LossScaleOptimizer(Adam(0.01, use_ema=True), 8.0)

    strategy = made(communicator, saver)
    variables, optimizer = make_model(strategy, table=False), make()
    train(strategy, optimizer, variables, 0, 3)
    expected = everything(optimizer, variables)
    path = mpidist.Checkpoint(vs=variables, opt=optimizer).save(mpi_tmp_path / "c")
    if communicator.rank == 0:
        # The file has the global shape, whatever had which part.
        with h5py.File(path) as file:
            assert sorted(one.shape for one in file["opt/inner/velocity"].values()) == sorted(SHAPES)
    train(strategy, optimizer, variables, 3, 5)
    later = everything(optimizer, variables)
    for restorer in turns(RESTORERS, 3):
        other = made(communicator, restorer)
        again, resumed = make_model(other), make()
        for variable in again:
            variable.assign(np.zeros(variable.shape, "f"))
        if not before_build:
            resumed.build(again)
        status = mpidist.Checkpoint(vs=again, opt=resumed).restore(path)
        if before_build:
            resumed.build(again)
        status.assert_consumed()
        require_alike(everything(resumed, again), expected, exact=True, tolerance=0)
        if restorer != "alone":
            train(other, resumed, again, 3, 5)
            require_alike(everything(resumed, again), later, exact=False, tolerance=1e-5)


def test_tables_are_saved_and_restored(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = made(communicator, "sharded cyclic")
    variables, optimizer = make_model(strategy, table=True), Adam(0.01)
    train(strategy, optimizer, variables, 0, 3)
    expected = everything(optimizer, variables)
    path = mpidist.Checkpoint(vs=variables, opt=optimizer).save(mpi_tmp_path / "c")
    for restorer in turns(RESTORERS, 2):
        again, resumed = make_model(made(communicator, restorer), table=True), Adam(0.01)
        resumed.build(again)
        mpidist.Checkpoint(vs=again, opt=resumed).restore(path).assert_consumed()
        require_alike(everything(resumed, again), expected, exact=True, tolerance=0)


def test_an_optimizer_of_other_variables_is_refused_on_every_rank(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    strategy = made(communicator, "sharded each")
    variables, optimizer = make_model(strategy), Adam(0.01)
    optimizer.build(variables)
    path = mpidist.Checkpoint(opt=optimizer).save(mpi_tmp_path / "c")
    with strategy.scope():
        others = [mpidist.Variable(np.zeros(3, "f")) for _ in variables]
    stranger = Adam(0.01)
    stranger.build(others)
    with pytest.raises(mpidist.errors.CheckpointError) as caught:
        mpidist.Checkpoint(opt=stranger).restore(path)
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


def test_the_bytes_between_nodes_are_those_of_an_all_reduce(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "each", shard_optimizer=True)
    count = communicator.size
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(1 << 18, "f"))
    optimizer = Adam(0.1)
    optimizer.build([variable])
    strategy.run(optimizer.apply_gradients, args=([(np.ones(1 << 18, "f"), variable)],))
    assert isinstance(optimizer.plan, ArenaPlan)
    shards = optimizer.plan._plan.bundles[0].shards
    sent = 0 if shards is None or shards.messages is None else shards.messages.traffic.sent
    # A ring's, which is the least: 2 (k - 1) / k of the array; the parts differ by a cache line.
    assert abs(sent - 2 * (count - 1) * (1 << 20) / count) <= 4 * 64 * count


def test_the_argument_of_the_strategy(communicator: Communicator) -> None:
    makers: tuple[Any, ...] = (mpidist.MultiWorkerMirroredStrategy, mpidist.experimental.MultiWorkerMirroredStrategy)
    for make in makers:
        with make(shard_optimizer=True) as strategy:
            assert strategy.home.shards_state == (communicator.size > 1)
            variables, optimizer = make_model(strategy), Adam(0.01)
            train(strategy, optimizer, variables)
            # All ranks of this job are on one node, which has all state, once.
            if strategy.home.shares_memory:
                assert not any(isinstance(slot, ShardedState) for slot in optimizer.variables)
        for wrong in ("yes", 1, None):
            with pytest.raises(TypeError, match="`shard_optimizer` must be True or False, got"):
                make(shard_optimizer=wrong)
        if communicator.size > 1:
            with pytest.raises(MismatchError, match="`shard_optimizer` must be the same on all ranks, got"):
                make(shard_optimizer=communicator.rank == 0)
            # One rank alone passes what is no bool: the error is that of all.
            with pytest.raises(TypeError, match="`shard_optimizer` must be True or False"):
                make(shard_optimizer=None if communicator.rank == 0 else True)


def test_a_selection_that_is_in_one_shard(communicator: Communicator) -> None:
    """All nodes but one have nothing to update, and take part."""
    results = []
    for shard_optimizer in (True, False):
        strategy = make_strategy(communicator, "each", shard_optimizer=shard_optimizer)
        variables, optimizer = make_model(strategy), Adam(0.01)
        optimizer.build(variables)
        for step in (0, 2):
            pairs = [pairs_of(step, communicator.rank, variables)[number] for number in (0, 1)]
            strategy.run(optimizer.apply_gradients, args=(pairs,))
        results.append(everything(optimizer, variables))
    require_alike(*results, exact=shard_counts(communicator, "each") <= 2, tolerance=1e-6)
