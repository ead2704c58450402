"""Initial values by tf.keras's names: the same table on any number of servers, in whatever shards it is cut."""

from __future__ import annotations

import math

import numpy as np

from mpidist.arguments import number, whole
from mpidist.arrays import AnyArray
from mpidist.variables.making.initial import Placed, ShardInfo

# The number of values that one step of the generator gives.
_NUMBERS_PER_STEP = 4


class Constant(Placed):
    """Local. An initializer that sets every element to the same number.

    Args:
        value: The number.

    Raises:
        TypeError: `value` is no number.
        ValueError: `value` is not finite.

    Example:
        >>> import mpidist
        >>> mpidist.Variable(Constant(2), shape=(3,), dtype="float32").numpy().tolist()
        [2.0, 2.0, 2.0]
    """

    def __init__(self, value: float = 0.0) -> None:
        self._value = number("value", value)

    def __call__(self, shard_info: ShardInfo) -> AnyArray:
        """Local. The value of a shard, float64 of its shape.

        Args:
            shard_info: Its shape, and its offset in the variable.
        """
        return np.full(shard_info.shape, self._value)


class RandomUniform(Placed):
    """Local. An initializer that draws every element from a uniform distribution.

    An element depends on the seed and on its place in the variable alone.

    Args:
        minval: The least value.
        maxval: All values are below it, before they are rounded to the variable's dtype.
        seed: The seed of the random numbers. The same one gives the same values.

    Raises:
        TypeError: A bound is no number, or the seed no integer.
        ValueError: `maxval` is below `minval`, or the seed is negative.
    """

    def __init__(self, minval: float = -0.05, maxval: float = 0.05, seed: int = 0) -> None:
        self._low, self._high = number("minval", minval), number("maxval", maxval)
        self._seed = _checked_seed(seed)
        if self._high < self._low:
            raise ValueError(f"`maxval` must not be below `minval`, got {maxval!r} and {minval!r}")

    def __call__(self, shard_info: ShardInfo) -> AnyArray:
        """Local. See `Constant`."""
        begin, count = _span(shard_info)
        return (self._low + (self._high - self._low) * _draw(self._seed, begin, count)).reshape(shard_info.shape)


class RandomNormal(Placed):
    """Local. An initializer that draws every element from a normal distribution.

    An element depends on the seed and on its place in the variable alone.

    Args:
        mean: The mean of the distribution.
        stddev: Its standard deviation.
        seed: See `RandomUniform`.

    Raises:
        TypeError: A parameter is no number, or the seed no integer.
        ValueError: `stddev` or the seed is negative.
    """

    def __init__(self, mean: float = 0.0, stddev: float = 0.05, seed: int = 0) -> None:
        self._mean, self._deviation = number("mean", mean), number("stddev", stddev, least=0)
        self._seed = _checked_seed(seed)

    def __call__(self, shard_info: ShardInfo) -> AnyArray:
        """Local. See `Constant`."""
        begin, count = _span(shard_info)
        # Two numbers make one (Box and Muller 1958): how many NumPy's own way takes depends on their values.
        first, second = _draw(self._seed, 2 * begin, 2 * count).reshape(count, 2).T
        drawn = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * math.pi * second)
        return np.asarray(self._mean + self._deviation * drawn).reshape(shard_info.shape)


def _checked_seed(seed: int) -> int:
    given = whole("seed", seed, least=0)
    if given >= 1 << 128:
        raise ValueError(f"`seed` must be below 2**128, got {seed!r}")
    return given


def _span(info: ShardInfo) -> tuple[int, int]:
    """The place of the first element of a shard in the flattened variable, and the number of its elements."""
    shape, offset = info
    return (offset[0] * math.prod(shape[1:]) if shape else 0), math.prod(shape)


def _draw(seed: int, begin: int, count: int) -> AnyArray:
    """Of the numbers from 0 to below 1 that a seed gives, those from `begin` on."""
    generator = np.random.Philox(key=seed)
    generator.advance(begin // _NUMBERS_PER_STEP)
    skipped = begin % _NUMBERS_PER_STEP
    return np.random.Generator(generator).random(skipped + count)[skipped:]


__all__ = ["Constant", "RandomNormal", "RandomUniform"]
