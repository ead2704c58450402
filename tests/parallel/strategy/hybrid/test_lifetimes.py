"""What groups keep of optimizers and variables that a program drops, and of several optimizers of one variable."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import SGD
from tests.helpers.amounts import amount
from tests.parallel.strategy.hybrid.making import home_of, make_hybrid
from tests.parallel.strategy.hybrid.test_training import same_everywhere

pytestmark = pytest.mark.mpi

SIZE = 8000


def memory() -> int:
    """Bytes of this process, and of the node memory that it has touched."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def make_and_train(strategy: mpidist.HybridStrategy, rate: float = 1.0) -> tuple[Any, Any]:
    """A variable that begins with zeros and an optimizer, after a step of one group along -1."""
    with strategy.scope():
        variable, optimizer = mpidist.Variable(np.zeros(SIZE)), SGD(rate)
    strategy.run(step, (strategy, optimizer, variable))
    return variable, optimizer


def step(strategy: mpidist.HybridStrategy, optimizer: Any, variable: Any) -> None:
    optimizer.apply_gradients([(np.full(SIZE, 1 / strategy.num_replicas_in_sync), variable)])


def test_many_optimizers_that_are_dropped_leave_nothing(communicator: Communicator) -> None:
    with make_hybrid(communicator, every=1, outer=SGD(1.0, 0.5)) as strategy:
        kept = make_and_train(strategy)
        count = amount(40, 1000)
        for number in range(count):
            make_and_train(strategy)
            if number == count // 4:
                before = memory()
        parts = home_of(strategy).parts
        # The kept one, the last one, and those that another rank had not dropped when it was asked.
        assert len(parts.begun) <= 5
        # Three flat arrays of a leader's part.
        assert memory() - before < max(count * 3 // 4 * 3 * SIZE * 8 // 4, 1 << 21)
        strategy.finish()
        assert [part.number for part in parts.begun] == [0]
        np.testing.assert_allclose(kept[0].numpy(), -1)


def test_what_one_group_still_has_is_exchanged(communicator: Communicator) -> None:
    with make_hybrid(communicator, every=4, outer=SGD(1.0)) as strategy:
        held = [make_and_train(strategy)[0]]
        if strategy.group_index:
            # The window of this group is not full, and it looks at the result no more.
            held.clear()
        later = make_and_train(strategy)
        strategy.finish()
        assert len(home_of(strategy).parts.begun) == 2
        for variable in (*held, later[0]):
            np.testing.assert_allclose(variable.numpy(), -1)
        held.clear()
        del variable
        strategy.finish()
        assert len(home_of(strategy).parts.begun) == 1


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_that_was_never_called_is_dropped(communicator: Communicator) -> None:
    with make_hybrid(communicator) as strategy:
        with strategy.scope():
            kept, dropped = mpidist.Variable(np.full(3, float(strategy.group_index))), mpidist.Variable(np.zeros(3))
            optimizer = SGD(0.1)
            optimizer.build([kept])
            SGD(0.1).build([dropped])
        if communicator.rank == 0:
            # The collector comes to each rank at a time of its own.
            cycle: list[Any] = [SGD(0.1)]
            cycle[0].build([dropped])
            cycle.append(cycle)
        else:
            SGD(0.1).build([dropped])
        strategy.finish()
        same_everywhere(communicator, kept.numpy())
        assert [len(part.members) for part in home_of(strategy).parts.begun] == [1]


def test_what_is_under_way_ends_with_its_strategy(communicator: Communicator) -> None:
    for number in range(2):
        with make_hybrid(communicator, every=1, outer=SGD(1.0)) as strategy:
            variable, optimizer = make_and_train(strategy)
            strategy.finish()
            np.testing.assert_allclose(variable.numpy(), -1)
            if strategy.group_index == number:
                # The other group takes none of it.
                for _ in range(3):
                    strategy.run(step, (strategy, optimizer, variable))
            last = variable.numpy()
        np.testing.assert_array_equal(variable.numpy(), last)
        with pytest.raises(RuntimeError, match="closed"):
            strategy.finish()
        with pytest.raises(RuntimeError, match="closed"):
            strategy.run(step, (strategy, optimizer, variable))


@pytest.mark.parametrize("is_dropped", [False, True])
def test_the_second_optimizer_of_a_variable_is_exchanged_like_the_first(
    communicator: Communicator, is_dropped: bool
) -> None:
    def steps(optimizer: Any, count: int) -> None:
        share = (strategy.group_index + 1) / strategy.num_replicas_in_sync
        for _ in range(count):
            strategy.run(lambda: optimizer.apply_gradients([(np.full(3, share), variable)]))

    with make_hybrid(communicator, every=2, outer=SGD(1.0)) as strategy:
        mean = np.mean(np.arange(len(strategy.groups)) + 1)
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(3))
            first, second = SGD(1.0), SGD(10.0)
        steps(first, 3)
        strategy.finish()
        if is_dropped:
            del first
        steps(second, 2)
        strategy.finish()
        np.testing.assert_allclose(same_everywhere(communicator, variable.numpy()), -23 * mean, rtol=1e-12)
        steps(second, 1)
        strategy.finish()
        np.testing.assert_allclose(same_everywhere(communicator, variable.numpy()), -33 * mean, rtol=1e-12)
