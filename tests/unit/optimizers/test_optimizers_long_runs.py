"""Every optimizer over 200 steps, as those of PyTorch and of Keras; half precision is in test_optimizers_halves.py."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray
from tests.optimizers import BY_NAME, FAMILIES, TORCH

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
@pytest.mark.parametrize("name", TORCH)
def test_against_pytorch(name: str, dtype: str) -> None:
    make, case = TORCH[name]
    optimizer, variable = make(RATE), mpidist.Variable(start(dtype))
    parameter = torch.from_numpy(start(dtype)).requires_grad_()
    reference = case.make(torch, [parameter], RATE)
    for step in range(STEPS):
        optimizer.apply_gradients([(gradient_of(step, dtype), variable)])
        parameter.grad = torch.from_numpy(gradient_of(step, dtype))
        reference.step()
    require_close(variable, parameter.detach().numpy(), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.keras_long is not None])
def test_against_keras(name: str, dtype: str) -> None:
    family = BY_NAME[name]
    optimizer = getattr(optimizers, name)(RATE, **(family.keras_long or {}))
    reference = getattr(keras.optimizers, family.keras_name or name)(RATE, **(family.keras_long or {}))
    variable, theirs = mpidist.Variable(start(dtype)), keras.Variable(start(dtype), dtype=dtype)
    for step in range(STEPS):
        optimizer.apply_gradients([(gradient_of(step, dtype), variable)])
        reference.apply([keras.ops.convert_to_tensor(gradient_of(step, dtype))], [theirs])
    # Some of its numbers Keras keeps in float32, whatever the variable's dtype; PyTorch shows what float64 gives.
    require_close(variable, keras.ops.convert_to_numpy(theirs), dtype, TOLERANCES["float32"])
