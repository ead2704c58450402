"""Gradients that lie in the memory where an optimizer keeps those of other variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import SGD
from mpidist.strategy.base import Strategy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

# What is passed for the variables a and b, given views of the gradients of both.
PASSED: dict[str, Callable[[AnyArray, AnyArray], tuple[Any, Any]]] = {
    "exchanged": lambda a, b: (b, a),
    "parts": lambda a, b: (b.reshape(2, 3)[::-1].reshape(-1), a[::-1]),
    "same": lambda a, b: (b, b),
    "own backwards": lambda a, b: (a[::-1], b[::-1]),
    "rows": lambda a, b: (IndexedSlices(b[:2], np.array([5, 0]), (6,)), IndexedSlices(a[:2], np.array([1, 1]), (6,))),
    "own rows": lambda a, b: (IndexedSlices(a[:2], np.array([5, 5]), (6,)), b),
    "lists": lambda a, b: (b.tolist(), a),
}


@pytest.fixture(params=["node", "private", "pairs", "full"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def dense(gradient: Any) -> AnyArray:
    return gradient.to_dense() if isinstance(gradient, IndexedSlices) else np.array(gradient)


@pytest.mark.parametrize("passed", PASSED)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_gradient_is_read_before_it_is_written_over(strategy: Strategy, passed: str, is_reversed: bool) -> None:
    rank = strategy.communicator.rank
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(6)) for _ in range(2)]
        optimizer = SGD(1.0)
    views = optimizer.gradients(variables)
    for number, view in enumerate(views):
        view[...] = np.arange(6) + 10 * number + 100 * rank
    gradients = PASSED[passed](*views)
    everyones = [np.sum(strategy.communicator.all_gather_object(dense(gradient)), axis=0) for gradient in gradients]
    pairs = list(zip(gradients, variables, strict=True))
    strategy.run(optimizer.apply_gradients, args=(pairs[::-1] if is_reversed else pairs,))
    for variable, total in zip(variables, everyones, strict=True):
        np.testing.assert_array_equal(variable.numpy(), -total)


@pytest.mark.parametrize("passed", PASSED)
def test_so_it_is_in_the_call_that_updates_by_a_mean(strategy: Strategy, passed: str) -> None:
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(6)) for _ in range(2)]
        optimizer = SGD(2.0, gradient_accumulation_steps=2)
    views = optimizer.gradients(variables)
    strategy.run(optimizer.apply_gradients, args=([(np.ones(6), variable) for variable in variables],))
    for number, view in enumerate(views):
        view[...] = np.arange(6) + 10 * number + 100 * rank
    gradients = PASSED[passed](*views)
    everyones = [np.sum(strategy.communicator.all_gather_object(dense(gradient)), axis=0) for gradient in gradients]
    strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    for variable, total in zip(variables, everyones, strict=True):
        np.testing.assert_array_equal(variable.numpy(), -(total + size))


def test_gradients_of_another_library_are_seen_through(strategy: Strategy) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(6)) for _ in range(2)]
        optimizer = SGD(1.0)
    views = optimizer.gradients(variables)
    views[0][...], views[1][...] = 1, 2
    exchanged = [torch.from_numpy(view) for view in reversed(views)]
    strategy.run(optimizer.apply_gradients, args=(list(zip(exchanged, variables, strict=True)),))
    assert [v.numpy()[0] / strategy.num_replicas_in_sync for v in variables] == [-2, -1]
