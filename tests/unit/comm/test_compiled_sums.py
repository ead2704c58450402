"""Compiled sums have NumPy's bits in every order; where they are stored; sums of squares; what is left to NumPy."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic import compiled_sums, compiler
from mpidist.comm.arithmetic.combine import combine
from mpidist.comm.arithmetic.compiled_sums import MOST_ARRAYS, CompiledSum, add_rows, in_order, sum_of_squares
from mpidist.comm.arithmetic.rows import merge_rows
from mpidist.comm.arithmetic.tree_order import combine_in_tree, pairs_of_leaves
from mpidist.comm.cores import Cores, Quota
from mpidist.options import ReduceOp
from tests.unit.optimizers.test_optimizers_compiled import require_same_bits, values

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite: pip install 'mpidist[fast]'"
)

DTYPES: list[np.dtype[Any]] = [np.dtype("float32"), np.dtype("float64")]
ORDERS: dict[str, Any] = {"in order": (in_order, combine), "in tree": (pairs_of_leaves, combine_in_tree)}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_sums, "LEAST_BYTES", 0)
    monkeypatch.delenv(compiler.VARIABLE, raising=False)
    assert compiler.load()


def arrays_of(dtype: np.dtype[Any], count: int, size: int, seed: int = 0) -> list[AnyArray]:
    return [values(dtype, size, seed + number) for number in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_sums_have_numpys_bits(count: int, order: str, dtype: np.dtype[Any]) -> None:
    pairs_of, by_numpy = ORDERS[order]
    sources = arrays_of(dtype, count, 1003)
    expected, out = np.empty_like(sources[0]), np.empty_like(sources[0])
    by_numpy([source.copy() for source in sources], expected, ReduceOp.SUM)
    before = [source.copy() for source in sources]
    assert CompiledSum(pairs_of, count).add(sources, out)
    require_same_bits(out, expected, "the sum")
    for number, (source, kept) in enumerate(zip(sources, before, strict=True)):
        assert source.tobytes() == kept.tobytes(), f"source {number} has changed"


@pytest.mark.parametrize("target", [0, 1, 3])
def test_the_sum_may_go_over_any_source(target: int) -> None:
    sources = arrays_of(DTYPES[0], 4, 517)
    before, expected = [source.copy() for source in sources], np.empty(517, np.float32)
    combine(before, expected, ReduceOp.SUM)
    assert CompiledSum(in_order, 4).add(sources, sources[target])
    for number, (source, kept) in enumerate(zip(sources, before, strict=True)):
        require_same_bits(source, expected if number == target else kept, f"source {number}")


@pytest.mark.parametrize("order", ORDERS)
def test_the_sum_may_go_to_all(order: str) -> None:
    pairs_of, by_numpy = ORDERS[order]
    sources = arrays_of(DTYPES[1], 5, 333)
    expected = np.empty(333)
    by_numpy([source.copy() for source in sources], expected, ReduceOp.SUM)
    assert CompiledSum(pairs_of, 5).add_to_all(sources)
    for number, source in enumerate(sources):
        require_same_bits(source, expected, f"array {number}")


@settings(deadline=None)
@given(count=st.integers(3, MOST_ARRAYS), size=st.integers(1, 300), in_tree=st.booleans(), seed=st.integers(0, 1000))
def test_any_number_of_any_size(count: int, size: int, in_tree: bool, seed: int) -> None:
    pairs_of, by_numpy = ORDERS["in tree" if in_tree else "in order"]
    sources = arrays_of(DTYPES[seed % 2], count, size, seed)
    room = np.full(size + 2, 7, sources[0].dtype)
    expected = np.empty_like(sources[0])
    by_numpy([source.copy() for source in sources], expected, ReduceOp.SUM)
    assert CompiledSum(pairs_of, count).add(sources, room[1:-1])
    require_same_bits(room[1:-1].copy(), expected, "the sum")
    assert room[0] == room[-1] == 7, "written beside the array"


def test_arrays_that_overlap_are_left_to_numpy() -> None:
    memory = np.arange(1000, dtype=np.float32)
    sources = [memory[:300], memory[300:600], memory[600:900]]
    before = memory.copy()
    compiled = CompiledSum(in_order, 3)
    assert not compiled.add(sources, memory[10:310])
    assert not compiled.add([sources[0], sources[0], sources[1]], sources[0])
    assert memory.tobytes() == before.tobytes()


@pytest.mark.parametrize(
    "sources",
    [
        [np.ones(9, np.float32)] * 2, [np.ones(9, np.float32)] * (MOST_ARRAYS + 1), [np.ones(9, np.int32)] * 3,
        [np.ones(9, np.float16)] * 3, [np.ones(9, np.complex64)] * 3, [np.ones(9, ">f4")] * 3,
        [np.ones(18, np.float32)[::2]] * 3, [np.ones(9, np.float32)] * 2 + [np.ones(9)],
        [np.ones(9, np.float32)] * 2 + [np.ones(8, np.float32)],
        [np.frombuffer(bytes(37), np.uint8)[1:].view("f4")] * 3,
    ],
    ids=[
        "two", "too many", "integers", "halves", "complex", "other byte order", "steps", "dtypes", "sizes", "unaligned",
    ],
)
def test_what_has_no_compiled_form_is_left_to_numpy(sources: list[AnyArray]) -> None:
    compiled = CompiledSum(in_order, len(sources))
    assert not compiled.add(sources, np.empty(9, sources[0].dtype))
    assert not compiled.add_to_all(sources)


def test_small_arrays_and_a_switch_leave_it_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, out = [np.ones(100, np.float32)] * 3, np.empty(100, np.float32)
    monkeypatch.setattr(compiled_sums, "LEAST_BYTES", 401)
    assert not CompiledSum(in_order, 3).add(sources, out)
    assert sum_of_squares(sources[0]) is None
    monkeypatch.setattr(compiled_sums, "LEAST_BYTES", 400)
    assert CompiledSum(in_order, 3).add(sources, out)
    monkeypatch.setenv(compiler.VARIABLE, "0")
    assert not CompiledSum(in_order, 3).add(sources, out)
    assert sum_of_squares(sources[0]) is None


def test_the_compiler_is_loaded_when_it_would_have_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    monkeypatch.setattr(compiler, "is_loaded", lambda: False)

    def load(rank_count: int = 1) -> bool:
        loads.append(rank_count)
        return True

    monkeypatch.setattr(compiler, "load", load)
    monkeypatch.setattr(compiled_sums, "LOAD_AFTER_BYTES", 3 * 400 * 4)
    sources, out = [np.ones(100, np.float32)] * 3, np.empty(100, np.float32)
    compiled = CompiledSum(in_order, 5)
    assert [compiled.add(sources, out) for _ in range(6)] == [False] * 4 + [True] * 2
    assert loads == [5, 5]


@settings(deadline=None)
@given(
    count=st.integers(1, 400), rows=st.integers(1, 300), width=st.integers(0, 70), parts=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_rows_are_merged_with_numpys_bits(count: int, rows: int, width: int, parts: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    # Some rows are far more frequent than others.
    indices = (rows * generator.random(count) ** 4).astype(np.int64) - rows // 2
    given_values = values(DTYPES[seed % 2], max(100, count * width), seed)[: count * width].reshape(count, width)
    for part in range(parts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(compiler.VARIABLE, "0")
            expected_rows, expected = merge_rows(indices, given_values, part, parts)
        mine_rows, mine = merge_rows(indices, given_values, part, parts)
        assert mine_rows.tolist() == expected_rows.tolist()
        require_same_bits(mine, expected, "sums")


def test_merging_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ones, order, counts = np.ones((5, 3), np.float32), np.array([4, 0, 1, 2, 3]), np.array([2, 3])
    sums = add_rows(ones * np.arange(5, dtype=np.float32)[:, None], order, counts)
    assert sums is not None
    assert sums.tolist() == [[4.0] * 3, [6.0] * 3]
    assert add_rows(ones.astype(np.float16), order, counts) is None
    assert add_rows(ones[:, :0], order, counts) is None
    assert add_rows(np.ones((5, 6), np.float32)[:, ::2], order, counts) is None
    # Merging alone is no reason to load the compiler.
    monkeypatch.setattr(compiler, "is_loaded", lambda: False)
    assert add_rows(ones, order, counts) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 4099])
def test_squares(dtype: np.dtype[Any], size: int) -> None:
    array = np.random.default_rng(size).standard_normal(size).astype(dtype)
    squares = sum_of_squares(array)
    assert squares is not None
    assert squares == pytest.approx(math.fsum(float(x) ** 2 for x in array), rel=1e-14)


@pytest.mark.parametrize("place", [0, 16, 40, 49])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_squares_of_extreme_numbers(value: float, place: int) -> None:
    array = np.ones(50, np.float32)
    array[place] = value
    squares = sum_of_squares(array)
    assert squares is not None
    assert math.isnan(squares) if math.isnan(value) else squares == pytest.approx(float(np.float32(value)) ** 2)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    compiler._are_too_many.cache_clear()
    yield
    compiler._are_too_many.cache_clear()


@pytest.mark.parametrize(("quota", "expected"), [(None, True), (1.5, True), (1.0, False)])
def test_ranks_that_would_wait_for_one_another_load_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_compiler: None, quota: float | None,
    expected: bool,
) -> None:
    monkeypatch.setattr(compiler, "is_loaded", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    limit = None if quota is None else Quota((1, 2), quota)
    # Each rank is bound to one core.
    monkeypatch.setattr(compiler, "own_cores", lambda: Cores(frozenset({1}), limit))
    caplog.set_level(logging.INFO, "mpidist")
    assert compiler.load(int(compiler.MOST_RANKS_PER_CORE * 1.5)) is expected
    assert ("would wait for one another" in caplog.text) is not expected
    assert not compiler.load(2 * compiler.MOST_RANKS_PER_CORE + 1)
