"""Families of optimizers over ranks: PyTorch's arithmetic, or the papers' written out in double precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import BaseVariable
from tests.parallel.bits import require_same_bits
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi

# The last one is cut into several blocks and slices.
SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (), (0, 2), (50,), (70_001,))
STEPS = 6


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def make_model(strategy: Strategy, dtype: str) -> list[BaseVariable]:
    generator = np.random.default_rng(1)
    with strategy.scope():
        return [mpidist.Variable(generator.normal(size=shape).astype(dtype), name=f"v{i}")
                for i, shape in enumerate(SHAPES)]


@functools.cache
def all_gradients(step: int, size: int) -> list[list[AnyArray]]:
    """For each rank those of all variables, which are drawn once for all tests.

    An element has the same sign on all ranks. Where a sum is nearly 0, its rounding, which depends on the order of the
    ranks, would decide the direction of a step.
    """
    signs = [np.random.default_rng((step, i)).choice((-1.0, 1.0), shape) for i, shape in enumerate(SHAPES)]
    return [[np.asarray(sign * (0.1 + np.abs(np.random.default_rng((step, rank, i)).normal(size=sign.shape))))
             for i, sign in enumerate(signs)] for rank in range(size)]


def train(strategy: Strategy, optimizer: Any, variables: list[BaseVariable], steps: int = STEPS) -> None:
    for number in range(steps):
        mine = all_gradients(number, strategy.communicator.size)[strategy.communicator.rank]
        pairs = [(gradient.astype(v.dtype), v) for gradient, v in zip(mine, variables, strict=True)]
        strategy.run(optimizer.apply_gradients, args=(pairs,))


def require_close(strategy: Strategy, variables: list[BaseVariable], expected: list[AnyArray], dtype: str) -> None:
    tolerance = 5e-5 if dtype == "float32" else 1e-10
    for variable, array in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), array, rtol=tolerance, atol=tolerance)
    require_same_bits(strategy.communicator, *(variable.numpy() for variable in variables))


TORCH: dict[str, tuple[Callable[[], Optimizer], Callable[[Any, Any], Any]]] = {
    "RMSprop": (lambda: optimizers.RMSprop(0.01), lambda t, p: t.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-7)),
    "RMSprop whole": (
        lambda: optimizers.RMSprop(0.01, 0.8, 0.5, 1e-3, True),
        lambda t, p: t.optim.RMSprop(p, lr=0.01, alpha=0.8, momentum=0.5, eps=1e-3, centered=True),
    ),
    "Adagrad": (
        lambda: optimizers.Adagrad(0.1),
        lambda t, p: t.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, eps=1e-7),
    ),
    "Adadelta": (
        lambda: optimizers.Adadelta(0.5, 0.9, 1e-6), lambda t, p: t.optim.Adadelta(p, lr=0.5, rho=0.9, eps=1e-6)
    ),
    "decayed SGD": (
        lambda: optimizers.SGD(0.1, weight_decay=0.5),
        # Without momentum the decoupled decay is that of the gradient.
        lambda t, p: t.optim.SGD(p, lr=0.1, weight_decay=0.5),
    ),
    "decayed Adam": (
        lambda: optimizers.Adam(0.05, weight_decay=0.1), lambda t, p: t.optim.AdamW(p, lr=0.05, weight_decay=0.1,
                                                                                    eps=1e-7)
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", list(TORCH))
def test_agrees_with_torch(strategy: Strategy, family: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is what the optimizers are compared with")
    make, make_torch = TORCH[family]
    variables = make_model(strategy, dtype)
    parameters = [torch.nn.Parameter(torch.tensor(v.numpy())) for v in variables]
    reference = make_torch(torch, parameters)
    train(strategy, make(), variables)
    for number in range(STEPS):
        for parameter, parts in zip(
            parameters, zip(*all_gradients(number, strategy.communicator.size), strict=True), strict=True
        ):
            parameter.grad = torch.tensor(np.sum([part.astype(dtype) for part in parts], axis=0, dtype=dtype))
        reference.step()
    require_close(strategy, variables, [p.detach().numpy() for p in parameters], dtype)


def lion(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    m = np.zeros_like(p)
    for g in gradients:
        p = p - 0.01 * np.sign(0.8 * m + 0.2 * g)
        m = 0.95 * m + 0.05 * g
    return p


def ftrl(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    n, z = np.full_like(p, 0.2), np.zeros_like(p)
    for g in gradients:
        shrunk = g + 2 * 0.03 * p
        larger = n + g**2
        z = z + shrunk - (larger**0.5 - n**0.5) / 0.1 * p
        quadratic = larger**0.5 / 0.1 + 2 * (0.02 + 0.5 / (2 * 0.1))
        p = np.where(np.abs(z) > 0.4, (np.sign(z) * 0.4 - z) / quadratic, 0.0)
        n = larger
    return p


def lamb(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        p = p - 0.02 * 0.1 * p
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6)
        p_norm, r_norm = np.sqrt(np.sum(p**2)), np.sqrt(np.sum(r**2))
        p = p - 0.02 * (p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1) * r
    return p


def lars(nesterov: bool) -> Callable[[AnyArray, list[AnyArray]], AnyArray]:
    def run(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
        m = np.zeros_like(p)
        for g in gradients:
            p_norm, g_norm = np.sqrt(np.sum(p**2)), np.sqrt(np.sum(g**2))
            ratio = 0.01 * p_norm / (g_norm + 0.05 * p_norm) if p_norm > 0 and g_norm > 0 else 1.0
            move = 0.5 * ratio * (g + 0.05 * p)
            m = 0.9 * m + move
            p = p - (0.9 * m + move if nesterov else m)
        return p
    return run


def clipped(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    for g in gradients:
        p = p - 0.1 * g * min(1.0, 3.0 / max(float(np.sqrt(np.sum(g**2))), 1e-30))
    return p


FORMULAS: dict[str, tuple[Callable[[], Optimizer], Callable[[AnyArray, list[AnyArray]], AnyArray]]] = {
    "Lion": (lambda: optimizers.Lion(0.01, 0.8, 0.95), lion),
    "Ftrl": (lambda: optimizers.Ftrl(0.1, -0.5, 0.2, 0.4, 0.02, 0.03, 0.5), ftrl),
    "LAMB": (lambda: optimizers.LAMB(0.02, 0.9, 0.99, 1e-6, weight_decay=0.1), lamb),
    "LARS": (lambda: optimizers.LARS(0.5, 0.9, 0.05, 0.01), lars(False)),
    "LARS nesterov": (lambda: optimizers.LARS(0.5, 0.9, 0.05, 0.01, nesterov=True), lars(True)),
    "clipnorm": (lambda: optimizers.SGD(0.1, clipnorm=3.0), clipped),
    "clipvalue": (
        lambda: optimizers.SGD(0.1, clipvalue=0.5), lambda p, gs: p - 0.1 * sum(np.clip(g, -0.5, 0.5) for g in gs)
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", list(FORMULAS))
def test_agrees_with_the_formula(strategy: Strategy, family: str, dtype: str) -> None:
    make, formula = FORMULAS[family]
    variables = make_model(strategy, dtype)
    starts = [v.numpy().astype(np.float64) for v in variables]
    train(strategy, make(), variables)
    sums = [
        [np.asarray(np.sum(parts, axis=0)) for parts in zip(*all_gradients(number, strategy.communicator.size),
                                                            strict=True)]
        for number in range(STEPS)
    ]
    expected = [formula(start, [gradients[i] for gradients in sums]) for i, start in enumerate(starts)]
    if family == "Lion" and dtype == "float32":
        # A sign near zero is a matter of rounding: few elements may differ.
        for variable, array in zip(variables, expected, strict=True):
            assert np.sum(np.abs(variable.numpy() - array) > 1e-4) <= 2
        return
    require_close(strategy, variables, expected, dtype)


@pytest.mark.parametrize("make", [
    lambda: (optimizers.LAMB(0.1, clipnorm=1.0), optimizers.LAMB(0.1)),
    lambda: (optimizers.LARS(0.1, 0.0, clipvalue=0.25), optimizers.LARS(0.1, 0.0)),
    lambda: (optimizers.LARS(0.1, global_clipnorm=0.5), optimizers.LARS(0.1)),
])
def test_whole_variables_see_clipped_gradients(
    strategy: Strategy, make: Callable[[], tuple[Optimizer, Optimizer]]
) -> None:
    """The same as without clipping, on gradients clipped beforehand."""
    n = strategy.num_replicas_in_sync
    first, second = make_model(strategy, "float64"), make_model(strategy, "float64")
    clipping, plain = make()
    for number in range(STEPS):
        sums = [np.asarray(np.sum(parts, axis=0)) for parts in zip(*all_gradients(number, n), strict=True)]
        norms = np.array([np.sqrt(np.sum(g**2)) for g in sums])
        if clipping.options.clipnorm:
            cut = [g * min(1, 1 / norm) if norm else g for g, norm in zip(sums, norms, strict=True)]
        elif clipping.options.clipvalue:
            cut = [np.clip(g, -0.25, 0.25) for g in sums]
        else:
            cut = [g * min(1, 0.5 / np.sqrt(np.sum(norms**2))) for g in sums]
        strategy.run(clipping.apply_gradients, args=(zip([g / n for g in sums], first, strict=True),))
        strategy.run(plain.apply_gradients, args=(zip([g / n for g in cut], second, strict=True),))
    require_close(strategy, first, [v.numpy() for v in second], "float64")


def test_variables_and_gradients_of_zero(strategy: Strategy) -> None:
    """The ratio of norms is 1 where one of them is 0; None leaves a variable alone."""
    with strategy.scope():
        zero, still, alone = (mpidist.Variable(np.full(5, start)) for start in (0.0, 2.0, 3.0))
    for optimizer in (optimizers.LARS(0.5, 0.0), optimizers.LAMB(0.5, epsilon=0.1)):
        zero.assign(np.zeros(5))
        pairs = [(np.ones(5) / strategy.num_replicas_in_sync, zero), (np.zeros(5), still), (None, alone)]
        strategy.run(optimizer.apply_gradients, args=(pairs,))
        np.testing.assert_allclose(zero.numpy(), -0.5 if optimizer.name == "LARS" else -0.5 / 1.1, rtol=1e-6)
        np.testing.assert_array_equal(still.numpy(), 2)
        np.testing.assert_array_equal(alone.numpy(), 3)


def test_global_norm_is_over_all_variables_and_dtypes(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(size, dtype)) for size, dtype in
                     [(4, "float32"), (5, "float64"), (1000, "float32")]]
    optimizer = optimizers.SGD(1.0, global_clipnorm=2.0)
    gradients = [np.full(v.shape, 3.0 / n, v.dtype) for v in variables]
    strategy.run(optimizer.apply_gradients, args=(zip(gradients, variables, strict=True),))
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), -3 * 2 / (3 * np.sqrt(1009)), rtol=1e-6)
    # Small ones stay as they are.
    strategy.run(optimizer.apply_gradients, args=([(np.full(4, 0.25 / n), variables[0])],))
    np.testing.assert_allclose(variables[0].numpy(), -2 / np.sqrt(1009) - 0.25, rtol=1e-6)
