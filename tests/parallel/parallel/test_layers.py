"""Layers over logical devices: each equals the unsplit computation, forwards and backwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.parallel import (
    column_parallel_matmul,
    row_parallel_matmul,
    vocabulary_parallel_embedding,
    vocabulary_parallel_softmax_cross_entropy,
)
from tests.helpers.amounts import turns
from tests.parallel.strategy.tpu.making import make_tpu

pytestmark = pytest.mark.mpi

ROWS, INPUTS, HIDDEN, OUTPUTS = 5, 4, 12, 12


def counts(communicator: Communicator) -> list[int]:
    return [count for count in range(1, communicator.size + 1) if communicator.size % count == 0]


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13)


def own(whole: AnyArray, axis: int, devices: int, device: int) -> AnyArray:
    return np.split(whole, devices, axis)[device]


@pytest.mark.parametrize("leading", turns([(ROWS,), (2, 3), ()], 1))
def test_a_product_by_columns_and_then_by_rows(communicator: Communicator, leading: tuple[int, ...]) -> None:
    random = np.random.default_rng(3)
    x, w1, w2 = random.normal(size=(*leading, INPUTS)), random.normal(size=(INPUTS, HIDDEN)), random.normal(
        size=(HIDDEN, OUTPUTS))
    gradient = random.normal(size=(*leading, OUTPUTS))
    hidden = x @ w1
    hidden_gradient = gradient @ w2.T
    flat_x, flat_hidden = x.reshape(-1, INPUTS), hidden.reshape(-1, HIDDEN)
    for count in counts(communicator):
        with make_tpu(communicator, devices=count) as strategy:
            device = strategy.logical_devices.device
            if device == count - 1:
                # What is not contiguous is as good.
                x = np.asfortranarray(x)

            def step(count: int = count, device: int = device, x: AnyArray = x) -> None:
                made, to_x = column_parallel_matmul(x, own(w1, 1, count, device))
                close(made, own(hidden, -1, count, device))
                result, to_hidden = row_parallel_matmul(made, own(w2, 0, count, device))
                close(result, hidden @ w2)
                back, w2_gradient = to_hidden(gradient)
                close(back, own(hidden_gradient, -1, count, device))
                close(w2_gradient, own(flat_hidden.T @ gradient.reshape(-1, OUTPUTS), 0, count, device))
                x_gradient, w1_gradient = to_x(back)
                close(x_gradient, hidden_gradient @ w1.T)
                close(w1_gradient, own(flat_x.T @ hidden_gradient.reshape(-1, HIDDEN), 1, count, device))

            strategy.run(step)


@pytest.mark.parametrize("shape", turns([(7,), (2, 3), (0,), ()], 2))
def test_an_embedding_over_the_vocabulary(communicator: Communicator, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(4)
    table, ids = random.normal(size=(24, 3)), random.integers(0, 24, shape)
    gradient = random.normal(size=(*shape, 3))
    expected = np.zeros_like(table)
    np.add.at(expected, ids.reshape(-1), gradient.reshape(-1, 3))
    for count in counts(communicator):
        with make_tpu(communicator, devices=count) as strategy:
            device = strategy.logical_devices.device

            def step(count: int = count, device: int = device) -> None:
                rows, backward = vocabulary_parallel_embedding(ids, own(table, 0, count, device))
                assert rows.tolist() == table[ids].tolist()
                close(backward(gradient).to_dense(), own(expected, 0, count, device))

            strategy.run(step)


@pytest.mark.parametrize("scale", [1.0, 500.0])
@pytest.mark.parametrize("shape", turns([(6,), (2, 3), ()], 1))
def test_losses_over_the_vocabulary(communicator: Communicator, shape: tuple[int, ...], scale: float) -> None:
    random = np.random.default_rng(5)
    logits, labels = random.normal(size=(*shape, 24)) * scale, random.integers(0, 24, shape)
    gradient = random.normal(size=shape)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chances = np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)
    right = np.eye(24)[labels]
    losses = np.log(np.exp(shifted).sum(axis=-1)) - (shifted * right).sum(axis=-1)
    for count in counts(communicator):
        with make_tpu(communicator, devices=count) as strategy:
            device = strategy.logical_devices.device

            def step(count: int = count, device: int = device) -> None:
                tile = own(logits, -1, count, device)
                made, backward = vocabulary_parallel_softmax_cross_entropy(tile, labels)
                np.testing.assert_allclose(made, losses, rtol=1e-12, atol=1e-12)
                for _ in range(2):
                    close(backward(gradient), own((chances - right) * np.expand_dims(gradient, -1), -1, count, device))
                assert tile.tolist() == own(logits, -1, count, device).tolist()

            strategy.run(step)


def test_without_logical_devices_they_are_the_unsplit_layers() -> None:
    x, w = np.arange(6.0).reshape(2, 3), np.ones((3, 4))
    result, backward = column_parallel_matmul(x, w)
    assert result.tolist() == (x @ w).tolist()
    assert backward(result)[0].tolist() == (result @ w.T).tolist()
    assert row_parallel_matmul(x, w)[0].tolist() == (x @ w).tolist()


def test_wrong_arguments_are_errors_that_name_the_layer(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        devices = strategy.logical_devices.count
        for error, match, call in (
            (ValueError, "column_parallel_matmul: the last dimension of `x`",
             lambda: column_parallel_matmul(np.ones((2, 3)), np.ones((2, 3)))),
            (ValueError, "row_parallel_matmul: `w` must have 2 dimensions",
             lambda: row_parallel_matmul(np.ones((2, 3)), np.ones(3))),
            (TypeError, "column_parallel_matmul: `x` must be an array of floats",
             lambda: column_parallel_matmul(np.ones((2, 3), int), np.ones((3, 3)))),
            (ValueError, f"`ids` must be from 0 to {4 * devices - 1}",
             lambda: vocabulary_parallel_embedding([4 * devices], np.ones((4, 2)))),
            (TypeError, "`ids` must be integers", lambda: vocabulary_parallel_embedding([0.5], np.ones((4, 2)))),
            (ValueError, "`labels` must have the shape of `logits` without",
             lambda: vocabulary_parallel_softmax_cross_entropy(np.ones((2, 4)), [1])),
            (ValueError, "`gradient` must have the shape of the result",
             lambda: column_parallel_matmul(np.ones((2, 3)), np.ones((3, 3)))[1](np.ones((3, 3)))),
        ):
            with pytest.raises(error, match=match) as caught:
                strategy.run(call)
            assert len(set(communicator.all_gather_object(str(caught.value).split(" on logical device")[0]))) == 1
        with strategy.scope(), pytest.raises(RuntimeError, match="row_parallel_matmul was called in cross-replica"):
            row_parallel_matmul(np.ones((2, 3)), np.ones((3, 3)))
    assert mpidist.parallel.__all__ == sorted(mpidist.parallel.__all__)
