"""Optax transformations that average the gradients over the ranks first."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpidist import xla
from mpidist.errors import MismatchError, mark_shared
from mpidist.jax.calls import calls_of
from mpidist.jax.collectives import all_reduce
from mpidist.jax.leaves import Leaves
from mpidist.options import ReduceOp
from mpidist.strategy.base import Strategy
from mpidist.strategy.chosen import chosen_strategy

# The update functions of distributed transformations, and their strategies.
_distributed: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()


def distribute(
    transformation: optax.GradientTransformation, strategy: Strategy | None = None
) -> optax.GradientTransformationExtraArgs:
    """Local. A transformation whose `update` gets the mean of all replicas' gradients; its methods are Collective.

        optimizer = mpidist.jax.distribute(optax.adam(1e-3))
        ...
        updates, state = optimizer.update(gradients, state, params, rows=len(batch))      # inside jax.jit

    Args:
        transformation: Any transformation of optax, a chain for instance. Transformations that need the mean gradients,
            such as clipping, must be part of it.
        strategy: Defaults to that of the scope, else to the only open one.

    Returns:
        A transformation with the same state. `update` is Collective: all replicas must call it, with gradients of the
        same structure, shapes and dtypes. With the extra argument `rows`, this rank's number of rows (a number, or a
        scalar array), the mean is weighted by rows, as one rank would compute it from all of them; a rank with 0 rows
        counts nothing, whatever its gradients are. Without it all ranks count the same. `init` is Collective outside
        `jax.jit`, where it compares the ranks' parameters. A transformation that is distributed already is returned as
        it is.

    Raises:
        TypeError: `transformation` is none of optax.
        ValueError: No strategy is open, or several are; or it is distributed by another strategy.
    """
    if not isinstance(transformation, optax.GradientTransformation):
        raise TypeError(
            "mpidist.jax.distribute: expected a transformation of optax, such as optax.adam(1e-3), got "
            f"{transformation!r:.80} of type {type(transformation).__name__}"
        )
    strategy = chosen_strategy(strategy, "mpidist.jax.distribute")
    calls_of(strategy)
    if (other := _distributed.get(transformation.update)) is not None:
        if other is not strategy:
            raise ValueError(
                f"mpidist.jax.distribute: the transformation is distributed by {other!r} already, got {strategy!r}. "
                "Distribute the plain transformation of optax"
            )
        return optax.GradientTransformationExtraArgs(transformation.init, transformation.update)
    inner = optax.with_extra_args_support(transformation)

    def init(params: Any) -> Any:
        _require_same(params, strategy)
        return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, *, rows: Any = None, **extra: Any) -> tuple[Any, Any]:
        mean = average(updates, rows, strategy)
        result: tuple[Any, Any] = inner.update(mean, state, params, **extra)
        return result

    _distributed[update] = strategy
    return optax.GradientTransformationExtraArgs(init, update)


def average(tree: Any, rows: Any, strategy: Strategy) -> Any:
    """Collective. The mean of a tree of gradients over replicas, weighted by their rows unless these are None."""
    if rows is None:
        return all_reduce(ReduceOp.MEAN, tree, strategy)
    _require_rows(rows)
    Leaves(tree, "update").require_reducible(ReduceOp.MEAN)
    weight = calls_of(strategy).weight()([rows])[0]
    return all_reduce(ReduceOp.MEAN, jax.tree.map(lambda leaf: _weighted(leaf, weight), tree), strategy)


def _weighted(gradient: Any, weight: Any) -> Any:
    array = jnp.asarray(gradient)
    # A weight has no place in the eight bits of a bfloat16.
    exact = array.astype(jnp.float32) if jnp.finfo(array.dtype).bits < 32 else array
    # The gradients of a rank without rows are the mean of nothing, NaN, which 0 times does not remove.
    return jnp.where(weight > 0, exact * weight.astype(jnp.finfo(exact.dtype).dtype), 0).astype(array.dtype)


def _require_rows(rows: Any) -> None:
    is_number = isinstance(rows, (int, float, np.number)) and not isinstance(rows, bool)
    is_scalar = isinstance(rows, (jax.Array, np.ndarray)) and rows.shape == () and rows.dtype.kind in "iuf"
    if not (is_number or is_scalar):
        raise TypeError(
            f"update: expected `rows` to be this rank's number of rows, got {rows!r:.80} of type "
            f"{type(rows).__name__}. Pass `len(batch)`, or a scalar array"
        )


def _require_same(params: Any, strategy: Strategy) -> None:
    """Raise where the ranks' parameters differ: they would never become the same. Inside a program that is unknown."""
    leaves = Leaves(params, "init")
    if strategy.num_replicas_in_sync == 1 or leaves.are_recorded or xla.is_recorded():
        return
    sums = [(array.shape, str(array.dtype), zlib.crc32(array.tobytes())) for array in map(np.asarray, leaves.arrays)]
    everyone = strategy.extended.all_gather_object(dict(zip(leaves.names, sums, strict=True)))
    for rank, other in enumerate(everyone):
        for name in everyone[0] | other:
            if everyone[0].get(name) != other.get(name):
                raise mark_shared(MismatchError(
                    f"init: expected the same parameters on all ranks, got others at {name or 'their root'} on rank "
                    f"{rank} than on rank 0. Call `params = mpidist.jax.broadcast(params)` before `optimizer.init`"
                ))
