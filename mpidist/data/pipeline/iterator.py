"""The iterator of a plain dataset, with a position that can be saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpidist.data.items.position import load_position, position_state
from mpidist.data.items.stream import Epoch
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading.prefetch import Prefetcher


class Reader(Iterator[Any]):
    """Elements of a pipeline from some position on, read ahead in a thread if asked to.

    Args:
        elements: The iterator to read. With a thread it must not call MPI.
        depth: Number of elements to read ahead; 0 reads in `next`, without a thread.

    Attributes:
        read: A function that returns the next element, or raises StopIteration, like `next` with one Python call less.
    """

    def __init__(self, elements: Iterator[Any], depth: int) -> None:
        self._prefetcher = Prefetcher(elements, depth) if depth > 0 else None
        self.read = (elements if self._prefetcher is None else self._prefetcher).__next__

    def __next__(self) -> Any:
        """The next element."""
        return self.read()

    def close(self) -> None:
        """Local. End the thread, if there is one. A second call does nothing."""
        if self._prefetcher is not None:
            self._prefetcher.close()


class DatasetIterator(Iterator[Any]):
    """One pass over a dataset.

    Args:
        pipeline: The pipeline to read.
        iteration: Number of the pass; shuffles depend on it.
        set_iterations: A function that is called when a position is loaded, with the number of passes that the dataset
            has then made.
    """

    def __init__(self, pipeline: Pipeline, iteration: int, set_iterations: Callable[[int], None]) -> None:
        self._pipeline = pipeline
        self._iteration = iteration
        self._set_iterations = set_iterations
        self._taken = 0
        self._reader: Reader | None = None

    def __next__(self) -> Any:
        """The next element. After an error the same one is tried again."""
        if self._reader is None:
            epoch = Epoch((self._iteration,))
            elements = self._pipeline.iterate(epoch, self._taken, self._pipeline.read)
            self._reader = Reader(elements, self._pipeline.prefetch or 0)
        try:
            element = self._reader.read()
        except StopIteration:
            raise
        except BaseException:
            # The next one would be taken for this element, and a generator that has raised looks like the end.
            self.close()
            raise
        # Counted here, not in the reader: a thread may be ahead, and a saved position must not skip what it has read.
        self._taken += 1
        return element

    @property
    def taken(self) -> int:
        """Local. The number of elements that were taken in this pass."""
        return self._taken

    def state(self) -> dict[str, int]:
        """Local. The position: `iteration`, `batch` (the number of elements taken), and the seeds that were drawn.

        `DistributedIterator.state` has the names.
        """
        return position_state(
            self._pipeline.stream, self._iteration, self._taken, batch_size=self._pipeline.batch_size
        )

    def load_state(self, state: Mapping[str, int]) -> None:
        """Local. Continue where `state` was saved. The dataset's next iteration is the one after this.

        Raises:
            ValueError: The state belongs to another pipeline.
        """
        found = load_position(self._pipeline.stream, state, batch_size=self._pipeline.batch_size)
        self._iteration, self._taken = found.iteration, found.taken
        self._set_iterations(found.passes)
        self.close()

    def close(self) -> None:
        """Local. End prefetching; `next` continues from the same position. A second call does nothing."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
