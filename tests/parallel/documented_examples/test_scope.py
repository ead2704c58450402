"""`Strategy.scope`: the example of its reference, and what its text says about contexts and later access."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist

pytestmark = pytest.mark.mpi


def test_variables_inside_and_outside_of_a_scope(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    # Inside:
    with strategy.scope():
        mirrored_variable = mpidist.Variable(1.0)
    # Printed: MirroredVariable {0: 1.0, 1: 1.0}, of shape () and dtype float32.
    assert isinstance(mirrored_variable, mpidist.Variable)
    assert mirrored_variable.numpy() == 1.0
    assert (mirrored_variable.shape, mirrored_variable.dtype) == ((), np.dtype("float32"))
    assert mirrored_variable.group.size == strategy.num_replicas_in_sync
    # Outside:
    regular_variable = mpidist.Variable(1.0)
    assert isinstance(regular_variable, mpidist.Variable)
    assert regular_variable.numpy() == 1.0
    assert (regular_variable.shape, regular_variable.dtype) == ((), np.dtype("float32"))
    assert regular_variable.group.size == 1
    assert "MirroredVariable" in repr(mirrored_variable)
    assert "numpy=1.0" in repr(mirrored_variable)


def test_a_scope_makes_the_strategy_current(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    default_strategy = mpidist.get_strategy()
    assert default_strategy is not strategy
    with strategy.scope():
        assert mpidist.get_strategy() is strategy
        assert mpidist.in_cross_replica_context()
        assert mpidist.get_replica_context() is None
    assert mpidist.get_strategy() is default_strategy
    assert not mpidist.in_cross_replica_context()


def test_variables_are_used_outside_of_their_scope(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    with strategy.scope():
        mirrored_variable = mpidist.Variable(1.0)
    mirrored_variable.assign_add(2.0)
    assert mirrored_variable + 1.0 == 4.0


def test_run_and_reduce_enter_the_scope(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)

    def replica_fn() -> Any:
        assert mpidist.get_strategy() is strategy
        return mpidist.Variable(1.0)

    made_in_run = strategy.run(replica_fn)
    assert made_in_run.group.size == strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", made_in_run.numpy(), axis=None) == strategy.num_replicas_in_sync
