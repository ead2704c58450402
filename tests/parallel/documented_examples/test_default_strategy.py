"""The default strategy of the guide: there when no other is, and it distributes nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpidist
from mpidist import launch
from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi


def test_the_default_strategy_is_there_and_is_one(devices: list[str]) -> None:
    default_strategy = mpidist.get_strategy()
    assert default_strategy is mpidist.get_strategy()
    assert not mpidist.has_strategy()
    assert default_strategy.num_replicas_in_sync == 1
    # "One cannot create more instances of it."
    with pytest.raises(RuntimeError, match="one default strategy"):
        copy.deepcopy(default_strategy)
    # It passes through: `run(fn)` calls `fn`.
    assert default_strategy.run(lambda x, y: x + y, args=(1,), kwargs={"y": 2}) == 3
    # The same function gives the current strategy inside of a scope.
    strategy = mpidist.MirroredStrategy(devices)
    with strategy.scope():
        assert mpidist.get_strategy() is strategy


def test_library_code_reduces_unconditionally(devices: list[str], communicator: Communicator) -> None:
    strategy = mpidist.get_strategy()
    assert strategy.reduce("SUM", 1.0, axis=None) == 1.0  # as printed

    # The same library code in the scope of a strategy that distributes.
    with mpidist.MirroredStrategy(devices).scope():
        strategy = mpidist.get_strategy()
        assert strategy.reduce("SUM", 1.0, axis=None) == float(communicator.size)


def test_a_program_with_and_without_distribution() -> None:
    if launch.world_size() > 1:
        strategy: mpidist.Strategy = mpidist.MirroredStrategy()
    else:  # use default strategy
        strategy = mpidist.get_strategy()

    with strategy.scope():
        # do something interesting
        variable = mpidist.Variable(1.0)
    assert variable.numpy() == 1.0
    assert (variable.shape, variable.dtype) == ((), np.dtype("float32"))
    assert variable.group.size == launch.world_size()


def test_there_is_no_input_distribution() -> None:
    dataset = mpidist.data.Dataset.range(4).batch(2)
    batches = list(mpidist.get_strategy().experimental_distribute_dataset(dataset))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
