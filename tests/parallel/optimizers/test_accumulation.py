"""Calls that only accumulate: whose gradients they bring, what ranks lack, and updates before the last call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, is_shared
from mpidist.optimizers import LAMB, SGD, Adam, ExponentialDecay, LossScaleOptimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import BaseVariable
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def make(strategy: Strategy) -> list[BaseVariable]:
    with strategy.scope():
        return [mpidist.Variable(np.zeros(size), name=name) for name, size in (("a", 2), ("b", 3), ("c", 4))]


def step(strategy: Strategy, optimizer: Any, pairs: list[tuple[Any, BaseVariable]]) -> None:
    strategy.run(optimizer.apply_gradients, args=(pairs,))


def values(variables: list[BaseVariable]) -> list[float]:
    for variable in variables:
        assert len(set(variable.numpy().tolist())) == 1
    return [float(variable.numpy()[0]) for variable in variables]


def test_ranks_may_use_variables_in_another_order(strategy: Strategy) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    variables = make(strategy)
    optimizer = SGD(1.0, gradient_accumulation_steps=2)
    optimizer.build(variables)
    a, b = (np.ones(2), variables[0]), (np.ones(3), variables[1])
    for _ in range(2):
        step(strategy, optimizer, [a] if rank == 0 else [b])
        step(strategy, optimizer, [b] if rank == 0 else [a])
    assert values(variables) == [-size, -size, 0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("calls", [1, 2])
def test_a_missing_gradient_is_an_error_that_names_it(strategy: Strategy, calls: int) -> None:
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    variables = make(strategy)
    optimizer = SGD(1.0, gradient_accumulation_steps=2 if calls == 2 else None)
    optimizer.build(variables)
    pairs = [(None if odd and v.name == "b" else np.ones(v.shape), v) for v in variables]
    if calls == 2:
        step(strategy, optimizer, pairs)
    with pytest.raises(MismatchError) as caught:
        step(strategy, optimizer, pairs)
    text = str(caught.value)
    assert is_shared(caught.value)
    assert "gradients for 2 of 3 variables ('a', 'c') and none for 'b' " in text
    assert "gradients for 3 of 3 variables: 'a', 'b', 'c'" in text
    assert "missing_gradients='zero'" in text
    assert "step 1, learning rate 1, " in text
    assert f"rank {strategy.communicator.size - 1}" in text
    assert values(variables) == [0, 0, 0]


@pytest.mark.parametrize("options", [
    {}, {"clipnorm": 1e9}, {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2, "use_ema": True},
], ids=str)
def test_missing_gradients_count_as_zeros(strategy: Strategy, options: dict[str, Any]) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    variables = make(strategy)
    optimizer = SGD(1.0, missing_gradients="zero", **options)
    optimizer.build(variables)
    calls = options.get("gradient_accumulation_steps", 1)
    for number in range(2 * calls):
        # Views of the gradients hold what the last step has left there.
        optimizer.gradients(variables)[0][...] = 7
        # The first rank uses a, and the others b; in the second call of an accumulation nobody does anything.
        used = [] if number % calls else [variables[0 if rank == 0 else 1]]
        step(strategy, optimizer, [(np.ones(v.shape), v) for v in used])
    assert values(variables) == [-2 / calls, -2 / calls * (size - 1), 0]


def test_a_variable_that_no_rank_uses_stays_as_it_is(strategy: Strategy) -> None:
    """Momentum would move it with a gradient of zero."""
    variables = make(strategy)
    optimizer = SGD(1.0, 0.5, missing_gradients="zero")
    step(strategy, optimizer, [(np.ones(v.shape), v) for v in variables])
    before = values(variables)
    step(strategy, optimizer, [(np.ones(2), variables[0])] if strategy.communicator.rank == 0 else [])
    assert values(variables)[1:] == before[1:]
    with pytest.raises(ValueError, match="no gradients for any of"):
        step(strategy, optimizer, [])


def test_missing_rows_are_no_rows(communicator: Communicator) -> None:
    for layout in ("node", "private", "pairs"):
        strategy = make_strategy(communicator, layout)
        with strategy.scope():
            table, weight = mpidist.Variable(np.zeros((5, 2)), sparse_gradient=True), mpidist.Variable(np.zeros(3))
        optimizer = SGD(1.0, missing_gradients="zero")
        optimizer.build([table, weight])
        rows = mpidist.IndexedSlices(np.ones((1, 2)), np.array([3]))
        for _ in range(2):
            step(strategy, optimizer, [(rows, table)] if communicator.rank == 0 else [(np.ones(3), weight)])
        assert table.numpy()[:, 0].tolist() == [0, 0, 0, -2, 0]
        assert weight.numpy().tolist() == [-2.0 * (communicator.size - 1)] * 3


@pytest.mark.mpi(min_size=2)
def test_rows_of_a_step_that_ranks_have_refused_are_in_no_later_one(communicator: Communicator) -> None:
    for layout in ("node", "private", "pairs"):
        strategy = make_strategy(communicator, layout)
        with strategy.scope():
            table = mpidist.Variable(np.zeros((5, 2)), sparse_gradient=True)
        optimizer = SGD(1.0, missing_gradients="zero")
        optimizer.build([table])
        refused, rows = (mpidist.IndexedSlices(np.ones((1, 2)), np.array([row])) for row in (1, 3))
        optimizer.learning_rate = 0.5 if communicator.rank == 0 else 1.0
        with pytest.raises(MismatchError, match="learning rate"):
            step(strategy, optimizer, [(refused, table)])
        optimizer.learning_rate = 1.0
        step(strategy, optimizer, [(rows, table)] if communicator.rank == 0 else [])
        assert table.numpy()[:, 0].tolist() == [0, 0, 0, -1, 0]


@pytest.mark.parametrize("kind", ["plain", "norms", "scaled"])
def test_flush_applies_the_mean_of_the_calls_that_were_made(strategy: Strategy, kind: str) -> None:
    size = strategy.num_replicas_in_sync
    variables = make(strategy)
    rate = ExponentialDecay(1.0, 3, 0.5, staircase=True)
    inner = SGD(rate, gradient_accumulation_steps=3, clipnorm=1e9 if kind == "norms" else None)
    optimizer: Any = LossScaleOptimizer(inner, 1.0) if kind == "scaled" else inner
    optimizer.flush()
    optimizer.build(variables)
    strategy.run(optimizer.flush)
    assert (values(variables), inner.iterations) == ([0, 0, 0], 0)
    for number in (1.0, 3.0):
        step(strategy, optimizer, [(np.full(v.shape, number), v) for v in variables[:2]])
    strategy.run(optimizer.flush)
    assert (values(variables), inner.iterations) == ([-2 * size, -2 * size, 0], 3)
    strategy.run(optimizer.flush)
    # The next window is whole, and its rate that of the second update.
    for _ in range(3):
        step(strategy, optimizer, [(np.ones(2), variables[0])])
    assert (values(variables), inner.iterations) == ([-2.5 * size, -2 * size, 0], 6)


def test_flush_of_a_sum_that_is_not_finite_is_skipped(strategy: Strategy) -> None:
    variables = make(strategy)
    optimizer = LossScaleOptimizer(SGD(1.0, gradient_accumulation_steps=3), 4.0)
    optimizer.build(variables)
    step(strategy, optimizer, [(np.full(2, np.inf), variables[0])])
    strategy.run(optimizer.flush)
    assert (values(variables), optimizer.dynamic_scale, optimizer.iterations) == ([0, 0, 0], 2, 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("calls", [(0, 1), (1, 2)])
def test_other_numbers_of_calls_are_an_error_on_all_ranks(strategy: Strategy, calls: tuple[int, int]) -> None:
    variables = make(strategy)
    optimizer = SGD(1.0, gradient_accumulation_steps=3)
    optimizer.build(variables)
    for _ in range(calls[strategy.communicator.rank > 0]):
        step(strategy, optimizer, [(np.ones(2), variables[0])])
    match = r"the number of calls .* at `flush`, must be the same.* on rank 0; "
    with pytest.raises(MismatchError, match=match) as caught:
        strategy.run(optimizer.flush)
    assert is_shared(caught.value)
    assert values(variables) == [0, 0, 0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("kind", ["arrays", "views", "scaled", "flush"])
def test_an_update_that_ranks_have_refused_loses_no_call(strategy: Strategy, kind: str, dtype: str) -> None:
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(size, dtype)) for size in (2, 3)]
    optimizer = SGD(1.0, gradient_accumulation_steps=3)
    optimizer.build(variables)
    scaled = LossScaleOptimizer(optimizer, 4.0)
    chosen: Any = scaled if kind == "scaled" else optimizer

    def pairs(number: float) -> list[tuple[Any, BaseVariable]]:
        scale = 4 if kind == "scaled" else 1
        return [(np.full(v.shape, scale * number, dtype), v) for v in variables]

    step(strategy, chosen, pairs(2.0))
    step(strategy, chosen, pairs(3.0))
    last = pairs(4.0)
    if kind in ("views", "scaled"):
        views = optimizer.gradients(variables)
        for view, (gradient, _) in zip(views, last, strict=True):
            view[...] = gradient
        last = list(zip(views, variables, strict=True))
    update = optimizer.flush if kind == "flush" else lambda: chosen.apply_gradients(last)
    for rate in (0.5, 0.25):
        chosen.learning_rate = rate if strategy.communicator.rank == 0 else 1.0
        with pytest.raises(MismatchError, match="learning rate"):
            strategy.run(update)
        assert (values(variables), optimizer.iterations) == ([0, 0], 2)
    chosen.learning_rate = 1.0
    strategy.run(update)
    mean = 2.5 if kind == "flush" else 3
    assert (values(variables), optimizer.iterations) == ([-mean * strategy.num_replicas_in_sync] * 2, 3)
    for _ in range(3):
        step(strategy, chosen, pairs(1.0))
    assert values(variables) == [-(mean + 1) * strategy.num_replicas_in_sync] * 2


def test_without_accumulation_there_is_nothing_to_flush(strategy: Strategy) -> None:
    variables = make(strategy)
    optimizer = SGD(1.0)
    step(strategy, optimizer, [(np.ones(2), variables[0])])
    before = values(variables)
    strategy.run(optimizer.flush)
    assert (values(variables), optimizer.iterations) == (before, 1)


@pytest.mark.parametrize("frequency", [None, 2])
@pytest.mark.parametrize("name", ["SGD", "Adam", "LAMB"])
def test_averages_move_in_each_call_as_those_of_keras(strategy: Strategy, name: str, frequency: int | None) -> None:
    """Keras's arithmetic, written out: every call moves the average towards the variable, as this is after the call."""
    size, count = strategy.num_replicas_in_sync, 3
    with strategy.scope():
        variables = [mpidist.Variable(np.ones(5)), mpidist.Variable(np.ones(70_000))]
    own: dict[str, Any] = {"use_ema": True, "ema_momentum": 0.75, "ema_overwrite_frequency": frequency}
    kinds: dict[str, Any] = {
        "SGD": lambda **options: SGD(0.25, **options), "Adam": lambda **options: Adam(0.25, clipnorm=2.0, **options),
        "LAMB": lambda **options: LAMB(0.25, **options),
    }
    optimizer = kinds[name](gradient_accumulation_steps=count, **own)
    optimizer.build(variables)
    alone, reference = [mpidist.Variable(v.numpy()) for v in variables], kinds[name]()
    averages = [v.numpy() for v in alone]
    for call in range(4 * count + 2):
        window = call // count
        # In one window the second variable has no gradient.
        used = range(1 if window == 2 else 2)
        gradient = float(call % count + 1)
        step(strategy, optimizer, [(np.full(variables[i].shape, gradient / size), variables[i]) for i in used])
        if call % count == count - 1:
            reference.apply_gradients([(np.full(alone[i].shape, 2.0), alone[i]) for i in used])
        for i, variable in enumerate(alone):
            averages[i] = variable.numpy() if window == 0 else 0.75 * averages[i] + 0.25 * variable.numpy()
            if frequency is not None and (window + 1) % frequency == 0:
                variable.assign(averages[i])
        for variable, expected in zip(variables, alone, strict=True):
            np.testing.assert_allclose(
                variable.numpy(), expected.numpy(), rtol=1e-9, atol=1e-12, err_msg=f"call {call}"
            )
    # In the middle of a window.
    strategy.run(optimizer.finalize_variable_values)
    for variable, average in zip(variables, averages, strict=True):
        np.testing.assert_allclose(variable.numpy(), average, rtol=1e-9, atol=1e-12)
