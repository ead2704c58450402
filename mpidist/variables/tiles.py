"""Tiles: the partition of an array into one tile for each logical device of a replica; pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.arguments import described
from mpidist.arrays import AnyArray

# The approximate size of pieces of rows that are read from a file, so that no rank needs memory for the whole array.
_PIECE_BYTES = 1 << 22


class Tiling(NamedTuple):
    """The partition of an array into tiles, and the tile of one logical device.

    Tiles are numbered as `arange(count).reshape(dimensions)`, and logical device i has tile i.

    Attributes:
        shape: The shape of the whole array.
        dimensions: Number of parts of each dimension.
        device: The logical device.
    """

    shape: tuple[int, ...]
    dimensions: tuple[int, ...]
    device: int

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Local. The shape of each tile."""
        return tuple(size // count for size, count in zip(self.shape, self.dimensions, strict=True))

    @property
    def offset(self) -> tuple[int, ...]:
        """Local. The index of the tile's first element in the whole array."""
        place = np.unravel_index(self.device, self.dimensions) if self.dimensions else ()
        return tuple(int(at) * size for at, size in zip(place, self.tile_shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Local. The tile as an index of the whole array."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.tile_shape, strict=True))

    def of(self, device: int) -> Tiling:
        """Local. The same partition, with the tile of another logical device."""
        return self._replace(device=device)

    def take(self, whole: AnyArray) -> AnyArray:
        """Local. The tile of a whole array, a view."""
        tile: AnyArray = whole[self.slices]
        return tile

    def read(self, read: Callable[[int, int], AnyArray], start: int, stop: int) -> AnyArray:
        """Local. The elements [start, stop) of the flattened tile, read in whole rows of the array.

        Args:
            read: A function that returns elements of the flattened whole array.
            start: The first element.
            stop: The end, one after the last element.
        """
        if start >= stop:
            return read(0, 0)
        if len(self.shape) == 0:
            return read(start, stop)
        width, tile_width = math.prod(self.shape[1:]), math.prod(self.tile_shape[1:])
        first, last = start // tile_width, -(-stop // tile_width)
        top, columns = self.offset[0], (slice(None), *self.slices[1:])
        pieces = []
        at = first
        while at < last:
            # An element is assumed to have 8 bytes: its size is known only after the first piece was read.
            step = max(1, _PIECE_BYTES // (8 * max(1, width)))
            end = min(at + step, last)
            rows = np.asarray(read((top + at) * width, (top + end) * width)).reshape(end - at, *self.shape[1:])
            pieces.append(rows[columns].reshape(-1))
            at = end
        joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return joined[start - first * tile_width : stop - first * tile_width]


def tiling(shape: Sequence[int], partition_dimensions: Any, device: int, count: int, owner: str) -> Tiling:
    """Local. The partition of an array, after checks of the arguments.

    Args:
        shape: The shape of the array.
        partition_dimensions: Number of parts of each dimension.
        device: This logical device.
        count: Number of logical devices of a replica.
        owner: The name of the array, for errors.

    Raises:
        TypeError: `partition_dimensions` is no list of whole numbers.
        ValueError: There is not one number for each dimension, a dimension is not divisible by its number, or the
            product of the numbers is not the number of logical devices.
    """
    given = partition_dimensions
    if not isinstance(given, (list, tuple, np.ndarray)) or any(
        isinstance(one, (bool, np.bool_)) or not isinstance(one, (int, np.integer)) for one in given
    ):
        raise TypeError(
            f"{owner}: `partition_dimensions` must be a list with a whole number for each dimension, got "
            f"{described(given)}"
        )
    sizes, dimensions = tuple(int(size) for size in shape), tuple(int(one) for one in given)
    if len(dimensions) != len(sizes):
        raise ValueError(
            f"{owner}: `partition_dimensions` must have a number for each dimension of shape {sizes}, that is "
            f"{len(sizes)}, got {len(dimensions)}: {list(dimensions)}. Use 1 for a dimension that is not cut"
        )
    for axis, (size, parts) in enumerate(zip(sizes, dimensions, strict=True)):
        if parts < 1 or size % parts:
            raise ValueError(
                f"{owner}: dimension {axis} of shape {sizes} must be divisible by its number in "
                f"`partition_dimensions`, got {size} and {parts} of {list(dimensions)}. Pad the array, or cut another "
                "dimension"
            )
    product = math.prod(dimensions)
    if product != count:
        raise ValueError(
            f"{owner}: the product of `partition_dimensions` must be the number of logical devices of a replica, "
            f"which is {count}, got {product} of {list(dimensions)}. Change them, or the computation_shape of the "
            "device assignment"
        )
    return Tiling(sizes, dimensions, device)
