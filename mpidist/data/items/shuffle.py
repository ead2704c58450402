"""Shuffling with a buffer, as tf.data does: an order that depends on the seed and the pass, never on who reads it."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.data.items.stream import Epoch, Items, Rows, Seed, Shard, Skip, Stream, Take, drop_items, join


class ShuffleSeed:
    """The seed of one shuffle, which keeps its value over passes.

    It belongs to the transformation, not to an iterator: `data.take(n)` and `data.skip(n)` of one shuffled dataset
    must see the same order, or training examples would leak into the test set.

    Args:
        value: What the user gave; None draws one from the system's entropy.
    """

    def __init__(self, value: int | None) -> None:
        self.drawn = value is None
        self.value = secrets.randbits(63) if value is None else value

    def generator(self, path: tuple[int, ...], salt: int) -> np.random.Generator:
        """Local. The source of randomness of one pass."""
        entropy = [self.value % 2**64, salt] if self.drawn and salt else [self.value % 2**64]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=path)))


@dataclass(frozen=True)
class Shuffle:
    """Each next item is drawn from a buffer, whose place the parent's next item takes.

    A buffer that holds the whole parent gives a uniform permutation, made in one call.
    """

    parent: Stream
    buffer_size: int
    seed: ShuffleSeed
    reshuffle_each_iteration: bool

    def cardinality(self) -> int:
        """Local. The parent's."""
        return self.parent.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks by drawing again what came before: integers only, where the parent's items are row numbers."""
        return drop_items(self._shuffled(epoch), start)

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent, then its own."""
        return [*self.parent.seeds(), self.seed]

    def _shuffled(self, epoch: Epoch) -> Iterator[Items]:
        path = epoch.path if self.reshuffle_each_iteration else ()
        generator = self.seed.generator(path, epoch.salt)
        if isinstance(self.parent, Rows) and 0 < self.parent.count <= self.buffer_size:
            # What follows gives the same, at the cost of more memory to touch.
            yield generator.permutation(self.parent.count)
            return
        parent = self.parent.blocks(epoch, 0)
        held: list[Items] = []
        count = 0
        rest: Items = []
        for block in parent:
            held.append(block[: self.buffer_size - count])
            count += len(held[-1])
            if count == self.buffer_size:
                rest = block[len(held[-1]) :]
                break
        if count == 0:
            return
        buffer = join(held)
        places: list[Any] | None = None
        as_rows = isinstance(buffer, np.ndarray)
        for block in itertools.chain((rest,), parent) if count == self.buffer_size else ():
            if len(block):
                # A list, only where something is exchanged at all: a buffer may hold everything exactly.
                places = _to_list(buffer) if places is None else places
                yield _exchange(places, block, generator, as_rows)
        if places is not None:
            buffer = np.array(places) if as_rows else places
        # Both give the same order of places.
        yield (
            generator.permutation(buffer)
            if isinstance(buffer, np.ndarray)
            else [buffer[place] for place in generator.permutation(count)]
        )


def is_steady(stream: Stream, *, in_order: bool = False) -> bool:
    """Local. Whether it is known that a stream has the same items in every pass; with `in_order`, in the same order."""
    if isinstance(stream, Shuffle):
        return not in_order and is_steady(stream.parent)
    if isinstance(stream, (Take, Skip, Shard)):
        return is_steady(stream.parent, in_order=True)
    return isinstance(stream, Rows)


def _exchange(places: list[Any], block: Items, generator: np.random.Generator, as_rows: bool) -> Items:
    """Put each item of the block in a random place, and give what stood there."""
    given = []
    for place, item in zip(generator.integers(len(places), size=len(block)).tolist(), _to_list(block), strict=True):
        given.append(places[place])
        places[place] = item
    return np.array(given, dtype=np.int64) if as_rows else given


def _to_list(items: Items) -> list[Any]:
    return items.tolist() if isinstance(items, np.ndarray) else list(items)
