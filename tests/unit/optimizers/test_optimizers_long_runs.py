"""Every optimizer over 200 steps, as those of PyTorch and of Keras; half precision is in test_optimizers_halves.py."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray

torch: Any = pytest.importorskip("torch", reason="compared with PyTorch, on which Keras is run, too")
os.environ["KERAS_BACKEND"] = "torch"
keras: Any = importlib.import_module("keras")

# Keras's own: its variables know the first form of NumPy's protocol.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

STEPS = 200
SIZE = 60
# Rounding adds up.
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}
# A float32 holds the rate, as which Keras keeps it.
RATE = 0.125

TORCH: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "SGD": (lambda: optimizers.SGD(RATE), lambda t, p: t.optim.SGD(p, lr=RATE)),
    "Nesterov": (
        lambda: optimizers.SGD(RATE, 0.9, nesterov=True),
        lambda t, p: t.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True),
    ),
    "Adam": (lambda: optimizers.Adam(RATE), lambda t, p: t.optim.Adam(p, lr=RATE, eps=1e-7)),
    "Adam, quick": (
        lambda: optimizers.Adam(RATE, beta_2=0.9, epsilon=1e-3), lambda t, p: t.optim.Adam(p, RATE, (0.9, 0.9), 1e-3)
    ),
    "AdamW": (
        lambda: optimizers.AdamW(RATE, 0.01), lambda t, p: t.optim.AdamW(p, lr=RATE, eps=1e-7, weight_decay=0.01)
    ),
    # Nothing that is added to a gradient, whose place differs.
    "Adamax": (lambda: optimizers.Adamax(RATE, epsilon=1e-30), lambda t, p: t.optim.Adamax(p, lr=RATE, eps=0)),
    "RMSprop": (
        lambda: optimizers.RMSprop(RATE, 0.9, 0.5, 1e-3, True),
        lambda t, p: t.optim.RMSprop(p, lr=RATE, alpha=0.9, momentum=0.5, eps=1e-3, centered=True),
    ),
    "Adagrad": (
        lambda: optimizers.Adagrad(RATE),
        lambda t, p: t.optim.Adagrad(p, lr=RATE, initial_accumulator_value=0.1, eps=1e-7),
    ),
    "Adadelta": (
        lambda: optimizers.Adadelta(1.0, 0.9, 1e-6), lambda t, p: t.optim.Adadelta(p, lr=1.0, rho=0.9, eps=1e-6)
    ),
}
# Without epsilon where its place differs, or with one too small to matter.
KERAS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5, "centered": True, "epsilon": 1e-12},
    "Adam": {"epsilon": 1e-12}, "AdamW": {"epsilon": 1e-12}, "Nadam": {}, "Adamax": {}, "Adagrad": {"epsilon": 0.0},
    "Adadelta": {}, "Ftrl": {"l1_regularization_strength": 0.1, "beta": 0.1}, "Lion": {}, "Lamb": {},
}


def gradient_of(step: int, dtype: str) -> AnyArray:
    generator = np.random.default_rng(step)
    # Of several magnitudes, and none near 0, where rounding would choose the sign of a step.
    sizes = np.logspace(-3, 3, SIZE) * (0.5 + generator.random(SIZE))
    return np.asarray(sizes * generator.choice((-1.0, 1.0), SIZE)).astype(dtype)


def start(dtype: str) -> AnyArray:
    return np.random.default_rng(1000).normal(size=SIZE).astype(dtype)


def require_close(variable: Any, expected: AnyArray, dtype: str, tolerance: float | None = None) -> None:
    assert variable.dtype == expected.dtype == dtype
    most = tolerance or TOLERANCES[dtype]
    np.testing.assert_allclose(variable.numpy(), expected, rtol=most, atol=most)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("name", list(TORCH))
def test_against_pytorch(name: str, dtype: str) -> None:
    make, make_theirs = TORCH[name]
    optimizer, variable = make(), mpidist.Variable(start(dtype))
    parameter = torch.from_numpy(start(dtype)).requires_grad_()
    reference = make_theirs(torch, [parameter])
    for step in range(STEPS):
        optimizer.apply_gradients([(gradient_of(step, dtype), variable)])
        parameter.grad = torch.from_numpy(gradient_of(step, dtype))
        reference.step()
    require_close(variable, parameter.detach().numpy(), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("name", list(KERAS))
def test_against_keras(name: str, dtype: str) -> None:
    optimizer = getattr(optimizers, {"Lamb": "LAMB"}.get(name, name))(RATE, **KERAS[name])
    reference = getattr(keras.optimizers, name)(RATE, **KERAS[name])
    variable, theirs = mpidist.Variable(start(dtype)), keras.Variable(start(dtype), dtype=dtype)
    for step in range(STEPS):
        optimizer.apply_gradients([(gradient_of(step, dtype), variable)])
        reference.apply([keras.ops.convert_to_tensor(gradient_of(step, dtype))], [theirs])
    # Some of its numbers Keras keeps in float32, whatever the variable's dtype; PyTorch shows what float64 gives.
    require_close(variable, keras.ops.convert_to_numpy(theirs), dtype, TOLERANCES["float32"])
