"""Nested structures: tuples, lists, dicts, namedtuples and None, with printable paths; over optree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

# None is a leaf: a missing gradient must be seen, not silently dropped. Dictionaries keep their own insertion order
# out of the result: optree sorts keys, so ranks that filled theirs in another order still agree.
_NONE_IS_LEAF = True


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """Local. The leaves in a fixed order, and what `unflatten` needs."""
    leaves, spec = optree.tree_flatten(structure, none_is_leaf=_NONE_IS_LEAF)
    return leaves, spec


def unflatten(spec: Any, leaves: Sequence[Any]) -> Any:
    """Local. The structure of `flatten`, with other leaves."""
    return optree.tree_unflatten(spec, leaves)


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Local. Apply `function` to each leaf; `others` must have the same structure."""
    return optree.tree_map(function, structure, *others, none_is_leaf=_NONE_IS_LEAF)


def leaf_paths(structure: Any) -> list[tuple[str, Any]]:
    """Local. Each leaf with its path as it is written behind the structure's name, as `['layers'][2]`."""
    paths, leaves, _ = optree.tree_flatten_with_path(structure, none_is_leaf=_NONE_IS_LEAF)
    return [("".join(f"[{part!r}]" for part in path), leaf) for path, leaf in zip(paths, leaves, strict=True)]
