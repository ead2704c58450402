"""Scatter writes over ranks, reads that aggregate inside `run`, and variables made there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, is_shared
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation
from mpidist.strategy.base import Strategy
from mpidist.variables.kinds.sync_on_read import variable_sync_on_read_context
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def create(strategy: Strategy, value: Any, **options: Any) -> Any:
    with strategy.scope():
        return mpidist.Variable(value, **options)


def everywhere(strategy: Strategy, variable: Any) -> Any:
    values = strategy.communicator.all_gather_object(variable.numpy().tolist())
    assert all(value == values[0] for value in values), f"desynchronised: {values}"
    return values[0]


def rows(rank: int) -> IndexedSlices:
    """Rank r has r + 1 rows, of which index 0 occurs on every rank and more than once."""
    indices = np.arange(rank + 1) % 3
    return IndexedSlices(np.full((rank + 1, 2), rank + 2.0), indices)


def expected(kind: str, start: Any, all_rows: list[IndexedSlices], divisor: int) -> Any:
    result = np.array(start)
    for some in all_rows:
        for index, value in zip(some.indices, some.values / divisor, strict=True):
            result[index] = {
                "add": result[index] + value, "sub": result[index] - value, "mul": result[index] * value,
                "div": result[index] / value, "min": np.minimum(result[index], value),
                "max": np.maximum(result[index], value), "update": value,
            }[kind]
    return result


@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div", "min", "max", "update"])
@pytest.mark.parametrize("aggregation", list(VariableAggregation))
def test_on_write_table(strategy: Strategy, aggregation: VariableAggregation, kind: str) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    start = np.full((3, 2), 3.0)
    v = create(strategy, start, aggregation=aggregation)
    write = getattr(v, f"scatter_{kind}")
    sums = aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if sums and kind in ("min", "max", "update"):
        with pytest.raises(NotImplementedError, match=f"scatter_{kind} inside `run`") as caught:
            strategy.run(write, args=(rows(rank),))
        assert is_shared(caught.value)
        assert everywhere(strategy, v) == start.tolist()
    else:
        assert strategy.run(write, args=(rows(rank),)) is v
        theirs = [rows(r) for r in range(n)] if sums else [rows(0)]
        divisor = n if aggregation is VariableAggregation.MEAN else 1
        np.testing.assert_allclose(everywhere(strategy, v), expected(kind, start, theirs, divisor))
    # Across replicas: the first replica's rows, once.
    v.assign(start)
    write(rows(rank))
    np.testing.assert_allclose(everywhere(strategy, v), expected(kind, start, [rows(0)], 1))


def test_a_replica_may_have_no_rows(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    v = create(strategy, np.zeros(4, "int32"), aggregation="SUM")
    count = 2 if rank % 2 == 0 else 0
    mine = IndexedSlices(np.ones(count, "int32"), np.zeros(count, "int64"))
    strategy.run(v.scatter_add, args=(mine,))
    assert everywhere(strategy, v) == [2 * ((n + 1) // 2), 0, 0, 0]


def test_on_read_has_none(strategy: Strategy) -> None:
    v = create(strategy, np.zeros(4), synchronization="ON_READ", aggregation="SUM")
    for kind in ("add", "sub", "mul", "div", "min", "max", "update"):
        with pytest.raises(NotImplementedError, match=f"scatter_{kind} is not supported for ON_READ"):
            getattr(v, f"scatter_{kind}")(rows(0))


@pytest.mark.mpi(min_size=2)
def test_what_fails_on_one_rank_fails_on_all(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node", check=True)
    odd = communicator.rank == communicator.size - 1
    v = create(strategy, np.zeros(4), aggregation="SUM", name="w")
    bad = IndexedSlices(np.ones(1), np.array([9 if odd else 0]))
    with pytest.raises(ValueError, match="scatter_add of variable 'w' failed on rank"):
        strategy.run(v.scatter_add, args=(bad,))
    with pytest.raises(MismatchError, match="the value written to variable 'w'"):
        v.scatter_add(IndexedSlices(np.ones(1), np.array([int(odd)])))
    assert everywhere(strategy, v) == [0.0] * 4


def test_reads_aggregate_inside_run_where_asked(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    v = create(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")

    def replica_fn() -> tuple[Any, Any, Any]:
        v.assign(1.0)
        with variable_sync_on_read_context():
            summed, added = v.numpy(), v + 10.0
        return summed, added, v.numpy()

    assert strategy.run(replica_fn) == (n, n + 10.0, 1.0)


def test_a_variable_made_inside_run_is_one(strategy: Strategy) -> None:
    made: list[Any] = []

    def replica_fn() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        if not made:
            made.append(mpidist.Variable(5.0 + context.replica_id_in_sync_group, aggregation="SUM"))
        made[0].assign_add(1.0)

    strategy.run(replica_fn)
    strategy.run(replica_fn)
    assert everywhere(strategy, made[0]) == 5 + 2 * strategy.num_replicas_in_sync
    assert made[0].distribute_strategy is strategy
    assert strategy.extended.variable_created_in_scope(made[0])
