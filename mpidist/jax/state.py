"""Trees of JAX in checkpoints."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import numpy as np

from mpidist import checkpoint
from mpidist.errors import CheckpointError
from mpidist.jax.leaves import as_key, is_key

_Nest = dict[str, Any]


class State:
    """Local. Named trees that a checkpoint saves and restores.

        state = mpidist.jax.State(params=params, optimizer=optimizer.init(params))
        checkpoint = mpidist.Checkpoint(state=state)
        ...
        state.params, state.optimizer, loss = step(state.params, state.optimizer, batch)

    Args:
        **trees: The trees: of arrays, numbers and keys of random numbers, the same on every rank. Each becomes an
            attribute, to which the program assigns its new trees. A restore assigns trees of the structure, shapes and
            dtypes that the attributes have then.

    Raises:
        TypeError: A leaf is no array or number.
        AttributeError: A name that was not given to the constructor is read or assigned.
    """

    def __init__(self, **trees: Any) -> None:
        self.__dict__.update(trees)
        for name, tree in trees.items():
            _leaves(name, tree)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"mpidist.jax.State has the trees {', '.join(self.__dict__) or '(none)'}, got {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(
                f"mpidist.jax.State has the trees {', '.join(self.__dict__) or '(none)'}, got {name!r}. Give it to the "
                "constructor"
            )
        self.__dict__[name] = value

    def __repr__(self) -> str:
        counts = (f"{name}: {len(jax.tree.leaves(tree))} leaves" for name, tree in self.__dict__.items())
        return f"<mpidist.jax.State {', '.join(counts)}>"


def _leaves(name: str, tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The leaves of a tree with the parts of their paths."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = (name, *(jax.tree_util.keystr((part,), simple=True) for part in path))
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, numbers.Number)):
            raise TypeError(
                f"mpidist.jax.State: expected trees of arrays and numbers, got {leaf!r:.60} of type "
                f"{type(leaf).__name__} at {'/'.join(parts)}. Keep what is no array out of the tree"
            )
        found.append((parts, leaf))
    if len({parts for parts, _ in found}) < len(found):
        raise TypeError(f"mpidist.jax.State: two leaves of {name!r} have one path, a key 1 and a key '1' for instance")
    return found


def _save(state: State) -> _Nest:
    nest: _Nest = {}
    for name, tree in vars(state).items():
        for parts, leaf in _leaves(name, tree):
            folder = nest
            for part in parts[:-1]:
                folder = folder.setdefault(part, {})
            folder[parts[-1]] = _stored(leaf)
    return nest


def _stored(leaf: Any) -> Any:
    if is_key(leaf):
        return np.asarray(jax.random.key_data(leaf))
    return leaf if isinstance(leaf, numbers.Number) else np.asarray(leaf)


def _load(state: State, nest: _Nest) -> None:
    made = {}
    for name, tree in vars(state).items():
        leaves = [_restored(leaf, _found(nest, parts), "/".join(parts)) for parts, leaf in _leaves(name, tree)]
        made[name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    # All of them or none: a path that is missing leaves the program's trees as they are.
    vars(state).update(made)


def _found(nest: _Nest, parts: tuple[str, ...]) -> Any:
    value: Any = nest
    for part in parts:
        if not isinstance(value, dict) or part not in value:
            raise CheckpointError(
                f"mpidist.jax.State: expected an entry {'/'.join(parts)!r} in the checkpoint, got none. Restore into "
                "trees of the structure that was saved"
            )
        value = value[part]
    return value


def _restored(leaf: Any, value: Any, path: str) -> Any:
    if isinstance(leaf, numbers.Number) and not isinstance(leaf, np.generic):
        return type(leaf)(value)  # type: ignore[call-arg]
    array = np.asarray(value)
    like = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if array.shape != like.shape or array.dtype != like.dtype:
        raise CheckpointError(
            f"mpidist.jax.State: expected an array of shape {like.shape} and dtype {like.dtype} at {path!r}, got "
            f"{array.shape} and {array.dtype} in the checkpoint. Restore into a model of the same sizes"
        )
    if is_key(leaf):
        return as_key(array, leaf)
    return jax.numpy.asarray(array) if isinstance(leaf, jax.Array) else array


checkpoint.register(State, _save, _load)
