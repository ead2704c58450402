"""Initial values that are made shard by shard, so that no process holds the whole array."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.arguments import described, whole
from mpidist.arrays import AnyArray

# The size of a piece of a value that is made piece by piece: 2 MB in float64.
_PIECE_ELEMENTS = 1 << 18


class ShardInfo(NamedTuple):
    """The place of a shard in its variable.

    Attributes:
        shape: The shape of the shard.
        offset: The offset of its first element, for each dimension.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Placed(abc.ABC):
    """An initializer whose elements depend on their place alone, so that a value is made piece by piece."""

    @abc.abstractmethod
    def __call__(self, shard_info: ShardInfo) -> AnyArray:
        """Local. The value of a shard, of its shape.

        Args:
            shard_info: Its shape, and its offset in the variable.
        """


class ShardedInitial:
    """A function that gives an initial value of a shape that is known before.

    A function with a parameter `shard_info` gets a `ShardInfo`; one with `partition_shape` and `partition_offset` gets
    these. Each shard's value is asked for by itself then. Other functions give the whole array.

    Args:
        function: The function of the program.
        shape: The shape of the whole array.
        dtype: The dtype of the whole array; None for that of the values.
        name: The name of the variable, for errors.

    Raises:
        TypeError: `function` is no function, or `shape` no shape.
        ValueError: `shape` has a negative size.
    """

    def __init__(
        self, function: Callable[..., npt.ArrayLike], shape: Sequence[int] | int, dtype: npt.DTypeLike | None, name: str
    ) -> None:
        sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        if not isinstance(sizes, (tuple, list)):
            raise TypeError(f"variable {name!r}: `shape` must be a tuple of sizes, got {described(shape)}")
        self.shape = tuple(whole("shape", size, least=0, owner=f"variable {name!r}: ") for size in sizes)
        self.dtype = dtype
        self._name = name
        self._function = function
        self._names = _parameters(function)

    @property
    def placed(self) -> Placed | None:
        """Local. The function, where elements depend on their place alone and their dtype is known."""
        return self._function if isinstance(self._function, Placed) and self.dtype is not None else None

    @property
    def is_partitioned(self) -> bool:
        """Local. Whether shards can be made one by one."""
        return self.dtype is not None and bool(self._names & {"shard_info", "partition_shape"})

    def __call__(self) -> npt.ArrayLike:
        """Local. The whole value.

        Raises:
            ValueError: It has another shape.
        """
        return self.shard(self.shape, (0,) * len(self.shape))

    def shard(self, shape: tuple[int, ...], offset: tuple[int, ...]) -> npt.ArrayLike:
        """Local. The value of one shard; for a function without an argument for the shard, of the whole array.

        Args:
            shape: The shape of the shard.
            offset: The offset of its first element.

        Raises:
            ValueError: It has another shape.
        """
        value: npt.ArrayLike
        if self.placed is not None:
            value = np.empty(shape, np.dtype(self.dtype))
            fill_in_pieces(self.placed, offset, value)
        elif "shard_info" in self._names:
            value = self._function(shard_info=ShardInfo(shape, offset))
        elif {"partition_shape", "partition_offset"} <= self._names:
            value = self._function(partition_shape=shape, partition_offset=offset)
        else:
            value, shape = self._function(), self.shape
        if np.shape(value) != shape:
            raise ValueError(
                f"variable {self._name!r}: expected an initial value of shape {shape}, as `shape` says, got "
                f"{np.shape(value)}"
            )
        return value


def fill_in_pieces(function: Placed, offset: tuple[int, ...], into: AnyArray) -> None:
    """Local. Write the value of a shard, in pieces.

    Args:
        function: The function that returns the pieces.
        offset: The offset of the shard's first element in its variable.
        into: An array of the shard's shape and dtype; it is overwritten.
    """
    shape = into.shape
    if not shape:
        into[...] = function(ShardInfo((), ()))
        return
    step = max(1, _PIECE_ELEMENTS // max(1, math.prod(shape[1:])))
    for low in range(0, shape[0], step):
        count = min(step, shape[0] - low)
        into[low : low + count] = function(ShardInfo((count, *shape[1:]), (offset[0] + low, *offset[1:])))


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # Built-in functions need not have one.
        return frozenset()
