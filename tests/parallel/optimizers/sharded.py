"""What tests of sharded state share: a model, its gradients, and steps that select variables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import LossScaleOptimizer, Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.kinds.sharded_state import ShardedState
from mpidist.variables.variable import BaseVariable
from tests.parallel.layouts import LAYOUTS, lay_out, make_strategy

# The largest has several blocks; a boundary of two nodes is within a variable.
SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (), (0, 2), (50,), (9001,), (40, 8))
# Layouts with more nodes than the others have, and ones that tests of shards need.
ALL_LAYOUTS = (*LAYOUTS, "uneven", "cyclic")
STEPS = 4


def shard_counts(communicator: Communicator, layout: str) -> int:
    """The number of shards: of nodes, or of ranks whose memory is private."""
    if layout in ("private", "full"):
        return communicator.size
    return len(lay_out(communicator, layout).node_sizes)


def make_model(strategy: Strategy, dtype: str = "float32", *, table: bool = False) -> list[BaseVariable]:
    generator = np.random.default_rng(1)
    with strategy.scope():
        return [
            mpidist.Variable(
                generator.normal(size=shape).astype(dtype), name=f"v{i}", sparse_gradient=table and len(shape) == 2
            ) for i, shape in enumerate(SHAPES)
        ]


@functools.lru_cache(256)
def gradient_of(step: int, rank: int, number: int, dtype: str) -> AnyArray:
    """An element has the same sign on all ranks: the order of a sum must not decide the direction of a step."""
    shape = SHAPES[number]
    signs = np.random.default_rng((step, number)).choice((-1.0, 1.0), shape)
    drawn = signs * (0.1 + np.abs(np.random.default_rng((step, rank, number)).normal(size=shape)))
    return np.asarray(drawn).astype(dtype)


def pairs_of(step: int, rank: int, variables: Sequence[BaseVariable]) -> list[tuple[Any, BaseVariable]]:
    """This rank's gradients: every third step is of some variables only, as a GAN makes them."""
    pairs: list[tuple[Any, BaseVariable]] = []
    for number, variable in enumerate(variables):
        if step % 3 == 1 and number in (0, 3, 4):
            continue
        gradient: Any = gradient_of(step, rank, number, variable.dtype.name)
        if variable.sparse_gradient:
            count = variable.shape[0]
            taken = (rank + step) % 3 * 3 if count else 0
            rows = np.random.default_rng((step, rank)).integers(0, max(1, count), taken)
            gradient = IndexedSlices(gradient[rows], rows, variable.shape)
        pairs.append((gradient, variable))
    return pairs


def train(
    strategy: Strategy, optimizer: Any, variables: Sequence[BaseVariable], start: int = 0, stop: int = STEPS
) -> None:
    for step in range(start, stop):
        pairs = pairs_of(step, strategy.communicator.rank, variables)
        strategy.run(optimizer.apply_gradients, args=(pairs,))


def everything(optimizer: Optimizer | LossScaleOptimizer, variables: Sequence[BaseVariable]) -> list[AnyArray]:
    """Collective. All values, and all state."""
    return [one.numpy() for one in (*variables, *optimizer.variables)]


def trained(
    communicator: Communicator, layout: str, make: Any, *, shard_optimizer: bool, dtype: str = "float32",
    table: bool = False, **options: Any,
) -> list[AnyArray]:
    """Collective. All values, and all state, after some steps."""
    strategy = make_strategy(communicator, layout, shard_optimizer=shard_optimizer, **options)
    variables, optimizer = make_model(strategy, dtype, table=table), make()
    optimizer.build(variables)
    train(strategy, optimizer, variables)
    shards = [one for one in optimizer.variables if isinstance(one, ShardedState)]
    # No test passes for the reason that nothing is in shards.
    count = shard_counts(communicator, layout) if strategy.arena.shares_memory else communicator.size
    if optimizer.variables and shard_optimizer and count > 1:
        assert shards
    else:
        assert not shards
    return everything(optimizer, variables)


def require_alike(found: Sequence[AnyArray], expected: Sequence[AnyArray], *, exact: bool, tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        if exact:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(
                one.astype("f8") if one.dtype.kind != "c" else one, other.astype("f8") if other.dtype.kind != "c"
                else other, rtol=tolerance, atol=tolerance,
            )
