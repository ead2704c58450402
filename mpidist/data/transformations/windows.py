"""`window`: datasets of neighbouring elements. A window is a group of items that are still unread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from mpidist import tree
from mpidist.arguments import flag
from mpidist.data.dataset_base import D, check_count
from mpidist.data.items.stream import Epoch, Items, Seed, Stream, join
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading.source import ElementSource


@dataclass(frozen=True)
class GivenItems:
    """Some items, in the same order in every pass."""

    items: Items

    def cardinality(self) -> int:
        """Local. The number of items."""
        return len(self.items)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks at no cost."""
        del epoch  # the order is the same in every pass
        yield self.items[start:]

    def seeds(self) -> list[Seed]:
        """Local. An empty list."""
        return []


@dataclass(frozen=True)
class Windows:
    """Groups of `size` items that are `stride` apart; each begins `shift` items after the one before.

    The last groups may be smaller; `drop_remainder` leaves such groups out.
    """

    parent: Stream
    size: int
    shift: int
    stride: int
    drop_remainder: bool

    def cardinality(self) -> int:
        """Local. The number of groups."""
        known = self.parent.cardinality()
        if known < 0:
            return known
        last = known - self._span if self.drop_remainder else known - 1
        return max(0, last // self.shift + 1)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Groups from number `start` on; seeks as the parent does."""
        held: list[Items] = []
        # Items that are held, less those before the next group; negative where these are still to come.
        count = 0
        for block in self.parent.blocks(epoch, start * self.shift):
            held.append(block[max(0, -count) :])
            count += len(block)
            if count < self._span:
                continue
            items, at = join(held), 0
            while count >= self._span:
                yield [items[at : at + self._span : self.stride]]
                at += self.shift
                count -= self.shift
            held = [items[at:]]
        rest = join(held) if held and not self.drop_remainder else []
        for at in range(0, len(rest), self.shift):
            yield [rest[at : at + self._span : self.stride]]

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()

    @property
    def _span(self) -> int:
        return (self.size - 1) * self.stride + 1


@dataclass(frozen=True)
class WindowSource:
    """Makes datasets of groups of items.

    Attributes:
        pipeline: The pipeline that reads the items.
        opened: A function that makes a dataset of a pipeline.
        size: Number of items in a full group.
    """

    pipeline: Pipeline
    opened: Callable[[Pipeline], Any]
    size: int

    @property
    def in_memory(self) -> bool:
        """Local. True: nothing is read before a window is iterated."""
        return True

    def row(self, item: Any) -> Any:
        """Local. A dataset of the items, or a structure of datasets where the elements are structures."""
        return self._datasets(replace(self.pipeline, stream=GivenItems(item), prefetch=None))

    def rows(self, items: Items) -> Any:
        """Local. Raise an error.

        Raises:
            TypeError: Always: windows are not arrays.
        """
        raise TypeError(
            f"batch: expected elements that are arrays, got {len(items)} windows, which are datasets. Make arrays of "
            "them first: flat_map(lambda window: window.batch(size))"
        )

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Datasets one by one."""
        return map(self.row, items)

    def sample(self) -> Any:
        """Local. A window of one element, many times."""
        element = self._sample
        source = ElementSource(lambda item: item, lambda: element)
        return self._datasets(
            Pipeline(source, GivenItems([element] * self.size), is_loaded=self.pipeline.is_batched)
        )

    @cached_property
    def _sample(self) -> Any:
        return self.pipeline.sample()

    def _datasets(self, pipeline: Pipeline) -> Any:
        leaves, spec = tree.flatten(self._sample)
        if tree.flatten(0)[1] == spec:
            return self.opened(pipeline)
        return tree.unflatten(
            spec, [self.opened(pipeline.map(partial(_component, number))) for number in range(len(leaves))]
        )


def window(
    dataset: D, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
) -> D:
    """Local. A dataset of windows, which are datasets of neighbouring elements.

    Where the elements are structures, a window is the same structure of datasets. Nothing is read before a window is
    iterated; where windows overlap, their common elements are read, and functions called, once for each window. Call
    `cache` before `window` to keep them. A function that iterates windows in several threads (`num_parallel_calls`)
    needs a source that several threads can read. `flat_map` makes arrays of windows; a rank reads only its own ones:

    >>> from mpidist.data import Dataset
    >>> windows = Dataset.range(7).window(3, shift=2, drop_remainder=True)
    >>> [x.tolist() for x in windows.flat_map(lambda window: window.batch(3))]
    [[0, 1, 2], [2, 3, 4], [4, 5, 6]]

    Args:
        dataset: The dataset.
        size: Number of elements in a window.
        shift: Number of elements from the beginning of a window to that of the next; None means `size`.
        stride: Number of elements from one element of a window to the next.
        drop_remainder: Whether to leave out last windows that are smaller.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is less than 1.
    """
    count = check_count("window: `size`", size, 1)
    step = count if shift is None else check_count("window: `shift`", shift, 1)
    pipeline = dataset.pipeline
    apart = check_count("window: `stride`", stride, 1)
    stream = Windows(pipeline.stream, count, step, apart, flag("drop_remainder", drop_remainder, owner="window: "))
    return dataset.with_pipeline(Pipeline(WindowSource(pipeline, dataset.with_pipeline, count), stream))


def _component(number: int, *element: Any) -> Any:
    return tree.flatten(element)[0][number]
