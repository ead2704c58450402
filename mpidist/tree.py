"""Nested structures of tuples, lists, dicts, namedtuples and None, with printable paths; a thin layer over optree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

# None is a leaf: otherwise optree would drop a missing gradient silently. optree also sorts the keys of dictionaries,
# and the package relies on it: ranks that filled a dictionary in another order still combine the same leaves.
_NONE_IS_LEAF = True


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """Local. The leaves in a fixed order, and the specification of the structure for `unflatten`."""
    leaves, spec = optree.tree_flatten(structure, none_is_leaf=_NONE_IS_LEAF)
    return leaves, spec


def unflatten(spec: Any, leaves: Sequence[Any]) -> Any:
    """Local. The structure that `flatten` described, with other leaves."""
    return optree.tree_unflatten(spec, leaves)


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Local. Apply `function` to each leaf, with the same leaf of `others`, which must have the same structure."""
    return optree.tree_map(function, structure, *others, none_is_leaf=_NONE_IS_LEAF)


def leaf_paths(structure: Any) -> list[tuple[str, Any]]:
    """Local. Each leaf with its path, written as Python code behind the structure's name: `['layers'][2]`."""
    paths, leaves, _ = optree.tree_flatten_with_path(structure, none_is_leaf=_NONE_IS_LEAF)
    return [("".join(f"[{key!r}]" for key in path), leaf) for path, leaf in zip(paths, leaves, strict=True)]
