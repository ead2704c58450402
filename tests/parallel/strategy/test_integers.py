"""Integers through the calls of a strategy: what does not fit is an error on every rank, and nothing wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import is_shared
from mpidist.strategy.base import Strategy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

ROWS = 300


@pytest.fixture(params=["node", "first", "each"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def refused(strategy: Strategy, call: Callable[[], object]) -> str:
    """The text of the error that every rank raises."""
    with pytest.raises(OverflowError) as caught:
        call()
    assert is_shared(caught.value)
    texts = strategy.communicator.all_gather_object(str(caught.value))
    assert set(texts) == {texts[0]}
    return texts[0]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "uint64"])
def test_sums_along_an_axis_keep_their_dtype_or_are_refused(strategy: Strategy, dtype: str) -> None:
    n, largest = strategy.num_replicas_in_sync, int(np.iinfo(dtype).max)
    # Each replica's own sum fits, or none does.
    fits = np.full((10, 2), largest // (10 * n), dtype)
    result = strategy.reduce("SUM", fits, axis=0)
    assert result.dtype == dtype
    assert result.tolist() == [largest // (10 * n) * 10 * n] * 2
    text = refused(strategy, lambda: strategy.reduce("SUM", np.full((10, 2), largest // 10 + 1, dtype), axis=0))
    assert f"a SUM of {dtype} does not fit its dtype" in text
    assert "astype" in text
    text = refused(strategy, lambda: strategy.reduce("PROD", np.full((64, 2), 3, dtype), axis=0))
    assert f"a PROD of {dtype}" in text
    assert strategy.reduce("PROD", np.full((64, 2), 1, dtype), axis=(0, 1)) == 1


def test_a_replica_whose_own_sum_does_not_fit(strategy: Strategy) -> None:
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync
    for dtype in ("int8", "int64"):
        largest = int(np.iinfo(dtype).max)
        # The last replica takes away what the first one has too much.
        mine = np.array([largest, largest] if rank == 0 else [], dtype)
        if rank == n - 1:
            mine = np.concatenate([mine, np.array([-largest, 0], dtype)])
        assert strategy.reduce("SUM", mine, axis=0) == largest
    mine = np.ones(ROWS if rank == 0 else 0, "uint8")
    assert "uint8" in refused(strategy, lambda: strategy.reduce("SUM", mine, axis=0))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "uint64"])
def test_many_sums_along_an_axis(strategy: Strategy, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    rank, n, largest = strategy.communicator.rank, strategy.num_replicas_in_sync, int(np.iinfo(dtype).max)
    backend = strategy.replicas.collective.backend
    sent: list[int] = []
    all_reduce = backend.all_reduce

    def noted(source: Any, total: Any, op: Any) -> None:
        sent.append(source.nbytes)
        all_reduce(source, total, op)

    monkeypatch.setattr(backend, "all_reduce", noted)
    array = np.full((3, 5000), largest // (4 * n), dtype)
    result = strategy.reduce("SUM", array, axis=0)
    assert (result.dtype, set(result.tolist())) == (dtype, {largest // (4 * n) * 3 * n})
    # As many bytes as without the check.
    assert sum(sent) == 5000 * array.itemsize
    # One rank's are too large for that, and all fit.
    array[:, 17] = largest // 3 if rank == 0 else 0
    result = strategy.reduce("SUM", array, axis=0)
    assert set(np.delete(result, 17).tolist()) == {largest // (4 * n) * 3 * n}
    assert result[17] == largest // 3 * 3
    array[:, 17] = largest // 3 if rank == 0 else 1
    assert f"a SUM of {dtype}" in refused(strategy, lambda: strategy.reduce("SUM", array, axis=0))


@pytest.mark.mpi(min_size=2)
def test_sums_over_replicas(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync

    def in_run(value: Any) -> Any:
        context = mpidist.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", value)

    # A Python int is an int64.
    for value in (np.int32(2**31 - 1), 2**62, np.full(3, 200, "uint8"), [np.ones(2), np.full(5000, 2**31 - 1, "i4")]):
        refused(strategy, lambda value=value: strategy.reduce("SUM", value, axis=None))  # type: ignore[misc]
        refused(strategy, lambda value=value: strategy.run(in_run, (value,)))  # type: ignore[misc]
        refused(strategy, lambda value=value: strategy.extended.reduce_to("SUM", value, "cpu:0"))  # type: ignore[misc]
    # The strategy goes on.
    assert strategy.reduce("SUM", 2**62 // n, axis=None) == 2**62 // n * n
    assert strategy.reduce("MEAN", np.full(2, 2**31 - 1, "i4"), axis=None).tolist() == [2**31 - 1] * 2


@pytest.mark.mpi(min_size=2)
def test_in_the_background(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    for count in (3, 5000):
        fits = strategy.extended.all_reduce_async("SUM", np.full(count, 2**31 // n - 1, "i4"))
        too_large = strategy.extended.all_reduce_async("SUM", np.full(count, 2**31 - 1, "i4"))
        later = strategy.extended.all_reduce_async("SUM", np.ones(count))
        assert (fits.wait() == (2**31 // n - 1) * n).all()
        assert "a SUM of int32" in refused(strategy, too_large.wait)
        # An error of this one alone.
        assert (later.wait() == n).all()


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("dtype", [">i4", ">f8", ">u2"])
def test_a_replica_without_rows_in_another_order_of_bytes(strategy: Strategy, op: str, dtype: str) -> None:
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync
    # Only the last replica has rows.
    mine = np.arange(6 if rank == n - 1 else 0).astype(dtype).reshape(-1, 2)
    for axis, wanted in ((0, [0, 1] if op == "MIN" else [4, 5]), ((0, 1), 0 if op == "MIN" else 5)):
        result = strategy.reduce(op, mine, axis=axis)
        assert result.tolist() == wanted
        assert result.dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint64"])
def test_sums_over_micro_batches(strategy: Strategy, dtype: str) -> None:
    n, largest = strategy.num_replicas_in_sync, int(np.iinfo(dtype).max)
    # Small sums go whole, large ones in slices.
    for count in (2, 9000):
        def summed(part: Any, count: int = count) -> Any:
            return {"x": np.full(count, part.sum(dtype=dtype)), "loss": np.float32(0.5)}

        values = np.full(4, largest // (4 * n), dtype)
        result = strategy.gradients(summed, values, 4 * n)
        assert (result["x"].dtype, result["loss"]) == (dtype, 2 * n)
        assert (result["x"] == largest // (4 * n) * 4 * n).all()
        values[1:3] += largest // 4
        refused_text = refused(strategy, lambda values=values: strategy.gradients(summed, 2 * values, 4 * n))  # type: ignore[misc]
        assert f"a SUM of {dtype} does not fit its dtype" in refused_text


def test_negative_micro_batches(strategy: Strategy) -> None:
    rank, low = strategy.communicator.rank, int(np.iinfo("int64").min)
    # The sum of the first two does not fit, that of all does.
    mine = np.array([low, low, -(low + 1), 1], "int64") if rank == 0 else np.zeros(4, "int64")
    assert strategy.gradients(lambda part: part.sum(), mine, 4 * strategy.num_replicas_in_sync) == low
