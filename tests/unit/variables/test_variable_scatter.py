"""Scatter writes on one rank: against NumPy row by row, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.indexed_slices import IndexedSlices

KINDS = ("add", "sub", "mul", "div", "min", "max", "update")


def one_by_one(kind: str, array: Any, indices: Any, values: Any) -> Any:
    result = array.copy()
    for index, value in zip(indices, values, strict=True):
        result[index] = {
            "add": result[index] + value, "sub": result[index] - value, "mul": result[index] * value,
            "div": result[index] / value, "min": np.minimum(result[index], value),
            "max": np.maximum(result[index], value), "update": value,
        }[kind]
    return result


@pytest.mark.parametrize("kind", KINDS)
@given(indices=st.lists(st.integers(0, 4), max_size=12), columns=st.integers(0, 3), seed=st.integers(0, 99))
def test_rows_are_applied_one_after_another(kind: str, indices: list[int], columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = rng.integers(1, 9, (5, columns)).astype("float64")
    values = rng.integers(1, 4, (len(indices), columns)).astype("float64")
    variable = mpidist.Variable(start)
    rows = IndexedSlices(values, np.array(indices, dtype="int32"))
    assert getattr(variable, f"scatter_{kind}")(rows) is variable
    np.testing.assert_allclose(variable.numpy(), one_by_one(kind, start, indices, values))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("kind", "ufunc"),
    [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.true_divide), ("min", np.minimum),
     ("max", np.maximum)],
)
def test_rows_that_are_named_once_have_the_bits_of_any_others(kind: str, ufunc: Any, dtype: str) -> None:
    rng = np.random.default_rng(0)
    start, values = (rng.uniform(1, 100, (9, 5)).astype(dtype) for _ in range(2))
    indices = rng.permutation(9)[:6]
    variable, expected = mpidist.Variable(start), start.copy()
    getattr(variable, f"scatter_{kind}")(IndexedSlices(values[:6], indices))
    ufunc.at(expected, indices, values[:6])
    assert variable.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int64", "complex64"])
def test_dtypes(dtype: str) -> None:
    variable = mpidist.Variable(np.ones(3, dtype))
    variable.scatter_add(IndexedSlices(np.array([2, 3], "int8"), np.array([0, 0])))
    assert variable.numpy().tolist() == [6, 1, 1]
    assert variable.dtype == dtype


@pytest.mark.parametrize(
    ("initial", "rows", "kind", "error", "text"),
    [
        (np.ones(3), np.ones(3), "add", TypeError, "scatter_add takes IndexedSlices"),
        (1.0, IndexedSlices(np.ones(1), np.array([0])), "add", ValueError, r"of an array of shape \(\)"),
        (np.ones((3, 2)), IndexedSlices(np.ones((1, 3)), np.array([0])), "max", ValueError, r"of shape \(1, 3\)"),
        (np.ones(3), IndexedSlices(np.ones(1), np.array([3])), "add", ValueError, "from 0 to 2, got 3 to 3"),
        (np.ones(3), IndexedSlices(np.ones(1), np.array([-1])), "update", ValueError, "got -1"),
        (np.ones(3, int), IndexedSlices(np.ones(1), np.array([0])), "add", TypeError, "expected rows of dtype int64"),
        (np.ones(3, int), IndexedSlices(np.ones(1, int), np.array([0])), "div", TypeError, "scatter_div is not"),
        (np.ones(3, bool), IndexedSlices(np.ones(1, bool), np.array([0])), "sub", TypeError, "scatter_sub is not"),
    ],
)
def test_rows_that_do_not_fit(initial: Any, rows: Any, kind: str, error: type[Exception], text: str) -> None:
    variable = mpidist.Variable(initial, name="w")
    with pytest.raises(error, match=rf"variable 'w'.*{text}"):
        getattr(variable, f"scatter_{kind}")(rows)
    np.testing.assert_array_equal(variable.numpy(), initial)


def test_members_of_tf_variable() -> None:
    variable = mpidist.Variable([1.0], name="w")
    assert variable.device == "/device:CPU:0"
    assert variable.distribute_strategy is None
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        assert mpidist.Variable(1.0).distribute_strategy is strategy
        local = mpidist.Variable(1.0, synchronization="ON_READ", aggregation="SUM")
    assert local.distribute_strategy is strategy
    assert variable.assign([2.0], False, "name", False) is variable
    variable.assign_add([2.0], use_locking=True, name="x", read_value=False)
    variable.assign_sub([1.0], use_locking=True, name="x", read_value=False)
    assert variable.numpy().tolist() == [3]
