"""Variables over ranks: what is written in either context, and what is read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import BaseVariable
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi

AGGREGATIONS = list(VariableAggregation)
ON_READ = VariableSynchronization.ON_READ


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def create(strategy: Strategy, value: Any = 0.0, **options: Any) -> BaseVariable:
    with strategy.scope():
        variable: BaseVariable = mpidist.Variable(value, **options)
    return variable


def everywhere(strategy: Strategy, variable: BaseVariable) -> Any:
    """The one value that all ranks see; a test fails if they see different ones."""
    values = strategy.communicator.all_gather_object(strategy.run(variable.numpy).tolist())
    assert all(value == values[0] for value in values), f"desynchronised: {values}"
    return values[0]


def components(strategy: Strategy, variable: BaseVariable) -> list[Any]:
    return strategy.communicator.all_gather_object(strategy.run(variable.numpy).tolist())


def here() -> mpidist.ReplicaContext:
    context = mpidist.get_replica_context()
    assert context is not None
    return context


def replica() -> int:
    return here().replica_id_in_sync_group


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_WRITE", "ON_READ"])
def test_the_first_replica_gives_the_initial_value(strategy: Strategy, synchronization: str) -> None:
    rank = strategy.communicator.rank
    for value in (5.0 + rank, np.full((2, 3), 5 + rank), lambda: np.array([5 + rank, 6.0])):
        variable = create(strategy, value, synchronization=synchronization)
        assert everywhere(strategy, variable) == np.asarray(everywhere(strategy, variable)).tolist()
        assert np.ravel(everywhere(strategy, variable))[0] == 5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_write_table(strategy: Strategy, aggregation: VariableAggregation) -> None:
    n = strategy.num_replicas_in_sync
    ids = np.arange(1, n + 1, dtype="float32")
    combine: Callable[[Any], float] = {
        VariableAggregation.NONE: lambda x: float(x[0]),
        VariableAggregation.SUM: lambda x: float(np.sum(x)),
        VariableAggregation.MEAN: lambda x: float(np.mean(x)),
        VariableAggregation.ONLY_FIRST_REPLICA: lambda x: float(x[0]),
    }[aggregation]
    v = create(strategy, aggregation=aggregation)
    strategy.run(lambda: v.assign(replica() + 1))
    assert everywhere(strategy, v) == combine(ids)
    strategy.run(lambda: v.assign_add(np.float32(replica() + 1)))
    assert everywhere(strategy, v) == 2 * combine(ids)
    strategy.run(lambda: v.assign_sub(replica() + 1.0))
    assert everywhere(strategy, v) == combine(ids)
    strategy.run(lambda: v.assign(1.0))
    assert everywhere(strategy, v) == combine(np.ones(n))
    # Across replicas: once, whatever the aggregation, and the first replica's where they differ.
    for enter in (strategy.scope, nullcontext):
        with enter():
            v.assign(3)
            assert everywhere(strategy, v) == 3
            v.assign_add(1.0)
            assert everywhere(strategy, v) == 4
            v.assign_sub(strategy.communicator.rank + 2)
            assert everywhere(strategy, v) == 2
            v.assign(10.0 + strategy.communicator.rank)
            assert everywhere(strategy, v) == 10
    # In merge_call replicas are across replicas, too.
    strategy.run(lambda: here().merge_call(lambda _, x: v.assign(x), args=(replica() + 7.0,)))
    assert everywhere(strategy, v) == 7


def test_integers_and_halves_aggregate_in_their_dtype(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    v = create(strategy, np.zeros(3, "int64"), aggregation="SUM")
    strategy.run(lambda: v.assign(np.full(3, 2**53 + replica())))
    assert everywhere(strategy, v) == [n * 2**53 + n * (n - 1) // 2] * 3
    half = create(strategy, np.zeros(2, "float16"), aggregation="MEAN")
    strategy.run(lambda: half.assign(np.full(2, 40000, "float16")))
    assert everywhere(strategy, half) == [40000.0] * 2
    flag = create(strategy, np.array([True, False]))
    strategy.run(lambda: flag.assign([False, replica() == 0]))
    assert everywhere(strategy, flag) == [False, True]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_read_table(strategy: Strategy, aggregation: VariableAggregation) -> None:
    n = strategy.num_replicas_in_sync
    v = create(strategy, synchronization=ON_READ, aggregation=aggregation)
    assert not v.trainable
    strategy.run(lambda: v.assign(replica() + 1))
    assert components(strategy, v) == [r + 1 for r in range(n)]
    strategy.run(lambda: v.assign_add(1.0))
    strategy.run(lambda: v.assign_sub(1.0))
    assert components(strategy, v) == [r + 1 for r in range(n)]
    if aggregation is VariableAggregation.NONE:
        with pytest.raises(ValueError, match="NONE"):
            v.numpy()
        return
    read = {"SUM": n * (n + 1) / 2, "MEAN": (n + 1) / 2, "ONLY_FIRST_REPLICA": 1}[aggregation.name]
    with strategy.scope():
        assert float(v) == v.numpy() == v.read_value() == read
        assert (v + 1)[()] == read + 1
        before = v.value()
        v.assign(6 * n + strategy.communicator.rank)
        assert v.numpy() == 6 * n
        assert before == read, "what was read before stays"
        np.testing.assert_allclose(components(strategy, v), 6 if aggregation.name == "SUM" else 6 * n)
        if aggregation is VariableAggregation.SUM:
            for change in (v.assign_add, v.assign_sub):
                with pytest.raises(ValueError, match=f"{change.__name__} in cross-replica context"):
                    change(1.0)
        else:
            v.assign_add(1.0 + strategy.communicator.rank)
            assert components(strategy, v) == [6.0 * n + 1] * n
        assert not v.value().flags.writeable


@pytest.mark.parametrize("value", [7, -7, 0, 1, 2**31 - 1])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8"])
def test_an_integer_sum_on_read_loses_nothing(communicator: Communicator, dtype: str, value: int) -> None:
    limits = np.iinfo(dtype)
    value = max(limits.min, min(limits.max, value))
    strategy = make_strategy(communicator, "node")
    v = create(strategy, np.zeros((2, 2), dtype), synchronization=ON_READ, aggregation="SUM")
    v.assign(np.full((2, 2), value, dtype))
    assert v.numpy().tolist() == [[value] * 2] * 2
    shares = [component[0][0] for component in components(strategy, v)]
    assert sum(shares) == value
    assert max(shares) - min(shares) <= 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "value",
    [
        np.float16(65504), np.float16(6e-8), np.float32(0.1), np.finfo("float32").max, np.float32(1e-45),
        np.float64(49), np.finfo("float64").max, np.float64(np.inf), np.complex128(1 + 0.1j), np.float32(-0.0),
    ],
    ids=repr,
)
def test_a_sum_on_read_of_any_numbers_loses_nothing(communicator: Communicator, value: Any) -> None:
    strategy = make_strategy(communicator, "node")
    variable = create(strategy, np.zeros(3, value.dtype), synchronization=ON_READ, aggregation="SUM")
    variable.assign(np.full(3, value))
    assert variable.numpy().tolist() == [value] * 3
    share = float(np.real(components(strategy, variable)[0][0]))
    if value.dtype.kind == "f" and share != value:
        assert [component[0] for component in components(strategy, variable)] == [share] * communicator.size


@pytest.mark.mpi(min_size=2)
def test_ranks_that_pass_other_shapes_or_dtypes_are_told_alike(strategy: Strategy) -> None:
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    for options in ({}, {"synchronization": ON_READ, "aggregation": "SUM"}):
        for value in (np.zeros(3 + odd), np.zeros(3, "float32" if odd else "float64")):
            with pytest.raises(MismatchError, match="shape and dtype of variable 'w'"):
                create(strategy, value, name="w", **options)
    # Only the last rank's fits no aggregation, or is no array, or fails.
    with pytest.raises(ValueError, match=r"failed on rank .*MEAN needs a floating dtype"):
        create(strategy, np.zeros(3, "int32" if odd else "float32"), aggregation="MEAN")
    with pytest.raises(TypeError, match=r"failed on rank .*expected an array of numbers"):
        create(strategy, "text" if odd else 1.0)
    with pytest.raises(ZeroDivisionError, match="computing the initial value of variable 'w' failed on rank"):
        create(strategy, lambda: 1 / (not odd), name="w")
    assert everywhere(strategy, create(strategy, 1.0)) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_variables_of_one_shape_that_a_rank_makes_in_another_order(strategy: Strategy, synchronization: str) -> None:
    """They would be read swapped. Of default names nothing is known."""
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    for names in (["kernel", "bias"], ["kernel", None]):
        with pytest.raises(MismatchError, match=r"the name of a variable must be the same .*'kernel'.*order") as caught:
            create(strategy, [1.0], name=names[odd], synchronization=synchronization)
        assert len(set(strategy.communicator.all_gather_object(str(caught.value)))) == 1
    assert everywhere(strategy, create(strategy, 1.0)) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "one", [{"trainable": False}, {"aggregation": "SUM"}, {"synchronization": "ON_READ"}, {"sparse_gradient": True}]
)
def test_ranks_that_pass_other_arguments_are_told_alike(strategy: Strategy, one: dict[str, Any]) -> None:
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    with pytest.raises(MismatchError, match=r"the arguments of variable 'w' must be the same on all ranks") as caught:
        create(strategy, [1.0], name="w", **(one if odd else {}))
    assert len(set(strategy.communicator.all_gather_object(str(caught.value)))) == 1
    # A wrong one on one rank is an error on all.
    for wrong, kind, text in (
        ({"trainable": "no"}, TypeError, "failed on rank .*`trainable` must be True or False, got 'no' of type str"),
        ({"aggregation": "MEDIAN"}, ValueError, "failed on rank .*'MEDIAN' is not a valid VariableAggregation"),
        ({"synchronization": "NONE"}, ValueError, "failed on rank .*synchronization NONE is not supported"),
    ):
        with pytest.raises(kind, match=text):
            create(strategy, [1.0], name="w", **(wrong if odd else {}))
    assert everywhere(strategy, create(strategy, 1.0)) == 1


@pytest.mark.mpi(min_size=2)
def test_check_finds_differing_writes(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node", check=True)
    v = create(strategy, np.zeros(1000))
    v.assign(np.ones(1000))
    with pytest.raises(MismatchError, match="the value written to variable") as caught:
        v.assign(np.full(1000, communicator.rank))
    assert len(str(caught.value)) < 1000
    assert everywhere(strategy, v) == [1.0] * 1000


def test_repr_does_not_communicate(strategy: Strategy) -> None:
    mirrored = create(strategy, [1.0, 2.0], name="m")
    local = create(strategy, 3.0, synchronization=ON_READ, aggregation="SUM", name="l")
    if strategy.communicator.rank == 0:
        assert repr(mirrored) == str(mirrored) == f"{mirrored}"
        assert "'m' shape=(2,) dtype=float32, numpy=[1. 2.]" in repr(mirrored)
        assert "component on rank 0=3.0" in repr(local)
        assert hash(mirrored) != hash(local)
        assert "variables" in repr(strategy.home)
        assert f"num_replicas_in_sync={strategy.num_replicas_in_sync}" in repr(strategy)


@pytest.mark.parametrize("options", [{}, {"synchronization": ON_READ, "aggregation": "SUM"}])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_what_is_read_loads_again(strategy: Strategy, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    size = int(np.prod(shape))
    saved = np.arange(size, dtype="int32").reshape(shape)
    v = create(strategy, saved, **options)
    state = np.array(v.reader()(0, size))
    v.assign(np.zeros(shape, "int32"))
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        asked.append((start, stop))
        result: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = state.reshape(-1)[start:stop]
        return result

    v.load(read)
    np.testing.assert_array_equal(v.numpy().reshape(-1), state)
    assert len(asked) == 1

    def fail_on_one(start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        if strategy.communicator.rank == strategy.communicator.size - 1:
            raise OSError("the disk is gone")
        return read(start, stop)

    with pytest.raises(OSError, match="the disk is gone"):
        v.load(fail_on_one)


def test_values_are_live_and_copies_are_not(strategy: Strategy) -> None:
    v = create(strategy, [1.0, 2.0])
    view, copy = v.value(), v.numpy()
    v.assign([3.0, 4.0])
    assert view.tolist() == [3, 4]
    assert copy.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5
