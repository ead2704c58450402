"""Padding: batches of elements whose arrays differ in size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import tree
from mpidist.arguments import described
from mpidist.data.reading import element as elements
from mpidist.data.reading.element import ArraySpec


@dataclass(frozen=True)
class Padding:
    """The rule by which the elements of a batch are made equally large.

    Attributes:
        shapes: The structure of an element with a shape for each array; an int is the shape of a vector. A size of None
            or -1 means the largest size in the batch. None instead of a shape or a structure means that for all sizes.
        values: One padding value, or the structure of an element with one for each array. None pads with zeros (False
            and empty strings for other dtypes).
    """

    shapes: Any
    values: Any

    def __post_init__(self) -> None:
        if any(size is not None and size < -1 for size in _sizes_in(self.shapes)):
            raise ValueError(
                "padded_batch: a size in `padded_shapes` must be at least 0, or None or -1 for the largest size in the "
                f"batch, got the shape {self.shapes!r}"
            )

    @property
    def is_open(self) -> bool:
        """Local. Whether the padded size depends on the elements: then a reader must see the whole batch."""
        return any(size in (None, -1) for size in _sizes_in(self.shapes))

    def stack(self, batch: Sequence[Any]) -> Any:
        """Local. Pad and stack elements of the same structure, at least one, into one batch.

        Raises:
            ValueError: Structures, dtypes or numbers of dimensions differ, or an array is larger than its padded shape.
        """
        flat = [tree.flatten(one) for one in batch]
        spec = flat[0][1]
        if any(other != spec for _, other in flat):
            raise ValueError(f"padded_batch: all elements must have the same structure, got {[s for _, s in flat]}")
        for given in (self.shapes, self.values):
            if isinstance(given, dict) and isinstance(batch[0], dict) and given.keys() != batch[0].keys():
                raise ValueError(
                    "padded_batch: expected `padded_shapes` and `padding_values` with the keys of an element, "
                    f"{sorted(batch[0])}, got {sorted(given)}"
                )
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        shapes = _shapes_of(batch[0], self.shapes)
        is_nest = isinstance(self.values, (tuple, dict))
        values = tree.flatten(self.values)[0] if is_nest else [self.values] * len(columns)
        if len(values) != len(columns):
            raise ValueError(
                f"padded_batch: expected one padding value for each of the {len(columns)} arrays of an element, got "
                f"{self.values!r}"
            )
        return tree.unflatten(
            spec, [_padded(*one) for one in zip(columns, shapes, values, strict=True)]
        )

    def spec(self, spec: Any) -> Any:
        """Local. The `ArraySpec`s of a batch, with None for sizes that depend on the elements."""
        leaves, structure = tree.flatten(spec)
        opened = []
        for leaf, shape in zip(leaves, _shapes_of(spec, self.shapes), strict=True):
            wanted = (None,) * (len(leaf.shape) - 1) if shape is None else shape
            sizes = [None if size in (None, -1) else size for size in wanted]
            opened.append(ArraySpec((leaf.shape[0], *sizes), leaf.dtype))
        return tree.unflatten(structure, opened)


def _sizes_in(shapes: Any) -> Iterator[int | None]:
    """All sizes in a structure of shapes."""
    if shapes is None or isinstance(shapes, (int, np.integer)):
        yield None if shapes is None else int(shapes)
    elif isinstance(shapes, (dict, tuple, list)):
        for one in shapes.values() if isinstance(shapes, dict) else shapes:
            yield from _sizes_in(one)
    else:
        raise TypeError(
            "padded_batch: `padded_shapes` must hold shapes, or tuples and dictionaries of shapes, got "
            f"{described(shapes)}"
        )


def _shapes_of(element: Any, shapes: Any) -> list[tuple[int | None, ...] | None]:
    """The shape for each array of an element, in their order; None where all sizes are open."""
    if shapes is None:
        return [None] * len(tree.flatten(element)[0])
    if isinstance(element, dict) and isinstance(shapes, dict) and element.keys() == shapes.keys():
        return [one for name in sorted(element) for one in _shapes_of(element[name], shapes[name])]
    if isinstance(element, tuple) and isinstance(shapes, (tuple, list)) and len(element) == len(shapes):
        return [one for parts in zip(element, shapes, strict=True) for one in _shapes_of(*parts)]
    if isinstance(element, (dict, tuple)) or isinstance(shapes, dict):
        raise ValueError(
            f"padded_batch: expected `padded_shapes` of the structure of an element, {tree.flatten(element)[1]}, with "
            f"a shape or an int for each array, got {shapes!r}"
        )
    sizes = shapes if isinstance(shapes, (tuple, list)) else [shapes]
    if any(isinstance(size, (tuple, list, dict)) for size in sizes):
        raise ValueError(f"padded_batch: expected one padded shape for an array, got {shapes!r}")
    return [tuple(sizes)]


def _padded(column: Sequence[Any], shape: Sequence[int | None] | None, value: Any) -> Any:
    column = [elements.as_leaf(leaf) for leaf in column]
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
    batch = np.zeros((len(column), *sizes), dtype)
    if value is not None:
        batch[...] = _value_as(value, dtype)
    for number, leaf in enumerate(column):
        # The Ellipsis gives a view even where the elements are scalars; `batch[number]` would give a copy there.
        row = batch[number, ...]
        row[tuple(slice(0, size) for size in leaf.shape)] = leaf[()]
    return batch


def _value_as(value: Any, dtype: np.dtype[Any]) -> Any:
    """A padding value in the dtype of the batch, which must be able to hold it."""
    given = np.asarray(value)
    is_held = np.can_cast(given.dtype, dtype, "same_kind")
    with np.errstate(invalid="ignore"):
        cast = given.astype(dtype) if is_held or (given.dtype.kind in "biuf" and dtype.kind in "biuf") else None
    if cast is None or given.ndim or ((dtype.kind in "biu" or not is_held) and cast != given):
        raise ValueError(
            f"padded_batch: expected a padding value that the dtype {dtype} of the array can hold, got {value!r}. Give "
            "another value, or convert the array in a map"
        )
    return cast


def stack_with(padding: Padding | None, batch: Sequence[Any]) -> Any:
    """Local. Stack elements into one batch, padded where `padding` is given."""
    return elements.stack(batch) if padding is None else padding.stack(batch)
