"""The leaves of a tree of JAX, with names for errors; keys of random numbers travel as their data."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpidist.options import ReduceOp

# What `jax.tree` has between its leaves and JAX's arrays.
_ARRAYS = (jax.Array, np.ndarray, np.generic, numbers.Number)


class Leaves:
    """Local. The leaves of a tree.

    Args:
        tree: Any tree of arrays and numbers that `jax.tree` knows.
        caller: The name of the function that got it, for errors.

    Attributes:
        names: The paths of the leaves, as `['dense']['kernel']`.
        arrays: The leaves; of a key of random numbers its data.

    Raises:
        TypeError: A leaf is no array of numbers.
    """

    def __init__(self, tree: Any, caller: str) -> None:
        paths, self._spec = jax.tree_util.tree_flatten_with_path(tree)
        self._caller = caller
        self.names = [jax.tree_util.keystr(path) for path, _ in paths]
        self._given = [leaf for _, leaf in paths]
        for name, leaf in zip(self.names, self._given, strict=True):
            if not isinstance(leaf, _ARRAYS) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm"):
                raise TypeError(
                    f"{caller}: expected a tree of arrays and numbers, got {_describe(leaf)} at {name or 'its root'}. "
                    "Keep what is no array out of the tree, or register its class with `jax.tree_util`"
                )
        self.arrays: list[Any] = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in self._given]

    @property
    def are_recorded(self) -> bool:
        """Local. Whether a leaf belongs to a program that JAX records."""
        return any(isinstance(leaf, jax.core.Tracer) for leaf in self.arrays)

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Local. The tree with other leaves, in their order; those of keys become keys again."""
        pairs = zip(arrays, self._given, strict=True)
        leaves = [as_key(array, leaf) if is_key(leaf) else array for array, leaf in pairs]
        return jax.tree_util.tree_unflatten(self._spec, leaves)

    def require_reducible(self, op: ReduceOp) -> None:
        """Local. Raise TypeError unless an operation is defined for the dtype of each leaf, and none is a key."""
        refused = "c" if op in (ReduceOp.MIN, ReduceOp.MAX) else "b"
        for name, leaf in zip(self.names, self._given, strict=True):
            kind = "key" if is_key(leaf) else np.dtype(getattr(leaf, "dtype", type(leaf))).kind
            if kind == "key" or kind in refused:
                raise TypeError(
                    f"{self._caller}: expected arrays of which {op.name} is defined, got {_describe(leaf)} at "
                    f"{name or 'its root'}. Convert them with `.astype`: booleans have MAX (any) and MIN (all), "
                    "complex numbers SUM and MEAN; keys of random numbers can be broadcast"
                )


def is_key(leaf: object) -> bool:
    """Local. Whether a leaf is an array of keys of random numbers (`jax.random.key`)."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_key(data: Any, like: Any) -> Any:
    """Local. Keys of random numbers of the kind of others, over their data."""
    return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=jax.random.key_impl(like))


def _describe(leaf: Any) -> str:
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return f"an array of shape {leaf.shape} and dtype {leaf.dtype}"
    return f"{leaf!r:.60} of type {type(leaf).__name__}"
