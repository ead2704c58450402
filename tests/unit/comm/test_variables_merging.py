"""Merging rows: against a loop that adds one value after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.arithmetic import rows as merging
from mpidist.comm.arithmetic.rows import merge_rows

AnyArray = np.ndarray[Any, Any]


def merged_by_hand(indices: AnyArray, values: AnyArray) -> dict[int, AnyArray]:
    sums: dict[int, AnyArray] = {}
    for index, value in zip(indices.tolist(), values, strict=True):
        sums[index] = sums[index] + value if index in sums else value.copy()
    return sums


@given(
    st.lists(st.integers(0, 9), max_size=60), st.integers(1, 5), st.integers(0, 3),
    st.sampled_from(["float32", "float64", "complex64"]),
)
def test_sums_go_in_the_order_of_the_values(rows: list[int], parts: int, width: int, dtype: str) -> None:
    indices = np.array(rows, np.int64)
    values = np.random.default_rng(len(rows)).normal(size=(len(rows), width)).astype(dtype)
    expected, before = merged_by_hand(indices, values), values.copy()
    seen: list[int] = []
    for part in range(parts):
        numbers, sums = merge_rows(indices, values, part, parts)
        assert sums.shape == (len(numbers), width)
        assert sums.dtype == values.dtype
        for number, total in zip(numbers.tolist(), sums, strict=True):
            np.testing.assert_array_equal(total, expected[number])
        seen += numbers.tolist()
        sums[...] = 7
    assert seen == sorted(expected)
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize("count", [2, 8, 9, 1000])
def test_rows_of_any_frequency(count: int) -> None:
    values = np.random.default_rng(count).normal(size=(count + 2, 3)).astype("float32")
    indices = np.full(count + 2, 5)
    indices[[0, -1]] = 2
    rows, sums = merge_rows(indices, values)
    expected = merged_by_hand(indices, values)
    np.testing.assert_array_equal(rows, [2, 5])
    np.testing.assert_array_equal(sums, [expected[2], expected[5]])


def test_half_precision_is_added_in_single() -> None:
    # One after another in float16, 2048 + 1 stays 2048.
    values = np.array([[2048], *[[1]] * 20], "float16")
    _, sums = merge_rows(np.zeros(21, np.int64), values)
    assert sums.dtype == np.float16
    assert sums.tolist() == [[2068.0]]


@given(
    st.integers(merging.SORTED_AS_KEYS - 2, 600),
    st.sampled_from([0, 5, 1 << 40, -(1 << 40), (1 << 63) - 700, -(1 << 63)]), st.integers(1, 600),
    st.sampled_from(["int64", "int32", ">i8"]),
)
def test_indices_of_any_size_are_sorted_with_their_places(count: int, least: int, span: int, dtype: str) -> None:
    if dtype == "int32":
        least = max(-(1 << 31), min(least, (1 << 31) - 700))
    indices = (least + np.random.default_rng(count).integers(0, span, count)).astype(dtype)
    values = np.arange(count, dtype=np.float64)[:, None]
    rows, sums = merge_rows(indices, values)
    expected = merged_by_hand(indices, values)
    assert rows.tolist() == sorted(expected)
    assert [float(total[0]) for total in sums] == [float(expected[row][0]) for row in rows.tolist()]
