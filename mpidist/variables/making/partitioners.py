"""Partitioners: the numbers of shards of a `ParameterServerStrategy`'s variables, with tf.distribute's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpidist.arguments import described, whole
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.arithmetic.slices import cut_evenly


class Partitioner:
    """Chooses the number of shards of a variable. Subclasses define `__call__`."""

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Local. The number of shards along each dimension.

        Args:
            shape: The shape of the variable.
            dtype: The dtype of the variable.
            axis: The dimension that is cut. A strategy cuts the first one.

        Returns:
            One number for each dimension, 1 for all but `axis`.

        Raises:
            NotImplementedError: A subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(shape, dtype, axis=0)")


class FixedShardsPartitioner(Partitioner):
    """Local. Cuts every variable into the same number of shards, or into as many as it has rows.

    Args:
        num_shards: The number of shards, at least 1.

    Raises:
        TypeError: `num_shards` is no integer.
        ValueError: `num_shards` is below 1.

    Example:
        >>> FixedShardsPartitioner(2)((10, 3), "float32")
        [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Local. See `Partitioner`.

        Raises:
            TypeError: No shape, or no axis.
            ValueError: The shape has no such axis.
        """
        del dtype
        sizes, at = _checked(shape, axis)
        return _along(sizes, at, min(self._num_shards, sizes[at]))


class MinSizePartitioner(Partitioner):
    """Local. Cuts a variable into as many shards of a least size as possible, and at most into `max_shards`.

    As in tf.distribute the number is rounded up, so that a shard may be smaller: 513 KiB make three shards of 256 KiB
    at least.

    Args:
        min_shard_bytes: The least size of a shard.
        max_shards: The largest number of shards.
        bytes_per_string: Taken as the size of an element that is a text.

    Raises:
        TypeError: An argument is no integer.
        ValueError: An argument is below 1.

    Example:
        >>> MinSizePartitioner(max_shards=2)((1024, 1024), "float32")
        [2, 1]
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Local. See `Partitioner`.

        Raises:
            TypeError: No shape, no dtype, or no axis.
            ValueError: The shape has no such axis.
        """
        sizes, at = _checked(shape, axis)
        total = math.prod(sizes) * _item_bytes(dtype, self._bytes_per_string)
        return _along(sizes, at, min(sizes[at], self._max_shards, -(-total // self._min_shard_bytes)))


class MaxSizePartitioner(Partitioner):
    """Local. Cuts a variable into shards of a largest size. A shard has at least one row, of whatever size.

    Args:
        max_shard_bytes: The largest size of a shard.
        max_shards: The largest number of shards, which takes precedence over their size; None or 0: any number.
        bytes_per_string: Taken as the size of an element that is a text.

    Raises:
        TypeError: An argument is no integer.
        ValueError: A size is below 1, or `max_shards` is negative.

    Example:
        >>> MaxSizePartitioner(10)((6, 1), "float32")
        [3, 1]
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else whole("max_shards", max_shards, least=0) or None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Local. See `Partitioner`.

        Raises:
            TypeError: No shape, no dtype, or no axis.
            ValueError: The shape has no such axis.
        """
        sizes, at = _checked(shape, axis)
        row_bytes = math.prod(sizes[:at] + sizes[at + 1 :]) * _item_bytes(dtype, self._bytes_per_string)
        rows = max(1, self._max_shard_bytes // max(1, row_bytes))
        count = -(-sizes[at] // rows)
        return _along(sizes, at, count if self._max_shards is None else min(count, self._max_shards))


def shards_of(partitioner: Partitioner, shape: tuple[int, ...], dtype: np.dtype[np.generic], name: str) -> list[slice]:
    """Local. The rows of each shard of a variable: consecutive, the first shards have one row more where they differ.

    Args:
        partitioner: Any function of shape and dtype as `Partitioner` has it.
        shape: The shape of the variable.
        dtype: The dtype of the variable.
        name: The name of the variable, for the error.

    Returns:
        One slice for a variable that is not cut, such as one without dimensions.

    Raises:
        ValueError: The partitioner gives no list of numbers of shards, or cuts another dimension than the first one.
    """
    if not shape:
        return [slice(0, 0)]
    given: object = partitioner(shape, dtype)
    counts = list(given) if isinstance(given, (list, tuple)) else []
    is_whole = bool(counts) and all(isinstance(one, (int, np.integer)) and one >= 1 for one in counts)
    if not is_whole or any(one != 1 for one in counts[1:]):
        raise ValueError(
            "variable_partitioner must return a list/tuple whose elements are 1 besides the first element (non-zero), "
            f"got {described(given)} for variable {name!r} of shape {shape} and dtype {dtype}"
        )
    return cut_evenly(shape[0], max(1, min(int(counts[0]), shape[0])))


def _positive(argument: str, value: object) -> int:
    given = whole(argument, value)
    if given < 1:
        raise ValueError(f"Argument `{argument}` must be positive. Received: {value!r}")
    return given


def _checked(shape: Sequence[int], axis: int) -> tuple[tuple[int, ...], int]:
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"`shape` must be a tuple of the sizes of a variable, got {described(shape)}")
    sizes = tuple(whole("shape", size, least=0) for size in shape)
    at = whole("axis", axis)
    if not -len(sizes) <= at < len(sizes):
        raise ValueError(f"`axis` must be a dimension of the variable, got {axis} for shape {sizes}")
    return sizes, at % len(sizes)


def _item_bytes(dtype: npt.DTypeLike, bytes_per_string: int) -> int:
    try:
        chosen = named_dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"`dtype` must be a dtype, for instance 'float32', got {described(dtype)}") from None
    return bytes_per_string if chosen.kind in "SUO" else chosen.itemsize


def _along(sizes: tuple[int, ...], axis: int, count: int) -> list[int]:
    # A dimension without rows is one shard, which has none.
    return [max(1, count) if at == axis else 1 for at in range(len(sizes))]


__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
