"""Learning-rate schedules, by their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from mpidist.optimizers import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LinearWarmup,
    PiecewiseConstantDecay,
    PolynomialDecay,
)

wrong: Any = "a"


def test_exponential_decay() -> None:
    smooth, stairs = ExponentialDecay(0.1, 10, 0.5), ExponentialDecay(0.1, 10, 0.5, staircase=True)
    assert [smooth(0), smooth(10), smooth(20)] == pytest.approx([0.1, 0.05, 0.025])
    assert smooth(5) == pytest.approx(0.1 * math.sqrt(0.5))
    assert [stairs(0), stairs(9), stairs(10), stairs(25)] == pytest.approx([0.1, 0.1, 0.05, 0.025])


def test_cosine_decay() -> None:
    schedule = CosineDecay(2.0, 100, alpha=0.1)
    assert [schedule(0), schedule(50), schedule(100), schedule(1000)] == pytest.approx([2, 1.1, 0.2, 0.2])
    rates = [schedule(step) for step in range(101)]
    assert rates == sorted(rates, reverse=True)


def test_cosine_decay_after_a_line_upwards() -> None:
    schedule = CosineDecay(0.5, 100, alpha=0.1, warmup_target=2.0, warmup_steps=10)
    assert [schedule(0), schedule(5), schedule(10), schedule(60), schedule(110), schedule(1000)] == pytest.approx(
        [0.5, 1.25, 2, 1.1, 0.2, 0.2]
    )
    # A target without steps is where the decay begins.
    assert CosineDecay(0.5, 100, warmup_target=2.0)(0) == 2
    with pytest.raises(ValueError, match=r"`warmup_steps` needs a `warmup_target`.*got 10 steps and no rate"):
        CosineDecay(0.5, 100, warmup_steps=10)
    with pytest.raises(TypeError, match="CosineDecay: `warmup_target` must be a number"):
        CosineDecay(0.5, 100, 0.0, wrong)


def test_piecewise_constant_decay() -> None:
    schedule = PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.1])  # type: ignore[arg-type]  # lists are taken, too
    assert [schedule(step) for step in (0, 10, 11, 20, 21, 99)] == [1, 1, 0.5, 0.5, 0.1, 0.1]
    assert hash(schedule) == hash(PiecewiseConstantDecay((10, 20), (1.0, 0.5, 0.1)))
    with pytest.raises(ValueError, match="one more value than boundaries, got 2 values and 2 boundaries"):
        PiecewiseConstantDecay((10, 20), (1.0, 0.5))


def test_linear_warmup() -> None:
    constant, decaying = LinearWarmup(4, 0.8), LinearWarmup(2, ExponentialDecay(1.0, 1, 0.5))
    assert [constant(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert [decaying(step) for step in range(4)] == pytest.approx([0.5, 0.5, 0.25, 0.125])
    assert LinearWarmup(0, 0.3)(0) == 0.3


def test_inverse_time_decay() -> None:
    smooth, stairs = InverseTimeDecay(0.1, 10, 0.5), InverseTimeDecay(0.1, 10, 0.5, staircase=True)
    assert [smooth(0), smooth(5), smooth(20)] == pytest.approx([0.1, 0.08, 0.05])
    assert [stairs(9), stairs(10), stairs(25)] == pytest.approx([0.1, 0.1 / 1.5, 0.05])


def test_polynomial_decay() -> None:
    line = PolynomialDecay(1.0, 10, 0.1)
    assert [line(0), line(5), line(10), line(99)] == pytest.approx([1, 0.55, 0.1, 0.1])
    again = PolynomialDecay(1.0, 10, 0.0, power=2, cycle=True)
    assert [again(0), again(5), again(10), again(15), again(20)] == pytest.approx([1, 0.25, 0, 0.0625, 0])


@pytest.mark.parametrize("t_mul", [1.0, 1.0001, 1.1, 2.0, 3.0, 7.0])
def test_cosine_decay_restarts_at_the_end_of_each_period(t_mul: float) -> None:
    schedule = CosineDecayRestarts(1.0, 1000, t_mul, m_mul=0.5)
    begin, height = 0.0, 1.0
    for period in range(6):
        end = begin + 1000 * t_mul**period
        rates = [schedule(step) for step in range(math.ceil(begin), math.ceil(end), 100)]
        assert rates == sorted(rates, reverse=True)
        assert schedule(math.ceil(begin)) == pytest.approx(height, rel=1e-5)
        assert schedule(math.ceil(end) - 1) < height * 1e-5
        begin, height = end, height / 2


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: CosineDecay(0.1, 0), ValueError, "CosineDecay: `decay_steps` must be a number of steps above 0"),
        (lambda: CosineDecay(0.1, wrong), TypeError, "CosineDecay: `decay_steps` must be a number, got 'a'"),
        (lambda: CosineDecay(math.nan, 5), ValueError, "CosineDecay: `initial_learning_rate`.*must be finite, got nan"),
        (lambda: CosineDecay(0.1, 5, -1), ValueError, "CosineDecay: `alpha` must not be negative"),
        (lambda: ExponentialDecay(-0.1, 5, 0.5), ValueError, "ExponentialDecay: `initial_learning_rate` must not"),
        (lambda: ExponentialDecay(0.1, -5, 0.5), ValueError, "ExponentialDecay: `decay_steps` must be .*got -5"),
        (lambda: ExponentialDecay(0.1, 5, -0.5), ValueError, "ExponentialDecay: `decay_rate` must not be negative"),
        (lambda: ExponentialDecay(0.1, 5, 0.5, wrong), TypeError, "ExponentialDecay: `staircase` must be True or"),
        (lambda: InverseTimeDecay(0.1, 0, 0.5), ValueError, "InverseTimeDecay: `decay_steps` must be"),
        (lambda: InverseTimeDecay(0.1, 5, -1), ValueError, "InverseTimeDecay: `decay_rate` must not be negative"),
        (lambda: InverseTimeDecay(0.1, 5, 1, wrong), TypeError, "InverseTimeDecay: `staircase` must be True or"),
        (lambda: PolynomialDecay(0.1, 0), ValueError, "PolynomialDecay: `decay_steps` must be"),
        (lambda: PolynomialDecay(0.1, 5, wrong), TypeError, "PolynomialDecay: `end_learning_rate` must be a number"),
        (lambda: PolynomialDecay(0.1, 5, power=-1), ValueError, "PolynomialDecay: `power` must not be negative"),
        (lambda: PolynomialDecay(0.1, 5, cycle=wrong), TypeError, "PolynomialDecay: `cycle` must be True or False"),
        (lambda: CosineDecayRestarts(0.1, 0), ValueError, "CosineDecayRestarts: `first_decay_steps` must be"),
        (lambda: CosineDecayRestarts(0.1, 5, 0.5), ValueError, "CosineDecayRestarts: `t_mul` must be at least 1"),
        (lambda: CosineDecayRestarts(0.1, 5, m_mul=-1), ValueError, "CosineDecayRestarts: `m_mul` must not be"),
        (lambda: PiecewiseConstantDecay(wrong, wrong), TypeError, "Decay: `boundaries\\[0\\]` must be a number"),
        (lambda: PiecewiseConstantDecay((3, 2), (1, 1, 1)), ValueError, "`boundaries` must increase, got \\(3, 2\\)"),
        (lambda: PiecewiseConstantDecay((3,), (1, -1)), ValueError, "`values\\[1\\]` must not be negative"),
        (lambda: LinearWarmup(-5, 0.1), ValueError, "LinearWarmup: `warmup_steps` must be an integer of at least 0"),
        (lambda: LinearWarmup(5, wrong), TypeError, "LinearWarmup: expected a rate, or a schedule.*`after` must be"),
    ],
)
def test_what_is_no_schedule_is_an_error_at_once(
    build: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build()
