"""Variables of integers: they lose nothing, and what does not fit is an error that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import is_shared
from mpidist.options import VariableSynchronization
from mpidist.strategy.base import Strategy
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import make_arena
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

ON_READ = VariableSynchronization.ON_READ
SUMMED: dict[str, Any] = {"synchronization": ON_READ, "aggregation": "SUM"}


@pytest.fixture(params=["node", "private", "first"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def create(strategy: Strategy, value: Any, **options: Any) -> Any:
    with strategy.scope():
        return mpidist.Variable(value, **options)


def refused(strategy: Strategy, call: Callable[[], object]) -> str:
    """The text of the error that every rank raises."""
    with pytest.raises(OverflowError) as caught:
        call()
    texts = strategy.communicator.all_gather_object(str(caught.value))
    assert set(texts) == {texts[0]}
    return texts[0]


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint16", "int64", "uint64"])
def test_sums_and_differences_of_a_variable(strategy: Strategy, dtype: str) -> None:
    limits = np.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    v = create(strategy, np.array([high - 2, low + 2, 5], dtype))
    v.assign_add(np.array([2, 0, 1], dtype))
    v.assign_sub(np.array([0, 2, 1], dtype))
    assert v.numpy().tolist() == [high, low, 5]
    for change, delta, wanted in ((v.assign_add, [1, 0, 0], high + 1), (v.assign_sub, [0, 1, 0], low - 1)):
        text = refused(strategy, lambda change=change, delta=delta: change(np.array(delta, dtype)))  # type: ignore[misc]
        assert f"{change.__name__} would make {wanted}" in text
        assert f"expected values from {low} to {high}" in text
        assert v.numpy().tolist() == [high, low, 5]
    if low:
        # The opposite of the least number does not exist.
        v.assign(np.array([-1, 0, -5], dtype))
        v.assign_sub(np.array([low, 0, low], dtype))
        assert v.numpy().tolist() == [high, 0, high - 4]
        assert f"make {-low}" in refused(strategy, lambda: v.assign_sub(np.array([0, low, 0], dtype)))


def test_the_first_replicas_number_counts(strategy: Strategy) -> None:
    rank = strategy.communicator.rank
    v = create(strategy, np.int32(2**31 - 2))
    # It would be too much for the others.
    v.assign_add(1 if rank == 0 else 100)
    assert v.numpy() == 2**31 - 1
    text = refused(strategy, lambda: v.assign_add(1 if rank == 0 else 0))
    assert "2147483648" in text
    strategy.run(lambda: v.assign_sub(2 if rank == 0 else 0))
    refused(strategy, lambda: strategy.run(lambda: v.assign_add(3 if rank == 0 else 0)))
    assert v.numpy() == 2**31 - 3
    counter = create(strategy, np.int32(2**31 - 1 - strategy.num_replicas_in_sync), aggregation="SUM")
    strategy.run(lambda: counter.assign_add(1))
    assert counter.numpy() == 2**31 - 1
    refused(strategy, lambda: strategy.run(lambda: counter.assign_add(1)))


@pytest.mark.parametrize("options", [{}, SUMMED])
def test_what_is_assigned_does_not_wrap(strategy: Strategy, options: dict[str, Any]) -> None:
    v = create(strategy, np.zeros(2, "int8"), **options)
    for array in (np.array([0, 200]), np.array([-129, 0], "int16")):
        with pytest.raises(OverflowError, match=r"int8: expected values from -128 to 127, got (200|-129)"):
            strategy.run(v.assign, (array,))
    assert v.numpy().tolist() == [0, 0]
    number = create(strategy, np.int32(0), name="one", **options)
    for method in (number.assign, number.assign_add):
        with pytest.raises(OverflowError, match=f"'one' of dtype int32: expected values from .* got {2**40}"):
            strategy.run(method, (2**40,))


def test_a_sum_on_read_holds_more_than_its_components(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    v = create(strategy, np.int32(0), **SUMMED)
    strategy.run(lambda: v.assign_add(2**31 - 3))
    strategy.run(lambda: v.assign_add(2))
    with pytest.raises(OverflowError, match=r"int32: .* assign_add would make 2147483648"):
        strategy.run(lambda: v.assign_add(1))
    assert strategy.run(lambda: (v.numpy(), v.numpy().dtype)) == (2**31 - 1, np.int32)
    read = v.numpy()
    assert (read, read.dtype) == (n * (2**31 - 1), np.int64)
    v.assign(read - n)
    assert v.numpy() == n * (2**31 - 2)
    assert strategy.run(v.numpy) == 2**31 - 2
    assert "expected values from" in refused(strategy, lambda: v.assign(np.int64(n * 2**31)))
    unsigned = create(strategy, np.uint32(0), **SUMMED)
    strategy.run(lambda: unsigned.assign_sub(0))
    with pytest.raises(OverflowError, match=r"uint32: .* assign_sub would make -1"):
        strategy.run(lambda: unsigned.assign_sub(1))
    longest = create(strategy, np.int64(0), **SUMMED)
    strategy.run(lambda: longest.assign(2**62 if rank < 2 else 0))
    if n > 1:
        assert "a SUM of int64" in refused(strategy, longest.numpy)


def test_one_component_is_too_large(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    v = create(strategy, np.int8(0), synchronization=ON_READ, aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: v.assign(127 if rank == n - 1 else 0))
    refused(strategy, lambda: v.assign_add(1))
    assert strategy.run(v.numpy) == (127 if rank == n - 1 else 0)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_rows_that_are_scattered(strategy: Strategy, dtype: str) -> None:
    limits, rank = np.iinfo(dtype), strategy.communicator.rank
    high = int(limits.max)
    start = [[high - 3, high // 2], [2, 3]]
    v = create(strategy, np.array(start, dtype))

    def rows(*values: list[int]) -> mpidist.IndexedSlices:
        # All change row 0. Only the first replica's count.
        given = values if rank == 0 else ([1, 1],)
        return mpidist.IndexedSlices(np.array(given, dtype), np.zeros(len(given), int))

    v.scatter_add(rows([1, 0], [2, 0]))
    assert v.numpy().tolist() == [[high, high // 2], [2, 3]]
    assert f"scatter_add would make {high + 1}" in refused(strategy, lambda: v.scatter_add(rows([0, 0], [1, 0])))
    v.scatter_sub(rows([3, 0]))
    v.scatter_mul(rows([1, 2]))
    assert v.numpy().tolist() == [[high - 3, high // 2 * 2], [2, 3]]
    refused(strategy, lambda: v.scatter_mul(rows([1, 2])))
    assert v.numpy().tolist() == [[high - 3, high // 2 * 2], [2, 3]]
    if limits.min == 0:
        assert "make -1" in refused(strategy, lambda: v.scatter_sub(rows([high - 3, 0], [1, 0])))
    summed = create(strategy, np.array(start, dtype), aggregation="SUM")
    one = mpidist.IndexedSlices(np.array([[3, 0], [1, 0]], dtype), np.zeros(2, int))
    refused(strategy, lambda: strategy.run(summed.scatter_add, (one,)))
    assert summed.numpy().tolist() == start
    with pytest.raises(OverflowError, match="got 128"):
        create(strategy, np.zeros(2, "int8")).scatter_update(mpidist.IndexedSlices(np.array([128]), np.array([0])))


def test_a_counter_never_stops_a_save(communicator: Communicator, mpi_tmp_path: Path) -> None:
    n = communicator.size
    v = create_variable(make_arena(communicator), np.full(3, 2**31 - 1, "int32"), **SUMMED)
    path = Checkpoint(v=v).write(mpi_tmp_path / "full")
    fresh = create_variable(make_arena(communicator), np.zeros(3, "int32"), **SUMMED)
    Checkpoint(v=fresh).read(path).assert_consumed()
    assert fresh.numpy().tolist() == [n * (2**31 - 1)] * 3
    longer = create_variable(make_arena(communicator), np.zeros(3, "int64"), **SUMMED)
    Checkpoint(v=longer).read(path).assert_consumed()
    assert longer.numpy().tolist() == [n * (2**31 - 1)] * 3
    if n > 1:
        # On one rank the sum does not fit.
        alone = create_variable(make_arena(communicator.split(communicator.rank)), np.zeros(3, "int32"), **SUMMED)
        with pytest.raises(OverflowError, match=f"got {n * (2**31 - 1)}.*wider dtype") as caught:
            Checkpoint(v=alone).read(path)
        assert is_shared(caught.value)


def test_a_sum_that_an_earlier_version_saved(communicator: Communicator, mpi_tmp_path: Path) -> None:
    # It was of the variable's dtype, as that of a variable that is not ON_READ.
    saved = create_variable(make_arena(communicator), np.array([7, -7, 2**31 - 1], "int32"))
    path = Checkpoint(v=saved).write(mpi_tmp_path / "earlier")
    v = create_variable(make_arena(communicator), np.zeros(3, "int32"), **SUMMED)
    Checkpoint(v=v).read(path).assert_consumed()
    assert v.numpy().tolist() == [7, -7, 2**31 - 1]
