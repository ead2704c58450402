"""Learning-rate schedules, by their formulas."""

from __future__ import annotations

import math

import pytest

from mpidist.optimizers import CosineDecay, ExponentialDecay, LinearWarmup, PiecewiseConstantDecay


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
