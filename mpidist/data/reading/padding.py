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
    """The rule by which the elements of a batch are made equally large.

    Attributes:
        shapes: The structure of an element with a shape for each array. A size of None or -1 means the largest size
            in the batch. None instead of a structure means that for all sizes.
        values: One padding value, or the structure of an element with one for each array. None pads with zeros (False
            and empty strings for other dtypes).
    """

    shapes: Any
    values: Any

    @property
    def is_open(self) -> bool:
        """Local. Whether the padded size depends on the elements: then a reader must see the whole batch."""
        return self.shapes is None or any(size in (None, -1) for shape in _shapes_in(self.shapes) for size in shape)

    def stack(self, batch: Sequence[Any]) -> Any:
        """Local. Pad and stack elements of the same structure, at least one, into one batch.

        Raises:
            ValueError: Structures, dtypes or numbers of dimensions differ, or an array is larger than its padded shape.
        """
        flat = [tree.flatten(one) for one in batch]
        spec = flat[0][1]
        if any(other != spec for _, other in flat):
            raise ValueError(f"padded_batch: all elements must have the same structure, got {[s for _, s in flat]}")
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
        """Local. The `ArraySpec`s of a batch, with None for sizes that depend on the elements."""
        leaves, structure = tree.flatten(spec)
        shapes = [None] * len(leaves) if self.shapes is None else _shapes_in(self.shapes)
        opened = []
        for leaf, shape in zip(leaves, shapes, strict=True):
            sizes = [None if size in (None, -1) else size for size in shape or (None,) * (len(leaf.shape) - 1)]
            opened.append(ArraySpec((leaf.shape[0], *sizes), leaf.dtype))
        return tree.unflatten(structure, opened)


def _shapes_in(shapes: Any) -> list[Any]:
    """The shapes in a structure, in the order of its arrays. A tuple of sizes is a shape, not a structure."""
    if isinstance(shapes, dict):
        return [one for name in sorted(shapes) for one in _shapes_in(shapes[name])]
    is_list = isinstance(shapes, (tuple, list))
    if is_list and all(size is None or isinstance(size, (int, np.integer)) for size in shapes):
        return [tuple(shapes)]
    if isinstance(shapes, tuple):
        return [one for child in shapes for one in _shapes_in(child)]
    raise TypeError(
        f"padded_batch: `padded_shapes` must hold shapes, or tuples and dictionaries of shapes, got {shapes!r}"
    )


def _padded(column: Sequence[Any], shape: Sequence[int | None] | None, value: Any) -> Any:
    kinds = {(np.ndim(leaf), leaf.dtype) for leaf in column}
    if len({dimensions for dimensions, _ in kinds}) > 1 or len({dtype.kind for _, dtype in kinds}) > 1:
        raise ValueError(
            "padded_batch: the same array of all elements must have one dtype and one number of dimensions, got "
            f"(dimensions, dtype) {kinds}"
        )
    wanted = tuple(shape) if shape is not None else (None,) * np.ndim(column[0])
    if len(wanted) != np.ndim(column[0]):
        raise ValueError(
            f"padded_batch: expected a padded shape of {np.ndim(column[0])} sizes, one for each dimension of the "
            f"array, got {wanted!r}"
        )
    longest = tuple(max(sizes) for sizes in zip(*(leaf.shape for leaf in column), strict=True))
    sizes = tuple(most if size in (None, -1) else size for size, most in zip(wanted, longest, strict=True))
    if any(most > size for size, most in zip(sizes, longest, strict=True)):
        raise ValueError(
            f"padded_batch: an array of the batch is {longest!r}, larger than its padded shape {sizes!r}. Give a "
            "larger shape, or cut the array in a map"
        )
    dtype = np.result_type(*(leaf.dtype for leaf in column))
    batch = np.zeros((len(column), *sizes), dtype) if value is None else np.full((len(column), *sizes), value, dtype)
    for number, leaf in enumerate(column):
        # The Ellipsis gives a view even where the elements are scalars; `batch[number]` would give a copy there.
        row = batch[number, ...]
        row[tuple(slice(0, size) for size in leaf.shape)] = leaf
    return batch


def stack_with(padding: Padding | None, batch: Sequence[Any]) -> Any:
    """Local. Stack elements into one batch, padded where `padding` is given."""
    return elements.stack(batch) if padding is None else padding.stack(batch)
