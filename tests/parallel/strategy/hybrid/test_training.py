"""Groups train by themselves, and come to the parameters that their increments make, in any order of arrival."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import SGD, Adam
from tests.helpers.amounts import turns
from tests.parallel.layouts import LAYOUTS
from tests.parallel.strategy.hybrid.making import Array, Outer, home_of, make_hybrid

pytestmark = pytest.mark.mpi

SIZE = 7


def gradient(group: int, step: int) -> Array:
    """A gradient that does not depend on the parameters, so that the order of arrival does not change it."""
    return np.random.default_rng((group, step)).normal(size=SIZE)


def expected(steps_of_groups: list[int], every: int, outer: tuple[float, float, bool]) -> Array:
    """The parameters after all increments, with a rate of 0.1 in the groups."""
    result = np.arange(SIZE, dtype=float)
    count = len(steps_of_groups)
    for group, steps in enumerate(steps_of_groups):
        optimizer = Outer(SIZE, outer[0], outer[1], nesterov=outer[2])
        for begin in range(0, steps, every):
            window = range(begin, min(begin + every, steps))
            difference = np.sum([0.1 * gradient(group, step) for step in window], axis=0) / count
            result = result + optimizer.increment(difference)
    return result


def train(strategy: mpidist.HybridStrategy, optimizer: Any, variable: Any, steps: range) -> None:
    """Steps of one group, whose ranks share the gradient."""

    def step(number: int) -> None:
        share = gradient(strategy.group_index, number) / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(share.astype(variable.dtype), variable)])

    for number in steps:
        strategy.run(step, (number,))


def same_everywhere(communicator: Communicator, array: Array) -> Array:
    """An array that has the same bits on all ranks."""
    assert len(set(communicator.all_gather_object(array.tobytes()))) == 1
    return array


@pytest.mark.parametrize("layout", turns(LAYOUTS, 1, always=("node",)))
def test_all_groups_come_to_the_sum_of_all_increments(communicator: Communicator, layout: str) -> None:
    with make_hybrid(communicator, layout, every=3, outer=SGD(0.7, 0.6, nesterov=True)) as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.arange(SIZE, dtype=float))
            optimizer = SGD(0.1)
        # One group makes more steps than the other, and both end in the middle of a window.
        steps = [8, 14][: len(strategy.groups)]
        train(strategy, optimizer, variable, range(steps[strategy.group_index]))
        strategy.finish()
        result = same_everywhere(communicator, variable.numpy())
        np.testing.assert_allclose(result, expected(steps, 3, (0.7, 0.6, True)), rtol=1e-12)


def test_training_goes_on_after_finish(communicator: Communicator) -> None:
    with make_hybrid(communicator, every=2, outer=SGD(0.5)) as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.arange(SIZE, dtype=float))
            optimizer = SGD(0.1)
        groups = len(strategy.groups)
        for part in range(3):
            train(strategy, optimizer, variable, range(4 * part, 4 * part + 4))
            strategy.finish()
            result = same_everywhere(communicator, variable.numpy())
            np.testing.assert_allclose(
                result, expected([4 * part + 4] * groups, 2, (0.5, 0.0, False)), rtol=1e-12
            )


def test_a_group_that_takes_nothing_makes_no_other_wait_and_gets_all_once(communicator: Communicator) -> None:
    if communicator.size < 2:
        pytest.skip("one rank is one group")
    with make_hybrid(communicator, every=1, outer=SGD(1.0)) as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.arange(SIZE, dtype=float))
            optimizer = SGD(0.1)
        train(strategy, optimizer, variable, range(1))
        communicator.barrier()
        exchange = home_of(strategy).exchange
        before = 0 if exchange is None else exchange.received_count
        # At the end the parameters of the first group count: it is the one that must have got all.
        if strategy.group_index == 1:
            train(strategy, optimizer, variable, range(1, 101))
        # The other group makes no call of the strategy until all these steps are made.
        communicator.barrier()
        if strategy.group_index == 0:
            train(strategy, optimizer, variable, range(1, 3))
        strategy.finish()
        result = same_everywhere(communicator, variable.numpy())
        np.testing.assert_allclose(result, expected([3, 101], 1, (1.0, 0.0, False)), rtol=1e-12)
        if exchange is not None and strategy.group_index == 0:
            # The first of a hundred increments, which was sent at once, and the sum of the others; and at most one that
            # was under way at the barrier.
            assert exchange.received_count - before <= 3


def test_what_comes_in_a_meeting_is_taken_by_a_group_that_has_nothing_to_deliver(communicator: Communicator) -> None:
    with make_hybrid(
        communicator, groups=[[rank] for rank in range(communicator.size)], every=1, outer=SGD(1.0)
    ) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.zeros(SIZE)), SGD(1.0)
        train(strategy, optimizer, variable, range(1))
        total = sum(gradient(group, 0) for group in range(communicator.size))
        # The group that makes a step leaves the meeting while others are still in it.
        for number in range(1, 61):
            home_of(strategy).first_value_of_groups("a meeting", None)
            group = number % communicator.size
            total = total + gradient(group, number)
            if strategy.group_index == group:
                train(strategy, optimizer, variable, range(number, number + 1))
            strategy.finish()
        np.testing.assert_allclose(variable.numpy(), -total / communicator.size, rtol=1e-9)


@pytest.mark.parametrize("layout", ["node", "each"])
def test_synchronous_groups_make_the_step_of_their_mean(communicator: Communicator, layout: str) -> None:
    outer = Outer(SIZE, 0.7, 0.6, nesterov=True)
    with make_hybrid(
        communicator, layout, every=2, outer=SGD(0.7, 0.6, nesterov=True), synchronous=True
    ) as strategy:
        groups = len(strategy.groups)
        with strategy.scope():
            variable = mpidist.Variable(np.arange(SIZE, dtype=float))
            optimizer = SGD(0.1)

        def step(number: int) -> None:
            # It depends on the parameters.
            own = gradient(strategy.group_index, number) + variable.value()
            optimizer.apply_gradients([(own / strategy.num_replicas_in_sync, variable)])

        common = np.arange(SIZE, dtype=float)
        for window in range(4):
            ends = []
            for group in range(groups):
                local = common.copy()
                for number in (2 * window, 2 * window + 1):
                    local -= 0.1 * (gradient(group, number) + local)
                ends.append(common - local)
            common = common + outer.increment(np.mean(ends, axis=0))
            for number in (2 * window, 2 * window + 1):
                strategy.run(step, (number,))
            # Without `finish`.
            np.testing.assert_allclose(same_everywhere(communicator, variable.numpy()), common, rtol=1e-12)


def test_all_dtypes_and_two_optimizers(communicator: Communicator) -> None:
    with make_hybrid(communicator, every=2, outer=SGD(1.0)) as strategy:
        with strategy.scope():
            single = mpidist.Variable(np.ones((2, 3), np.float32))
            half = mpidist.Variable(np.ones(5, np.float16))
            wave = mpidist.Variable(np.full(3, 1 + 2j, np.complex64))
            rows = mpidist.Variable(np.zeros((6, 2), np.float32), sparse_gradient=True)
            # Groups begin with the first one's values.
            first = mpidist.Variable(np.full(4, float(strategy.group_index)))
            one, two = SGD(0.5), Adam(0.01, gradient_accumulation_steps=2)

        def step() -> None:
            n = strategy.num_replicas_in_sync
            gradients: list[Any] = [
                np.full((2, 3), 1 / n, np.float32), np.full(5, 1 / n, np.float16), np.full(3, 1j / n, np.complex64),
                mpidist.IndexedSlices(np.full((1, 2), 1 / n, np.float32), np.array([strategy.group_index])),
            ]
            one.apply_gradients(zip(gradients, [single, half, wave, rows], strict=True))
            two.apply_gradients([(np.ones(4), first)])

        for _ in range(4):
            strategy.run(step)
        strategy.finish()
        groups = len(strategy.groups)
        for variable in (single, half, wave, rows, first):
            same_everywhere(communicator, variable.numpy())
        np.testing.assert_allclose(single.numpy(), -1)
        np.testing.assert_allclose(half.numpy(), -1)
        np.testing.assert_allclose(wave.numpy(), 1 + 0j, atol=1e-6)
        np.testing.assert_allclose(rows.numpy()[:groups], -2 / groups)
        assert not rows.numpy()[groups:].any()
        # Two steps of Adam, each of almost 0.01.
        np.testing.assert_allclose(first.numpy(), -0.02, rtol=1e-3)


def test_reductions_are_those_of_the_group(communicator: Communicator) -> None:
    with make_hybrid(communicator) as strategy:
        mates = strategy.groups[strategy.group_index]
        assert strategy.num_replicas_in_sync == len(mates)
        assert strategy.reduce("SUM", communicator.rank, axis=None) == sum(mates)
        assert strategy.gather(np.array([communicator.rank]), axis=0).tolist() == [*mates]


def test_groups_see_different_data_and_all_of_it(communicator: Communicator) -> None:
    contexts = []

    def make(context: mpidist.InputContext) -> mpidist.data.Dataset:
        contexts.append(context)
        return mpidist.data.Dataset.range(4).batch(2)

    with make_hybrid(communicator) as strategy:
        count = len(strategy.groups)
        dataset = mpidist.data.Dataset.range(40).shuffle(40, seed=3).batch(4)
        mine = [np.asarray(batch).tolist() for batch in strategy.experimental_distribute_dataset(dataset)]
        # Each rank has its piece of every batch of its group.
        everyone = communicator.all_gather_object((strategy.group_index, [row for batch in mine for row in batch]))
        assert sorted(row for _, rows in everyone for row in rows) == [*range(40)]
        assert len(mine) in (10 // count, -(-10 // count))
        options = mpidist.data.Options()
        options.experimental_distribute.auto_shard_policy = mpidist.AutoShardPolicy.OFF
        whole = strategy.experimental_distribute_dataset(dataset.with_options(options))
        assert sum(len(batch) for batch in whole) == 40
        strategy.distribute_datasets_from_function(make)
        assert contexts == [
            mpidist.InputContext(communicator.size, communicator.rank, strategy.num_replicas_in_sync)
        ]


def test_shuffles_without_a_seed_are_the_same_in_all_groups(communicator: Communicator) -> None:
    with make_hybrid(communicator) as strategy:
        dataset = mpidist.data.Dataset.range(40).shuffle(40).batch(4)
        mine = strategy.experimental_distribute_dataset(dataset)
        rows = [row for batch in mine for row in np.asarray(batch).tolist()]
        everyone = communicator.all_gather_object(rows)
        assert sorted(row for one in everyone for row in one) == [*range(40)]
