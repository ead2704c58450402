"""Losses averaged over the global batch, and what counts as a component."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.strategy.losses import compute_average_loss, scale_regularization_loss
from mpidist.strategy.values import ValueContext, as_array


@pytest.mark.parametrize(
    ("losses", "weights", "batch", "expected"),
    [
        ([1.0, 2.0, 3.0], None, None, 2.0),
        ([1.0, 2.0, 3.0], None, 6, 1.0),
        ([1, 2, 3], None, 4, 1.5),
        ([1.0, 2.0], [1.0, 0.5], 2, 1.0),
        ([1.0, 2.0], 2.0, 2, 3.0),
        # A weight per example counts for all of its losses.
        ([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.0], 2, 1.5),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0], [0.0]], 2, 1.5),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]], 2, 2.5),
        # A replica may be left without examples.
        ([], None, None, 0.0),
        ([], None, 8, 0.0),
        ([1.0, 2.0], [[1.0], [0.5]], 2, 1.0),
        ([[1.0, 2.0], [3.0, 4.0]], [[[1.0], [0.0]], [[0.0], [1.0]]], 2, 2.5),
        ([], None, 0, 0.0),
        ([1.0, 2.0], None, 0, 0.0),
        ([1.0, 2.0], None, np.int64(2), 1.5),
    ],
)
def test_average_loss(losses: Any, weights: Any, batch: int | None, expected: float) -> None:
    loss = compute_average_loss(losses, weights, batch)
    assert loss == pytest.approx(expected)
    assert np.ndim(loss) == 0


def test_average_loss_keeps_the_dtype() -> None:
    for dtype in ("float16", "float32", "float64"):
        assert compute_average_loss(np.ones(3, dtype), np.ones(3), 3).dtype == dtype


def test_average_loss_of_halves_is_rounded_once() -> None:
    assert compute_average_loss(np.full(1000, 100, "float16")) == 100
    assert compute_average_loss(np.ones(4000, named_dtype("bfloat16"))) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1.0,), "one loss per example, got a scalar"),
        (([1.0], None, -3), "must not be negative, got -3"),
        (([1.0, 2.0], [[1.0, 1.0], [2.0, 2.0]]), "must not have more dimensions"),
        (([1.0, 2.0], [[[1.0]], [[2.0]]]), "must not have more dimensions"),
        (([1.0, 2.0], [1.0, 2.0, 3.0]), "broadcast"),
    ],
)
def test_average_loss_of_nonsense(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compute_average_loss(*arguments)


@pytest.mark.parametrize("size", [2.5, 2.0, True, "2", np.ones(2, int)])
def test_a_batch_size_is_an_integer(size: Any) -> None:
    with pytest.raises(TypeError, match="`global_batch_size` must be an integer, got"):
        compute_average_loss([1.0, 2.0], None, size)


def test_average_loss_outside_run_needs_the_size() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        with pytest.raises(RuntimeError, match=r"inside `run`.*or give it `global_batch_size`"):
            compute_average_loss([1.0, 3.0])
        assert compute_average_loss([1.0, 3.0], global_batch_size=2) == 2
    assert strategy.run(compute_average_loss, args=([1.0, 3.0],)) == 2


def test_regularization_is_the_sum_of_all_terms() -> None:
    nests: list[Any] = [
        [1.0, 2.0], (np.float32(1), 2.0), np.array([1.0, 2.0]), {"a": [1.0], "b": np.full((2, 2), 0.5)}
    ]
    for terms in nests:
        loss = scale_regularization_loss(terms)
        assert loss == 3
        assert np.ndim(loss) == 0
    assert scale_regularization_loss([]) == 0
    assert scale_regularization_loss(np.ones(4096, "float16")).dtype == np.float16
    assert scale_regularization_loss(np.ones(4096, "float16")) == 4096


def test_regularization_is_scaled_in_a_replica_only() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    assert strategy.run(scale_regularization_loss, args=(3.0,)) == 3
    assert scale_regularization_loss(3.0) == 3
    with strategy.scope(), pytest.raises(RuntimeError, match="must be called inside `run`"):
        scale_regularization_loss(3.0)


@pytest.mark.parametrize(
    ("leaf", "dtype"), [(1, "int64"), (1.0, "float32"), (True, "bool"), ([1.0, 2.0], "float32"), (np.int8(3), "int8")]
)
def test_components(leaf: Any, dtype: str) -> None:
    assert as_array(leaf).dtype == dtype
    array = np.zeros(3)
    assert as_array(array) is array


def test_what_counts_as_distributed_values() -> None:
    values: list[Any] = [np.zeros(1), np.float32(1), mpidist.Variable(1.0)]
    assert all(isinstance(value, mpidist.DistributedValues) for value in values)
    assert not isinstance("text", mpidist.DistributedValues)


def test_value_context_prints_as_in_tf() -> None:
    context = ValueContext(1, 4)
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 4)
    assert "replica id 1" in str(context)
    assert "total replicas in sync: 4" in str(context)


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        (np.array([True, True, False]), None, 2 / 3),
        (np.full(3, 100, "int8"), None, 100.0),
        (np.full(300, 200, "uint8"), None, 200.0),
        ([2, 4], [0.5, 0.5], 1.5),
        (np.array([True, False]), [0.5, 1.0], 0.25),
        (np.array([1.0, 2.0], ">f4"), None, 1.5),
    ],
)
def test_losses_of_any_dtype_have_their_mean(losses: Any, weights: Any, expected: float) -> None:
    assert compute_average_loss(losses, weights) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [(np.full(3, 100, "int8"), 300), (np.ones(3, bool), 3), (np.ones(3, ">f8"), 3), ([np.ones(2, ">f4"), 1], 3)],
)
def test_terms_of_any_dtype_have_their_sum(terms: Any, expected: float) -> None:
    assert scale_regularization_loss(terms) == expected


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">f8"])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD", "MIN", "MAX"])
def test_bytes_in_the_other_order_are_reduced(op: str, dtype: str) -> None:
    array = np.arange(1, 7).reshape(2, 3)
    found = mpidist.OneDeviceStrategy("cpu:0").reduce(op, array.astype(dtype), axis=0)
    assert found.tolist() == getattr(array, op.lower())(axis=0).tolist()


def test_without_a_strategy_an_axis_is_reduced_all_the_same() -> None:
    alone, one = mpidist.get_strategy(), mpidist.OneDeviceStrategy("cpu:0")
    for strategy in (alone, one):
        assert strategy.reduce("MEAN", np.array([1, 2, 3]), axis=0) == 2
        assert strategy.reduce("SUM", {"a": np.ones((2, 3))}, axis=1)["a"].tolist() == [3, 3]
        with pytest.raises(ValueError, match="nonsense"):
            strategy.reduce("nonsense", np.ones(2), axis=0)


@pytest.mark.parametrize("dtype", ["int64", "float64", "int32", "float32", "uint8"])
def test_arrays_of_other_libraries_keep_their_dtype(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with arrays of PyTorch")
    assert as_array(torch.ones(3, dtype=getattr(torch, dtype))).dtype == dtype
    assert mpidist.Variable(torch.ones(3, dtype=getattr(torch, dtype))).dtype == dtype
