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
from tests.optimizers import FORMULAS, TORCH, Formula
from tests.parallel.bits import require_same_bits
from tests.parallel.layouts import LAYOUTS, make_strategy
from tests.parallel.optimizers.test_optimizers import WITH_NONES

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", [name for name in TORCH if name not in WITH_NONES])
def test_agrees_with_torch(strategy: Strategy, family: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is what the optimizers are compared with")
    make, case = TORCH[family]
    variables = make_model(strategy, dtype)
    parameters = [torch.nn.Parameter(torch.tensor(v.numpy())) for v in variables]
    reference = case.make(torch, parameters, case.rate)
    train(strategy, make(case.rate), variables)
    for number in range(STEPS):
        for parameter, parts in zip(
            parameters, zip(*all_gradients(number, strategy.communicator.size), strict=True), strict=True
        ):
            parameter.grad = torch.tensor(np.sum([part.astype(dtype) for part in parts], axis=0, dtype=dtype))
        reference.step()
    require_close(strategy, variables, [p.detach().numpy() for p in parameters], dtype)


def clipped(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    for g in gradients:
        p = p - 0.1 * g * min(1.0, 3.0 / max(float(np.sqrt(np.sum(g**2))), 1e-30))
    return p


# Those that PyTorch does not have, and what all optimizers do with a gradient before.
CASES: dict[str, tuple[Callable[[], Optimizer], Formula]] = {
    **{
        name: (functools.partial(getattr(optimizers, row.name), **arguments), formula)
        for name, (row, arguments, formula) in FORMULAS.items() if not row.torch
    },
    "clipnorm": (lambda: optimizers.SGD(0.1, clipnorm=3.0), clipped),
    "clipvalue": (
        lambda: optimizers.SGD(0.1, clipvalue=0.5), lambda p, gs: p - 0.1 * sum(np.clip(g, -0.5, 0.5) for g in gs)
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", CASES)
def test_agrees_with_the_formula(strategy: Strategy, family: str, dtype: str) -> None:
    make, formula = CASES[family]
    variables = make_model(strategy, dtype)
    starts = [v.numpy().astype(np.float64) for v in variables]
    train(strategy, make(), variables)
    sums = [
        [np.asarray(np.sum(parts, axis=0)) for parts in zip(*all_gradients(number, strategy.communicator.size),
                                                            strict=True)]
        for number in range(STEPS)
    ]
    expected = [formula(start, [gradients[i] for gradients in sums]) for i, start in enumerate(starts)]
    if family in FORMULAS and FORMULAS[family][0].takes_signs and dtype == "float32":
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
