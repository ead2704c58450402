"""Shuffling with a buffer, as in tf.data: the order depends on the seed and the pass, never on the reader."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.data.items.stream import Epoch, Items, RowNumbers, Seed, Shard, Skip, Stream, Take, drop_items, join


class ShuffleSeed:
    """The seed of one shuffle, or of all that an `interleave` opens; it keeps its value over all passes.

    The seed belongs to the transformation, not to an iterator. If each iterator drew one, `data.take(n)` and
    `data.skip(n)` of one shuffled dataset would see different orders, and training examples would leak into the test
    set.

    Args:
        value: The user's seed; None draws one from the system's entropy.
        name: The beginning of its name in a saved position.
        use: See `Seed`.

    Attributes:
        drawn: Whether the seed was drawn. Ranks replace a drawn seed by that of rank 0.
    """

    def __init__(self, value: int | None, name: str = "seed", use: str = "") -> None:
        self.drawn = value is None
        self.value = secrets.randbits(63) if value is None else value
        self.name = name
        self.use = use

    def generator(self, epoch: Epoch, *, is_same: bool = False) -> np.random.Generator:
        """Local. The random generator of one pass.

        Args:
            epoch: The pass. Its salt counts only for a drawn seed: with the user's seed every rank has the order that
                the user asked for.
            is_same: Whether to return the generator that all passes have in common.
        """
        value = epoch.inner.get(self, self.value) % 2**64
        entropy = [value, epoch.salt] if self.drawn and epoch.salt else [value]
        path = () if is_same else epoch.path
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=path)))

    def opened(self, epoch: Epoch, number: int, seeds: list[Seed]) -> Epoch:
        """Local. The pass over the dataset number `number` that is opened in a pass.

        Args:
            epoch: The pass.
            number: The place of the dataset among those that the pass opens.
            seeds: The opened dataset's seeds. Drawn ones get values that follow from this seed and from `number`.
        """
        drawn = list(dict.fromkeys(seed for seed in seeds if seed.drawn))
        if not drawn:
            return epoch.repetition(number)
        sequence = np.random.SeedSequence(epoch.inner.get(self, self.value) % 2**64, spawn_key=(number,))
        values = sequence.generate_state(len(drawn), np.uint64).tolist()
        return epoch.repetition(number)._replace(inner=dict(zip(drawn, values, strict=True)))


@dataclass(frozen=True)
class Shuffle:
    """Draws each item from a buffer, and fills its place with the parent's next item.

    A buffer that holds the whole parent gives a uniform permutation, made in one call.
    """

    parent: Stream
    buffer_size: int
    seed: ShuffleSeed
    reshuffle_each_iteration: bool

    def cardinality(self) -> int:
        """Local. The parent's cardinality."""
        return self.parent.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. The items from number `start` on; seeks by drawing all earlier items again.

        That costs integers only where the parent's items are row numbers.
        """
        return drop_items(self._shuffled(epoch), start)

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds, then this one."""
        return [*self.parent.seeds(), self.seed]

    def _shuffled(self, epoch: Epoch) -> Iterator[Items]:
        generator = self.seed.generator(epoch, is_same=not self.reshuffle_each_iteration)
        if isinstance(self.parent, RowNumbers) and 0 < self.parent.count <= self.buffer_size:
            # A shortcut: the code below gives the same permutation, but touches more memory. Both ways must agree bit
            # for bit, since a saved position counts on the order.
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
                # The list is made only when the first item is exchanged: the buffer may hold all items exactly.
                places = _to_list(buffer) if places is None else places
                yield _exchange(places, block, generator, as_rows)
        if places is not None:
            buffer = np.array(places) if as_rows else places
        # Arrays and lists must get the same order: `permutation` of an array and of a count draw alike.
        yield (
            generator.permutation(buffer)
            if isinstance(buffer, np.ndarray)
            else [buffer[place] for place in generator.permutation(count)]
        )


def is_steady(stream: Stream, *, in_order: bool = False) -> bool:
    """Local. Whether a stream is known to have the same items in every pass.

    Args:
        stream: Any stream. Kinds that this function does not know count as not steady.
        in_order: Whether the order must be the same as well.
    """
    if isinstance(stream, Shuffle):
        return not in_order and is_steady(stream.parent)
    if isinstance(stream, (Take, Skip, Shard)):
        return is_steady(stream.parent, in_order=True)
    return isinstance(stream, RowNumbers)


def _exchange(places: list[Any], block: Items, generator: np.random.Generator, as_rows: bool) -> Items:
    """Put each item of the block in a random place of the buffer, and return the items that were there."""
    given = []
    for place, item in zip(generator.integers(len(places), size=len(block)).tolist(), _to_list(block), strict=True):
        given.append(places[place])
        places[place] = item
    return np.array(given, dtype=np.int64) if as_rows else given


def _to_list(items: Items) -> list[Any]:
    return items.tolist() if isinstance(items, np.ndarray) else list(items)
