"""`random`: an endless dataset of random numbers, from any position on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpidist.arguments import flag
from mpidist.data.dataset_base import D, check_count
from mpidist.data.items.shuffle import ShuffleSeed
from mpidist.data.items.stream import INFINITE, Epoch, Items, Seed
from mpidist.data.options import Options
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading.source import RangeSource

# The numbers are below this.
END = 2**32
# How many numbers one generator draws. The numbers depend on it, and saved positions on the numbers.
_BLOCK = 8192


@dataclass(frozen=True)
class RandomNumbers:
    """Random numbers from 0 to `END` - 1, without end.

    Attributes:
        seed: The seed from which the numbers follow.
        is_anew: Whether each pass has other numbers.
    """

    seed: ShuffleSeed
    is_anew: bool

    def cardinality(self) -> int:
        """Local. INFINITE."""
        return INFINITE

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Numbers from place `start` on; seeks at no cost, since each block has a generator of its own."""
        in_pass = epoch if self.is_anew else epoch._replace(path=())
        first, begin = divmod(start, _BLOCK)
        for block in itertools.count(first):
            yield self.seed.generator(in_pass.repetition(block)).integers(END, size=_BLOCK)[begin:]
            begin = 0

    def seeds(self) -> list[Seed]:
        """Local. Its seed."""
        return [self.seed]


def random_numbers(caller: str, seed: int | None, rerandomize_each_iteration: bool | None) -> RandomNumbers:
    """Local. The numbers that two arguments of `caller` ask for.

    Raises:
        TypeError: An argument has the wrong type.
    """
    drawn = ShuffleSeed(None if seed is None else check_count(f"{caller}: `seed`", seed))
    is_anew = False if rerandomize_each_iteration is None else rerandomize_each_iteration
    return RandomNumbers(drawn, flag("rerandomize_each_iteration", is_anew, owner=f"{caller}: "))


def random(cls: type[D], seed: int | None = None, rerandomize_each_iteration: bool | None = None) -> D:
    """Local. An endless dataset of random numbers: int64, from 0 to 2**32 - 1, each equally probable.

    >>> from mpidist.data import Dataset
    >>> numbers = Dataset.random(seed=4).take(3)
    >>> [int(x) for x in numbers] == [int(x) for x in numbers]
    True

    Args:
        cls: The class of the dataset.
        seed: The seed of the numbers, which never depend on the number of ranks. None draws a seed; a distributed
            dataset uses that of rank 0 on all ranks.
        rerandomize_each_iteration: Whether each iteration has other numbers; None means False.

    Raises:
        TypeError: An argument has the wrong type.
    """
    stream = random_numbers("random", seed, rerandomize_each_iteration)
    return cls(Pipeline(RangeSource(range(END), np.dtype(np.int64)), stream), Options())
