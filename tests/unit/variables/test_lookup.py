"""`embedding_lookup`, its combiners and its gradients, against NumPy on one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.arrays import AnyArray

TABLE = np.random.default_rng(1).normal(size=(7, 2, 3))
IDS = st.lists(st.integers(0, 6), max_size=5)
EXAMPLES = st.lists(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.5, 1, 2, -3])), max_size=5), max_size=4)


@pytest.fixture(scope="module")
def table() -> Any:
    return mpidist.Variable(TABLE, name="table")


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 4), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_ids_of_any_rank(table: Any, shape: tuple[int, ...], dtype: Any) -> None:
    ids = np.random.default_rng(2).integers(0, 7, shape).astype(dtype)
    found = mpidist.embedding_lookup(table, ids)
    assert np.array_equal(found, TABLE[ids])
    assert (found.shape, found.dtype) == ((*shape, 2, 3), TABLE.dtype)
    gradient = np.random.default_rng(3).normal(size=found.shape)
    expected = np.zeros_like(TABLE)
    np.add.at(expected, ids, gradient)
    np.testing.assert_allclose(mpidist.embedding_gradient(table, ids, gradient).to_dense(), expected)


def test_the_lookup_is_a_copy_in_the_order_of_the_request(table: Any) -> None:
    found = table.sparse_read([6, 0, 3, 0])
    assert np.array_equal(found, TABLE[[6, 0, 3, 0]])
    found[...] = 0
    assert np.array_equal(table.numpy(), TABLE)
    assert mpidist.embedding_lookup(table, []).shape == (0, 2, 3)


@pytest.mark.parametrize(("ids", "got"), [([0, 7], "0 to 7"), ([-1, 2], "-1 to 2"), (np.array([[99]]), "99 to 99")])
def test_ids_out_of_range(table: Any, ids: Any, got: str) -> None:
    text = rf"'table' of shape \(7, 2, 3\): expected numbers of rows from 0 to 6, got {got}"
    calls = (
        mpidist.embedding_lookup, lambda table, ids: table.sparse_read(ids),
        lambda table, ids: mpidist.embedding_lookup_sparse(table, [[0], np.ravel(ids)]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call(table, ids)


def test_what_is_no_id_or_no_table(table: Any) -> None:
    for ids in ([0.5], "a", [True], None, [None]):
        with pytest.raises(TypeError, match="'table': expected integers as numbers of rows, got"):
            mpidist.embedding_lookup(table, ids)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match=r"make one array, got \[\[1, 2\], \[3\]\] .*`embedding_lookup_sparse`"):
        mpidist.embedding_lookup(table, [[1, 2], [3]])
    with pytest.raises(ValueError, match="'one' is a scalar, which has no rows"):
        mpidist.embedding_lookup(mpidist.Variable(1.0, name="one"), [0])
    with pytest.raises(TypeError, match="`params` must be a variable of mpidist, the table, got an array"):
        mpidist.embedding_lookup(TABLE, [0])  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_rows_are_clipped_to_a_norm(dtype: str) -> None:
    # Squares of half precision would overflow.
    rows: AnyArray = np.array([[3, 4], [0.3, 0.4], [0, 0], [300, 400]], dtype)
    variable = mpidist.Variable(rows)
    found = mpidist.embedding_lookup(variable, [[0, 1], [2, 3]], max_norm=1.0)
    np.testing.assert_allclose(found.reshape(-1), [0.6, 0.8, 0.3, 0.4, 0, 0, 0.6, 0.8], rtol=1e-3)
    assert found.dtype == rows.dtype
    assert np.array_equal(variable.numpy(), rows), "the table is what it was"
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"`max_norm` must be above 0, got {limit}"):
            mpidist.embedding_lookup(variable, [0], max_norm=limit)


def combined(ids: AnyArray, weights: AnyArray, combiner: str) -> AnyArray:
    """One example by its definition."""
    total = (TABLE[ids] * weights.reshape(-1, 1, 1)).sum(axis=0)
    if combiner == "sum":
        return np.asarray(total)
    by = weights.sum() if combiner == "mean" else np.sqrt((weights**2).sum())
    return np.asarray(total / by) if by else np.zeros_like(total)


@given(EXAMPLES, st.sampled_from(["sum", "mean", "sqrtn", None]), st.booleans())
def test_combiners(table: Any, examples: list[list[tuple[int, float]]], combiner: str | None, weighs: bool) -> None:
    ids = [np.array([one for one, _ in example], int) for example in examples]
    weights = [np.array([weight if weighs else 1.0 for _, weight in example]) for example in examples]
    given_weights = weights if weighs else None
    found = mpidist.embedding_lookup_sparse(table, ids, given_weights, combiner)
    chosen = combiner or "mean"
    expected = [combined(*one, chosen) for one in zip(ids, weights, strict=True)]
    np.testing.assert_allclose(found, np.array(expected).reshape(len(ids), 2, 3), atol=1e-12)
    # The lookup is linear in the table: its gradient is that of the sum of products with any array.
    factors = np.random.default_rng(4).normal(size=found.shape)
    rows = mpidist.embedding_gradient(table, ids, factors, given_weights, chosen)
    np.testing.assert_allclose((rows.to_dense() * TABLE).sum(), (found * factors).sum(), atol=1e-9)


def test_wrong_combinations(table: Any) -> None:
    with pytest.raises(ValueError, match="`combiner` must be one of sum, mean, sqrtn, got 'max'"):
        mpidist.embedding_lookup_sparse(table, [[0]], combiner="max")
    with pytest.raises(ValueError, match=r"must have a weight for each id: expected \[2, 1\] of the first examples"):
        mpidist.embedding_lookup_sparse(table, [[0, 1], [2]], [[1.0], [1.0]])
    with pytest.raises(ValueError, match=r"a list of ids for each example, got ids of shape \(\)"):
        mpidist.embedding_lookup_sparse(table, [0, 1])
    with pytest.raises(TypeError, match="'counts': rows of dtype int32 are not combined"):
        mpidist.embedding_lookup_sparse(mpidist.Variable([[1], [2]], name="counts"), [[0]])
    with pytest.raises(ValueError, match=r"shape of what was looked up, \(2, 2, 3\), got \(3, 2, 3\)"):
        mpidist.embedding_gradient(table, [0, 1], np.ones((3, 2, 3)))
    with pytest.raises(ValueError, match="`sp_weights` need a `combiner`"):
        mpidist.embedding_gradient(table, [0], np.ones((1, 2, 3)), [[1.0]])
