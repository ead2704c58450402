"""Collectives of trees of arrays, inside and outside compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpidist import xla
from mpidist.jax.calls import calls_of
from mpidist.jax.leaves import Leaves
from mpidist.options import ReduceOp, parse_enum
from mpidist.strategy.base import Strategy
from mpidist.strategy.chosen import chosen_strategy


def all_reduce(reduce_op: ReduceOp | str, tree: Any, strategy: Strategy | None = None) -> Any:
    """Collective. Combine each leaf of a tree over all replicas, inside or outside `jax.jit`.

    Inside, all leaves are one call of the program, in XLA's own memory. It can be differentiated (SUM and MEAN, in both
    modes), vectorized by `jax.vmap`, and used in loops, branches and under `jax.checkpoint`. JAX leaves out a call
    whose result nobody uses, so all ranks must trace the same program: if they do not, the call raises on every rank.

    Args:
        reduce_op: SUM, MEAN, MIN, MAX or PROD, or the name in any case.
        tree: Any tree of arrays, with the same structure, shapes and dtypes on every rank.
        strategy: Defaults to that of the scope, else to the only open one.

    Returns:
        The same structure, shapes and dtypes; the MEAN of integers has JAX's default floating dtype.

    Raises:
        ValueError: An unknown operation; no strategy is open, or several are.
        TypeError: A leaf is no array, or the operation is not defined for its dtype.
        MismatchError: Structures, shapes, dtypes, operations or places in the program differ between ranks. Inside
            `jax.jit` this, and other errors of the call, are `jax.errors.JaxRuntimeError` with its text.
    """
    strategy = _chosen(strategy, "all_reduce")
    op = parse_enum(ReduceOp, reduce_op, "reduce_op")
    leaves = Leaves(tree, "mpidist.jax.all_reduce")
    leaves.require_reducible(op)
    arrays = leaves.arrays
    if op is ReduceOp.MEAN:
        arrays = [_as_floating(one) for one in arrays]
    if not _is_inside(leaves):
        return leaves.rebuild(strategy.extended.all_reduce(op, list(arrays)))
    if strategy.num_replicas_in_sync == 1:
        return leaves.rebuild(arrays)
    return leaves.rebuild(calls_of(strategy).all_reduce(op)(arrays) if arrays else [])


def broadcast(tree: Any, strategy: Strategy | None = None) -> Any:
    """Collective. Give every replica the first one's values of a tree, inside or outside `jax.jit`.

    Args:
        tree: Any tree of arrays, numbers and keys of random numbers, with the same structure, shapes and dtypes on
            every rank.
        strategy: See `all_reduce`.

    Returns:
        The same structure, shapes and dtypes.

    Raises:
        ValueError, TypeError, MismatchError: See `all_reduce`.
    """
    strategy = _chosen(strategy, "broadcast")
    leaves = Leaves(tree, "mpidist.jax.broadcast")
    if not _is_inside(leaves):
        return leaves.rebuild(strategy.extended.broadcast(list(leaves.arrays)))
    if strategy.num_replicas_in_sync == 1:
        return leaves.rebuild(leaves.arrays)
    return leaves.rebuild(calls_of(strategy).broadcast()(leaves.arrays) if leaves.arrays else [])


def all_gather(tree: Any, axis: int = 0, strategy: Strategy | None = None) -> Any:
    """Collective. Concatenate each leaf of a tree over all replicas along an axis, in the order of the ranks.

    Args:
        tree: Any tree of arrays of at least one dimension. Outside `jax.jit` sizes may differ between ranks along
            `axis`.
        axis: -ndim to ndim - 1, of each leaf.
        strategy: See `all_reduce`.

    Returns:
        The same structure; inside `jax.jit` each leaf is as many times as long along `axis` as there are replicas.

    Raises:
        ValueError: See `all_reduce`; also a scalar, or an axis out of range.
        TypeError, MismatchError: See `all_reduce`.
    """
    strategy = _chosen(strategy, "all_gather")
    leaves = Leaves(tree, "mpidist.jax.all_gather")
    _require_axis(leaves, axis, "all_gather")
    if not _is_inside(leaves):
        return leaves.rebuild(strategy.extended.all_gather(list(leaves.arrays), axis))
    if strategy.num_replicas_in_sync == 1 or not leaves.arrays:
        return leaves.rebuild(leaves.arrays)
    return leaves.rebuild(_along(axis, leaves.arrays, calls_of(strategy).all_gather()))


def reduce_scatter(
    reduce_op: ReduceOp | str, tree: Any, axis: int = 0, strategy: Strategy | None = None
) -> Any:
    """Collective. Combine each leaf of a tree over all replicas, of which each gets its part along an axis.

    Args:
        reduce_op: See `all_reduce`.
        tree: Any tree of arrays of at least one dimension, with the same structure, shapes and dtypes on every rank.
        axis: -ndim to ndim - 1, of each leaf. Sizes of the parts differ by at most one, and the larger ones come first.
        strategy: See `all_reduce`.

    Returns:
        The same structure: this rank's parts.

    Raises:
        ValueError: See `all_reduce`; also a scalar, or an axis out of range.
        TypeError, MismatchError: See `all_reduce`.
    """
    strategy = _chosen(strategy, "reduce_scatter")
    op = parse_enum(ReduceOp, reduce_op, "reduce_op")
    leaves = Leaves(tree, "mpidist.jax.reduce_scatter")
    leaves.require_reducible(op)
    _require_axis(leaves, axis, "reduce_scatter")
    arrays = [_as_floating(one) for one in leaves.arrays] if op is ReduceOp.MEAN else leaves.arrays
    if not _is_inside(leaves):
        return leaves.rebuild(strategy.extended.reduce_scatter(op, list(arrays), axis))
    if strategy.num_replicas_in_sync == 1 or not arrays:
        return leaves.rebuild(arrays)
    return leaves.rebuild(_along(axis, arrays, calls_of(strategy).reduce_scatter(op)))


def _chosen(strategy: Strategy | None, function: str) -> Strategy:
    found = chosen_strategy(strategy, f"mpidist.jax.{function}")
    calls_of(found)
    return found


def _is_inside(leaves: Leaves) -> bool:
    return leaves.are_recorded or xla.is_recorded()


def _as_floating(array: Any) -> Any:
    """An array of a dtype that a mean has."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(jnp.result_type(float))
    return array


def _along(axis: int, arrays: Sequence[Any], call: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """A call along the first axis, of arrays along another one."""
    moved = [jnp.moveaxis(jnp.asarray(one), axis, 0) for one in arrays]
    return [jnp.moveaxis(one, 0, axis) for one in call(moved)]


def _require_axis(leaves: Leaves, axis: int, function: str) -> None:
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"mpidist.jax.{function}: expected `axis` to be an int, got {axis!r}")
    for name, leaf in zip(leaves.names, leaves.arrays, strict=True):
        ndim = np.ndim(leaf)
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"mpidist.jax.{function}: expected arrays that have an axis {axis}, got one of shape {np.shape(leaf)} "
                f"at {name or 'its root'}. Give a scalar an axis with `jnp.reshape(x, (1,))`"
            )
