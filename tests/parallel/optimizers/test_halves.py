"""Variables of half precision over ranks: state in float32, wherever gradients and state lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers.optimizer import Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import BaseVariable
from tests.parallel.bits import require_same_bits
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi

# The last one is cut into several blocks and slices.
SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (), (70_001,))
FAMILIES: dict[str, Callable[[], Optimizer]] = {
    "Adam": lambda: optimizers.Adam(0.1),
    "Adam, clipped, copied": lambda: optimizers.Adam(0.1, clipnorm=5.0, master_copy=True),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "LAMB": lambda: optimizers.LAMB(0.1, global_clipnorm=5.0),
    "LARS, averaged": lambda: optimizers.LARS(10.0, use_ema=True, ema_overwrite_frequency=2, master_copy=True),
}


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def gradient_of(step: int, rank: int, shape: tuple[int, ...]) -> AnyArray:
    """Of few bits, so that sums of some ranks are exact in float16."""
    generator = np.random.default_rng((step, rank, len(shape), *shape))
    return np.asarray(generator.integers(-8, 9, shape) * 2.0 ** generator.integers(-2, 4, shape)).astype("f2")


def model() -> list[BaseVariable]:
    # One of float32 between them.
    dtypes = ("float16", "float32", "float16")
    return [
        mpidist.Variable(np.random.default_rng(1).normal(size=shape).astype(dtype), name=f"v{i}")
        for i, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
    ]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_all_layouts_give_the_numbers_of_one_process(strategy: Strategy, name: str) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    with strategy.scope():
        variables = model()
    alone, optimizer, reference = model(), FAMILIES[name](), FAMILIES[name]()
    for step in range(4):
        given = [gradient_of(step, rank, v.shape).astype(v.dtype) for v in variables]
        sums = [
            np.asarray(sum(gradient_of(step, other, v.shape).astype("f8") for other in range(size))).astype(v.dtype)
            for v in variables
        ]
        strategy.run(optimizer.apply_gradients, args=(list(zip(given, variables, strict=True)),))
        reference.apply_gradients(zip(sums, alone, strict=True))
    # Norms are added up in another order.
    tolerance = 0 if name in ("Adam", "Ftrl") else 2e-3
    for variable, expected in zip([*variables, *optimizer.variables], [*alone, *reference.variables], strict=True):
        assert variable.dtype == expected.dtype
        np.testing.assert_allclose(
            variable.numpy().astype("f"), expected.numpy().astype("f"), rtol=tolerance, atol=tolerance,
            err_msg=variable.name,
        )
    assert {v.dtype for v in optimizer.variables} == {np.dtype("f")}
    require_same_bits(strategy.communicator, *(v.numpy() for v in (*variables, *optimizer.variables)))
