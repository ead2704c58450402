"""Padding: batches of elements whose arrays differ in size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import tree
from mpidist.data.reading import element as elements
from mpidist.data.reading.element import ArraySpec


@dataclass(frozen=True)
class Padding:
    """How elements are made equally large.

    Attributes:
        shapes: The structure of an element with a shape for each array, None or -1 where the longest of the batch
            decides; None: that everywhere.
        values: One value, or the structure with one for each array; None pads with zeros (False, empty strings).
    """

    shapes: Any
    values: Any

    @property
    def is_open(self) -> bool:
        """Local. Whether the size depends on the elements, so that the whole batch has to be seen."""
        return self.shapes is None or any(size in (None, -1) for shape in _shapes_in(self.shapes) for size in shape)

    def stack(self, batch: Sequence[Any]) -> Any:
        """Local. One batch of elements of the same structure, at least one.

        Raises:
            ValueError: Structures, dtypes or numbers of dimensions differ, or an array is larger than its shape.
        """
        flat = [tree.flatten(one) for one in batch]
        spec = flat[0][1]
        if any(other != spec for _, other in flat):
            raise ValueError(f"padded_batch: elements must have the same structure, got {[s for _, s in flat]}")
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        shapes = [None] * len(columns) if self.shapes is None else _shapes_in(self.shapes)
        is_nest = isinstance(self.values, (tuple, dict))
        values = tree.flatten(self.values)[0] if is_nest else [self.values] * len(columns)
        if not len(shapes) == len(values) == len(columns):
            raise ValueError(
                f"padded_batch: expected one padded shape and one padding value for each of the {len(columns)} arrays "
                f"of an element, got {self.shapes!r} and {self.values!r}"
            )
        return tree.unflatten(
            spec, [_padded(*one) for one in zip(columns, shapes, values, strict=True)]
        )

    def spec(self, spec: Any) -> Any:
        """Local. `ArraySpec`s of a batch, with None where the elements decide."""
        leaves, structure = tree.flatten(spec)
        shapes = [None] * len(leaves) if self.shapes is None else _shapes_in(self.shapes)
        opened = []
        for leaf, shape in zip(leaves, shapes, strict=True):
            sizes = [None if size in (None, -1) else size for size in shape or (None,) * (len(leaf.shape) - 1)]
            opened.append(ArraySpec((leaf.shape[0], *sizes), leaf.dtype))
        return tree.unflatten(structure, opened)


def _shapes_in(shapes: Any) -> list[Any]:
    """The shapes of a structure, in the order of its arrays; a tuple of sizes is a shape, not a structure."""
    if isinstance(shapes, dict):
        return [one for name in sorted(shapes) for one in _shapes_in(shapes[name])]
    is_list = isinstance(shapes, (tuple, list))
    if is_list and all(size is None or isinstance(size, (int, np.integer)) for size in shapes):
        return [tuple(shapes)]
    if isinstance(shapes, tuple):
        return [one for part in shapes for one in _shapes_in(part)]
    raise TypeError(f"padded_batch: `padded_shapes` has shapes, and tuples and dictionaries of them, got {shapes!r}")


def _padded(column: Sequence[Any], shape: Sequence[int | None] | None, value: Any) -> Any:
    kinds = {(np.ndim(leaf), leaf.dtype) for leaf in column}
    if len({dimensions for dimensions, _ in kinds}) > 1 or len({dtype.kind for _, dtype in kinds}) > 1:
        raise ValueError(f"padded_batch: arrays must have the same dtype and number of dimensions, got {kinds}")
    wanted = tuple(shape) if shape is not None else (None,) * np.ndim(column[0])
    if len(wanted) != np.ndim(column[0]):
        raise ValueError(f"padded_batch: padded shape {wanted!r} for an array of {np.ndim(column[0])} dimensions")
    longest = tuple(max(sizes) for sizes in zip(*(leaf.shape for leaf in column), strict=True))
    sizes = tuple(most if size in (None, -1) else size for size, most in zip(wanted, longest, strict=True))
    if any(most > size for size, most in zip(sizes, longest, strict=True)):
        raise ValueError(
            f"padded_batch: an array has the size {longest!r}, larger than its padded shape {sizes!r}. Cut it in a map"
        )
    dtype = np.result_type(*(leaf.dtype for leaf in column))
    batch = np.zeros((len(column), *sizes), dtype) if value is None else np.full((len(column), *sizes), value, dtype)
    for number, leaf in enumerate(column):
        # The Ellipsis makes a view also where the elements are scalars.
        row = batch[number, ...]
        row[tuple(slice(0, size) for size in leaf.shape)] = leaf
    return batch


def stack_with(padding: Padding | None, batch: Sequence[Any]) -> Any:
    """Local. One batch of elements, padded if `padding` says how."""
    return elements.stack(batch) if padding is None else padding.stack(batch)
