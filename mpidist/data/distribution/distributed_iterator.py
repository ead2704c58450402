"""`DistributedIterator`: this rank's batches, one a step, and the same number of steps on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mpidist import arrays, context, tree
from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator
from mpidist.data.distribution.device import DeviceReader, goes
from mpidist.data.distribution.share import Share, unbatched_error, zero_rows_error
from mpidist.data.items.position import load_position, position_state
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch
from mpidist.data.pipeline.iterator import Reader
from mpidist.data.reading import element as elements
from mpidist.errors import mark_shared

# What a rank says before a step whose end nobody knows beforehand; the largest decides.
_DRY, _READY, _DRY_WITHOUT_PATTERN, _FAILED = range(4)


class OptionalBatch:
    """A batch, or the end of the data; see `DistributedIterator.get_next_as_optional`."""

    def __init__(self, batches: tuple[Any, ...]) -> None:
        self._batches = batches

    def has_value(self) -> bool:
        """Local. Whether there is a batch; the same on every rank."""
        return bool(self._batches)

    def get_value(self) -> Any:
        """Local. The batch.

        Raises:
            ValueError: There is none.
        """
        if not self._batches:
            raise ValueError("there is no batch: the end of the dataset was reached. Ask `has_value()` before")
        return self._batches[0]


class DistributedIterator(Iterator[Any]):
    """One pass over a distributed dataset.

    Every rank makes the same number of steps. Nothing is communicated where all ranks are known to have data for
    every step. Where lengths are known but differ, ranks that have none left get empty batches, and the others' first
    batches tell dtypes and dimensions. Where a length is unknown, one integer is exchanged before each step.

    Args:
        share: What this rank reads.
        communicator: The ranks that step together.
        iteration: Number of the pass; shuffles depend on it.
        depth: How many batches are read ahead in a thread; 0 reads in `next`.
        set_iterations: Tells the dataset how many passes there have been, when a position is loaded.
        namespace: The module whose arrays batches are.
    """

    def __init__(
        self,
        share: Share,
        communicator: Communicator,
        iteration: int,
        depth: int,
        set_iterations: Callable[[int], None],
        namespace: Any = np,
    ) -> None:
        self._share = share
        self._communicator = communicator
        self._iteration = iteration
        self._depth = depth
        self._set_iterations = set_iterations
        self._namespace = namespace
        self._taken = 0
        self._is_ended = False
        self._pattern: Any = None
        self._reader: Reader | DeviceReader | None = None
        self._is_even = share.is_even or communicator.size == 1
        # The whole of a step, once reading has begun, where no rank waits for another: it may take microseconds.
        self._read_ready: Callable[[], Any] | None = None

    @property
    def group(self) -> Communicator:
        """Local. The ranks that step together; a checkpoint of the iterator is saved and restored by all of them."""
        return self._communicator

    @property
    def element_spec(self) -> Any:
        """Local. `ArraySpec`s of this rank's batches."""
        return self._share.pipeline.spec(is_whole=self._communicator.size == 1)

    def __next__(self) -> Any:
        """Collective. This rank's next batch.

        Raises:
            StopIteration: No rank has data left.
            ValueError: Called inside `Strategy.run`, or no rank has any data at all.
        """
        entry = context.innermost()
        if entry is not None and entry.replica_context is not None:
            raise ValueError(
                "next(iterator) should be called from outside of the function given to `Strategy.run`. Pass the batch "
                "to it: strategy.run(fn, args=(next(iterator),))"
            )
        try:
            read = self._read_ready
            batch = self._step() if read is None else read()
        except StopIteration:
            self._end()
            if self._taken == 0:
                raise mark_shared(zero_rows_error()) from None
            raise
        self._taken += 1
        return batch

    def get_next(self) -> Any:
        """Collective. This rank's next batch.

        Raises:
            IndexError: No rank has data left.
        """
        for batch in self:
            return batch
        raise mark_shared(
            IndexError(
                f"get_next: end of the dataset after {self._taken} batches. Begin a new pass with iter(), or ask "
                "get_next_as_optional()"
            )
        )

    def get_next_as_optional(self) -> OptionalBatch:
        """Collective. This rank's next batch, or nothing, at and after the end, on all ranks alike."""
        for batch in self:
            return OptionalBatch((batch,))
        return OptionalBatch(())

    def state(self) -> dict[str, int]:
        """Local. The position, the same on every rank.

        Returns:
            `iteration`, the number of the pass; `batch`, how many global batches the consumer has taken in it (what
            was only read ahead does not count); and `seed_<k>` for shuffles without a seed. Loaded under the policies
            AUTO, DATA, FILE and HINT by any number of ranks, no example is repeated or left out. For files, and with
            a hint, `readers` says how many ranks shared them: the pass is finished in the batches that those would
            have had together. Under OFF, and where each rank brings a dataset of its own, `batch` counts the steps.
        """
        return position_state(self._share.pipeline.stream, self._iteration, self._taken, self._share.readers)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Local, but to be called by all ranks. Go on where `state` was taken.

        The next pass over the dataset is the one after the loaded one.

        Raises:
            ValueError: The state is that of another pipeline.
        """
        stream, mine = self._share.pipeline.stream, self._share.readers
        self._iteration, self._taken, readers = load_position(stream, state, mine)
        self._share = self._share.resumed(readers)
        self._is_even = self._share.is_even or self._communicator.size == 1
        self._set_iterations(self._iteration + 1)
        self.close()
        self._is_ended = False
        self._pattern = None

    def close(self) -> None:
        """Local. End prefetching; `next` goes on from the same position. Safe twice."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._read_ready = None

    def _read(self) -> Any:
        if self._reader is None:
            share = self._share
            epoch = Epoch((self._iteration,), share.salt)
            batches = share.pipeline.iterate(epoch, self._taken, share.read)
            self._reader = (
                Reader(batches, self._depth) if self._namespace is np
                else DeviceReader(batches, self._depth, self._namespace)
            )
            self._read_ready = self._reader.read if self._is_even else None
        return self._reader.read()

    def _end(self) -> None:
        self.close()
        self._is_ended = True

    def _step(self) -> Any:
        if self._is_ended:
            raise StopIteration
        if self._is_even:
            return self._read()
        return self._step_asking() if self._share.steps == UNKNOWN else self._step_counted()

    def _step_counted(self) -> Any:
        """A step where lengths are known and differ: all ranks know which of them are dry."""
        if self._share.steps != INFINITE and self._taken >= self._share.steps:
            raise StopIteration
        dry = [count != INFINITE and self._taken >= count for count in self._share.counts]
        is_dry = dry[self._communicator.rank]
        batch = None if is_dry else self._read()
        if self._pattern is None:
            # The first step, on every rank: later a rank that runs dry knows what its batches look like.
            mine = together(self._communicator, "making an empty batch", lambda: None if is_dry else _pattern(batch))
            patterns = self._communicator.all_gather_object(mine) if any(dry) else [mine]
            self._pattern = mine if mine is not None else next(one for one in patterns if one is not None)
        return self._empty() if is_dry else batch

    def _step_asking(self) -> Any:
        """A step where a length is unknown: the flag of each rank tells whether it has data."""
        batch, error = None, None
        try:
            batch = self._read()
            if self._pattern is None and self._share.pipeline.is_batched:
                self._pattern = _pattern(batch)
            flag = _READY
        except StopIteration:
            flag = _DRY_WITHOUT_PATTERN if self._pattern is None else _DRY
        except Exception as caught:
            error, flag = caught, _FAILED
        decision = self._communicator.all_reduce_max(flag)
        if decision == _FAILED:
            together(self._communicator, "reading a batch", lambda: _raise(error))
        if decision == _DRY_WITHOUT_PATTERN:
            self._ask_for_pattern(flag == _READY)
        elif decision == _DRY:
            raise StopIteration
        return batch if flag == _READY else self._empty()

    def _empty(self) -> Any:
        """An empty batch, where batches lie."""
        if self._namespace is np:
            return self._pattern
        return tree.map_leaves(lambda leaf: self._namespace.asarray(leaf) if goes(leaf) else leaf, self._pattern)

    def _ask_for_pattern(self, is_ready: bool) -> None:
        """Some rank ran dry before it saw a batch: look at another's."""
        answers = self._communicator.all_gather_object((is_ready, self._pattern))
        if not any(ready for ready, _ in answers):
            raise StopIteration
        patterns = [pattern for _, pattern in answers if pattern is not None]
        if not patterns:
            ranks = [rank for rank, (ready, _) in enumerate(answers) if not ready]
            raise mark_shared(unbatched_error(f"after {self._taken} steps ranks {ranks!r} have no data left"))
        if self._pattern is None:
            self._pattern = patterns[0]


def _pattern(batch: Any) -> Any:
    """An empty batch like this one, in host memory, which does not keep it in memory."""
    elements.first_dimension(batch)
    return tree.map_leaves(lambda leaf: arrays.to_host(leaf[:0]).copy(), batch)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
