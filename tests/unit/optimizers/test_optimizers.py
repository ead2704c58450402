"""Optimizers on one rank: hyperparameters, and steps by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.optimizers import SGD, Adam, AdamW, LinearWarmup, Nadam
from tests.optimizers import FORMULAS


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(-0.1), "learning_rate"),
        (lambda: SGD(float("nan")), "learning_rate"),
        (lambda: SGD(0.1, -0.5), "momentum"),
        (lambda: SGD(0.1, nesterov=True), "nesterov=True` needs a `momentum`"),
        (lambda: Adam(beta_1=1.0), "beta_1"),
        (lambda: Adam(beta_2=-0.1), "beta_2"),
        (lambda: Adam(epsilon=-1), "epsilon"),
        (lambda: AdamW(weight_decay=-1), "weight_decay"),
    ],
)
def test_hyperparameters_out_of_range(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("rate", ["0.1", None, True, [0.1]])
def test_a_rate_that_is_no_number(rate: Any) -> None:
    with pytest.raises(TypeError, match="`learning_rate` must be a number or a schedule"):
        SGD(rate)


def test_momentum_by_hand() -> None:
    variable = mpidist.Variable([1.0, 2.0])
    optimizer = SGD(np.float32(0.5), momentum=0.5)
    optimizer.apply_gradients([([1.0, 0.0], variable)])
    optimizer.apply_gradients([(np.array([1.0, 2.0]), variable)])
    assert variable.numpy().tolist() == [1 - 0.5 - 0.75, 2 - 1]
    assert [slot.numpy().tolist() for slot in optimizer.variables] == [[0.75, 1.0]]
    assert repr(optimizer) == "<SGD iterations=2 variables=1>"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_adams_first_step_is_the_rate(dtype: str) -> None:
    variable = mpidist.Variable(np.zeros(3, dtype))
    Adam(0.125).apply_gradients([(np.array([1.0, -4.0, 0.0], dtype), variable)])
    # epsilon is 1e-7 of a gradient of 1.
    tolerance = {"float16": 2e-3, "float32": 3e-7, "float64": 1.01e-7}[dtype]
    np.testing.assert_allclose(variable.numpy(), [-0.125, 0.125, 0], rtol=tolerance)


@pytest.mark.parametrize("case", FORMULAS)
def test_formulas(case: str) -> None:
    """Of gradients that become smaller, so that what is remembered counts."""
    family, arguments, formula = FORMULAS[case]
    generator = np.random.default_rng(0)
    start = generator.normal(size=7)
    gradients = [generator.normal(size=7) * 0.5**step for step in range(6)]
    variable, optimizer = mpidist.Variable(start), getattr(optimizers, family.name)(**arguments)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable.numpy(), formula(start, gradients), rtol=1e-12, atol=1e-12)


def test_nadam_far_from_its_start() -> None:
    """The weights grow no more, and their product is nothing: it is Adam with a look ahead."""
    variable, optimizer = mpidist.Variable(0.0), Nadam(0.125)
    optimizer.apply_gradients([(1.0, variable)])
    optimizer.iterations = 100_000
    before = float(variable.numpy())
    optimizer.apply_gradients([(0.0, variable)])
    slots = [float(slot.numpy()) for slot in optimizer.variables]
    expected = 0.125 * 0.9 * slots[0] / (np.sqrt(slots[1]) + 1e-7)
    assert before - float(variable.numpy()) == pytest.approx(expected, rel=1e-6)


def test_the_rate_may_change_between_steps() -> None:
    variable = mpidist.Variable(0.0)
    optimizer = SGD(LinearWarmup(4, 1.0))
    steps = []
    for _ in range(6):
        before = variable.numpy()
        optimizer.apply_gradients([(1.0, variable)])
        steps.append(float(before - variable.numpy()))
    np.testing.assert_allclose(steps, [0.25, 0.5, 0.75, 1, 1, 1])
    plain = SGD(1.0)
    plain.build([variable])
    plain.learning_rate = 0.0
    before = variable.numpy()
    plain.apply_gradients([(5.0, variable)])
    assert variable.numpy() == before


@pytest.mark.parametrize("rate", ["0.1", b"0.1", True])
def test_what_is_no_number_is_no_learning_rate(rate: Any) -> None:
    with pytest.raises(TypeError, match=r"`learning_rate` must be a number or a schedule, got .* of type "):
        SGD(rate)
    variable = mpidist.Variable(1.0)
    later: Any = SGD(0.1)
    later.learning_rate = rate
    for optimizer, source in ((later, "`learning_rate`"), (SGD(lambda _: rate), "its schedule .* at step 0")):
        with pytest.raises(TypeError, match=f"SGD: the learning rate must be a number, got .* from {source}"):
            optimizer.apply_gradients([(1.0, variable)])
        assert (float(variable.numpy()), optimizer.iterations) == (1.0, 0)
    with pytest.raises(TypeError, match="SGD: the learning rate must be a number"):
        later.state()


def test_before_and_after_build() -> None:
    optimizer = Adam()
    assert optimizer.variables == []
    assert optimizer.state() == {"iterations": 0, "learning_rate": 0.001}
    assert "not built" in repr(optimizer)
    with pytest.raises(ValueError, match="at least one variable"):
        optimizer.apply_gradients([])
    variables = [mpidist.Variable([1.0, 2.0]), mpidist.Variable(3.0)]
    views = optimizer.gradients(variables)
    assert [v.shape for v in views] == [(2,), ()]
    optimizer.build(variables)
    with pytest.raises(ValueError, match="already built on other variables"):
        optimizer.build([mpidist.Variable([1.0, 2.0]), mpidist.Variable(3.0)])
    with pytest.raises(ValueError, match="was not built on variable"):
        optimizer.gradients([mpidist.Variable(1.0)])
    slots = [slot for name, slot in optimizer.state().items() if name not in ("iterations", "learning_rate")]
    assert [len(slot) for slot in slots] == [2, 2]


def test_generators_and_any_order_are_welcome() -> None:
    first, second = mpidist.Variable([1.0], name="a"), mpidist.Variable([1.0], name="b")
    optimizer = SGD(1.0)
    optimizer.build(iter([first, second]))
    optimizer.apply_gradients(zip([[3.0], [2.0]], [second, first], strict=True))
    assert first.numpy() == -1
    assert second.numpy() == -2


def test_integers_are_not_trained() -> None:
    with pytest.raises(TypeError, match="'steps' of dtype int32"):
        SGD().apply_gradients([(1, mpidist.Variable(1, name="steps"))])
