"""Nested structures of tuples, lists, dicts, namedtuples and None, with printable paths; a thin layer over optree.

A subclass of dict is opened like a dict, and comes back as one of its class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree

# None is a leaf: otherwise optree would drop a missing gradient silently. optree also sorts the keys of dictionaries,
# and the package relies on it: ranks that filled a dictionary in another order still combine the same leaves.
_NONE_IS_LEAF = True


# In which subclasses of dict are made known to optree, which otherwise takes them for leaves.
_NAMESPACE = "mpidist"


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """Local. The leaves in a fixed order, and the specification of the structure for `unflatten`."""
    while True:
        leaves, spec = optree.tree_flatten(structure, none_is_leaf=_NONE_IS_LEAF, namespace=_NAMESPACE)
        unknown = {type(leaf) for leaf in leaves if isinstance(leaf, dict)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            optree.register_pytree_node(kind, _open, _close, namespace=_NAMESPACE)


def unflatten(spec: Any, leaves: Sequence[Any]) -> Any:
    """Local. The structure that `flatten` described, with other leaves."""
    return optree.tree_unflatten(spec, leaves)


def keys(spec: Any) -> tuple[str, ...]:
    """Local. The keys of the leaves that are values of dictionaries, the same text on all ranks; else nothing.

    Args:
        spec: The spec of `flatten`.
    """
    paths = spec.paths()
    if all(type(part) is int for path in paths for part in path):
        return ()
    return tuple("/".join(map(_name, path)) for path in paths)


def _name(part: object) -> str:
    """A key as text. The text of an object may have its address, which differs between ranks."""
    return repr(part) if isinstance(part, (str, bytes, int, float)) else type(part).__qualname__


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Local. Apply `function` to each leaf, with the same leaf of `others`, which must have the same structure."""
    leaves, spec = flatten(structure)
    columns = [spec.flatten_up_to(other) for other in others]
    return unflatten(spec, [function(*row) for row in zip(leaves, *columns, strict=True)])


def leaf_paths(structure: Any) -> list[tuple[str, Any]]:
    """Local. Each leaf with its path, written as Python code after the structure's name: `['layers'][2]`."""
    leaves, spec = flatten(structure)
    return [("".join(f"[{key!r}]" for key in path), leaf) for path, leaf in zip(spec.paths(), leaves, strict=True)]


def _open(mapping: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """The values in the order of the keys; the keys, with an empty copy that keeps attributes; and the keys."""
    empty = copy.copy(mapping)
    empty.clear()
    try:
        keys = tuple(sorted(mapping))
    except TypeError:
        keys = tuple(sorted(mapping, key=lambda key: (type(key).__qualname__, str(key))))
    return [mapping[key] for key in keys], (keys, empty), keys


def _close(described: Any, values: Iterable[Any]) -> Any:
    keys, empty = described
    mapping = copy.copy(empty)
    for key, value in zip(keys, values, strict=True):
        mapping[key] = value
    return mapping
