"""`strategy.extended` over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.options import VariableAggregation
from mpidist.strategy.base import Strategy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["node", "private", "first"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def create(strategy: Strategy, value: Any, **options: Any) -> Any:
    with strategy.scope():
        return mpidist.Variable(value, **options)


def test_reduce_to(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    v = create(strategy, [9.0])
    extended = strategy.extended
    for destinations in ("/cpu:0", v, np.zeros(2)):
        assert extended.reduce_to("SUM", np.float64(rank), destinations) == n * (n - 1) / 2
    assert v.numpy().tolist() == [9], "a destination is not changed"
    assert extended.reduce_to(mpidist.ReduceOp.MEAN, v, v).tolist() == [9]
    nest = extended.batch_reduce_to("MEAN", [({"a": float(rank)}, "cpu:0"), (2.0, v)])
    assert nest == [{"a": (n - 1) / 2}, 2.0]
    assert extended.batch_reduce_to("SUM", []) == []
    for bad in (["cpu:0"], ("cpu:0", "cpu:1")):
        with pytest.raises(TypeError, match="not a list"):
            extended.reduce_to("SUM", 1.0, bad)
    with pytest.raises(TypeError, match="from_variable_aggregation"):
        extended.reduce_to(VariableAggregation.SUM, 1.0, v)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="tuples"):
        extended.batch_reduce_to("SUM", [(1.0,)])  # type: ignore[list-item]  # that is the point
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: extended.reduce_to("SUM", 1.0, v))


def test_broadcast_to_gives_the_first_replicas_value(strategy: Strategy) -> None:
    rank = strategy.communicator.rank
    mine = {"array": np.full((2, 3), rank), "number": 0.1 + rank, "flag": rank == 0, "nest": [np.float32(rank)]}
    sent = strategy.extended.broadcast_to(mine, "cpu:0")
    assert sent["array"].tolist() == [[0] * 3] * 2
    assert sent["array"] is not mine["array"]
    assert (sent["number"], type(sent["number"])) == (0.1, float)
    assert sent["flag"] is True
    assert (sent["nest"][0], sent["nest"][0].dtype) == (0, np.float32)
    v = create(strategy, [1.0])
    copied = strategy.extended.broadcast_to(v)
    v.assign([2.0])
    assert copied.tolist() == [1]
    with pytest.raises(TypeError, match="expected arrays or numbers"):
        strategy.extended.broadcast_to("text")
    with pytest.raises(RuntimeError, match="Method requires being in cross-replica context"):
        strategy.run(lambda: strategy.extended.broadcast_to(1.0))


@pytest.mark.mpi(min_size=2)
def test_broadcast_to_wants_the_same_shapes(strategy: Strategy) -> None:
    odd = strategy.communicator.rank == 1
    with pytest.raises(MismatchError, match="the collective call, its shape and dtype must be"):
        strategy.extended.broadcast_to(np.zeros(2 + odd))
    with pytest.raises(MismatchError, match=r"broadcast_to: the number of values must be the same on all ranks, got"):
        strategy.extended.broadcast_to([1.0] * (1 + odd))
    assert strategy.extended.broadcast_to([1.0, 2]) == [1.0, 2]
    with pytest.raises(TypeError, match="broadcast_to failed on rank 1"):
        strategy.extended.broadcast_to("text" if odd else 1.0)


def test_update_does_not_desynchronise(strategy: Strategy) -> None:
    rank = strategy.communicator.rank
    for aggregation in ("NONE", "SUM", "MEAN"):
        v = create(strategy, 1.0, aggregation=aggregation)
        result = strategy.extended.update(v, lambda var, x: var.assign_add(x), args=(rank + 2.0,))
        assert result is v
        assert strategy.communicator.all_gather_object(v.numpy().item()) == [3.0] * strategy.num_replicas_in_sync
        seen = strategy.extended.update(v, lambda var, *, k: (var.numpy() + k), kwargs={"k": 1}, group=False)
        assert seen == (4.0,)
        # From replica context it is a merge_call.
        strategy.run(lambda v=v: strategy.extended.update(v, lambda var, x: var.assign(x), args=(rank + 7.0,)))
        assert strategy.communicator.all_gather_object(v.numpy().item()) == [7.0] * strategy.num_replicas_in_sync
    for outsider in (np.zeros(1), mpidist.Variable(1.0)):
        with pytest.raises(ValueError, match="made in the scope of"):
            strategy.extended.update(outsider, lambda var: var)  # type: ignore[arg-type]  # that is the point


def test_update_of_an_on_read_variable_writes_components(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    v = create(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.extended.update(v, lambda var, x: var.assign_add(x), args=(rank + 1.0,))
    assert strategy.extended.read_var(v) == n * (n + 1) / 2


def test_which_variables_are_ours(strategy: Strategy, communicator: Communicator) -> None:
    v = create(strategy, 1.0)
    other = make_strategy(communicator, "private")
    extended = strategy.extended
    assert extended is strategy.extended
    assert extended.variable_created_in_scope(v)
    assert extended.variable_created_in_scope(create(strategy, 1.0, synchronization="ON_READ"))
    for stranger in (mpidist.Variable(1.0), create(other, 1.0), 5, None):
        assert not extended.variable_created_in_scope(stranger)
    assert extended.value_container(v) is v
    with pytest.raises(RuntimeError, match=r'Need to be inside "with strategy\.scope'), extended.colocate_vars_with(v):
        pass
    with strategy.scope(), extended.colocate_vars_with(v):
        beside: Any = mpidist.Variable(2.0)
    assert extended.variable_created_in_scope(beside)
    for stranger in (5, mpidist.Variable(1.0)):
        with strategy.scope(), pytest.raises(ValueError, match="must only be passed a variable created in this"):
            extended.colocate_vars_with(stranger).__enter__()  # type: ignore[arg-type]  # that is the point


def test_other_strategies_are_not_mixed_in(strategy: Strategy, communicator: Communicator) -> None:
    other = make_strategy(communicator, "private")
    calls: list[Callable[[], object]] = [
        lambda: strategy.extended.reduce_to("SUM", 1.0, "cpu:0"), lambda: strategy.extended.broadcast_to(1.0),
    ]
    for call in calls:
        with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
            call()


def test_properties(strategy: Strategy, communicator: Communicator) -> None:
    extended = strategy.extended
    is_first = strategy.communicator.rank == 0
    assert (extended.should_checkpoint, extended.should_save_summary) == (is_first, is_first)
    assert not extended.experimental_require_static_shapes
    assert extended.worker_devices == extended.parameter_devices == ("/device:CPU:0",)
    mirrored = mpidist.MirroredStrategy([f"cpu:{i}" for i in range(communicator.size)])
    assert mirrored.extended.worker_devices == (f"/device:CPU:{communicator.rank}",)
    assert extended.call_for_each_replica(lambda x: x + 1, (1,)) == 2
