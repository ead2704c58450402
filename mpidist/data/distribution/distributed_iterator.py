"""`DistributedIterator`: this rank's batches, with the same number of steps on every rank.

A step may hold a collective call. So all ranks must call `next` equally often; if one rank ended early, the others
would wait for it in their next collective call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpidist import arrays, context, tree
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.data.distribution.device import DeviceReader, is_for_gpu
from mpidist.data.distribution.share import FROM_FUNCTION, RankShare, unbatched_error
from mpidist.data.items.groups import ALONE, GroupPlace, Place, groups_state
from mpidist.data.items.position import load_position, position_state
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch
from mpidist.data.pipeline.iterator import Reader
from mpidist.data.reading import element as elements
from mpidist.errors import mark_shared
from mpidist.observe.trace import INPUT, TRACE

# The states that ranks exchange before a step where a length is unknown. The largest state of any rank decides, so
# their order matters: data on one rank outweighs the end of data on another, and an error outweighs all.
_ENDED, _READY, _ENDED_WITHOUT_TEMPLATE, _FAILED = range(4)


class OptionalBatch:
    """A batch, or nothing at the end of the data; see `DistributedIterator.get_next_as_optional`."""

    def __init__(self, batches: tuple[Any, ...]) -> None:
        self._batches = batches

    def has_value(self) -> bool:
        """Local. Whether there is a batch; the same on every rank."""
        return bool(self._batches)

    def get_value(self) -> Any:
        """Local. The batch.

        Raises:
            ValueError: There is no batch.
        """
        if not self._batches:
            raise ValueError("there is no batch: the end of the dataset was reached. Call `has_value()` first")
        return self._batches[0]


class Numbered(NamedTuple):
    """A distributed dataset, as all ranks know it.

    Attributes:
        number: The number of the dataset among those on the same ranks; see `CallOrder.deal`.
        is_own: Whether each rank has a dataset of its own. Positions then differ between ranks, and only the end is
            common.
        group: The group of these ranks, if several groups go through the data at their own pace.
    """

    number: int
    is_own: bool
    group: GroupPlace = ALONE


@dataclass
class Passes:
    """The passes over a distributed dataset.

    Attributes:
        count: The number of passes that have begun.
    """

    count: int = 0


class DistributedIterator(Iterator[Any]):
    """Local. One pass over a distributed dataset.

    Every rank makes the same number of steps:

    - Where all ranks are known to have data for every step, they exchange nothing.
    - Where lengths are known but differ, ranks without data get empty batches. The ranks exchange a template of such
      a batch in the first step.
    - Where a length is unknown, the ranks exchange one integer in each step.

    Args:
        share: The share of the data that this rank reads.
        communicator: The ranks that step together.
        iteration: Number of the pass; shuffles depend on it.
        depth: Number of batches to read ahead in a thread; 0 reads in `next`.
        passes: The passes over the dataset; a loaded position sets the number of passes that have begun.
        namespace: The module of the batches' arrays, `numpy` or `cupy`.
        numbered: The number of the dataset, which the next call's signature contains, with the position; None where
            it contains neither.

    Attributes:
        steps_behind: The number of steps of this pass that were made, of several groups the largest one, where a
            position was loaded that was counted in other batches or by another number of groups; else None.
    """

    def __init__(
        self,
        share: RankShare,
        communicator: Communicator,
        iteration: int,
        depth: int,
        passes: Passes,
        namespace: Any = np,
        numbered: Numbered | None = None,
    ) -> None:
        self._share = share
        self._communicator = communicator
        self._iteration = iteration
        self._depth = depth
        self._passes = passes
        self._namespace = namespace
        self._taken = 0
        self._dataset_number, self._is_own, self._group = numbered or Numbered(0, is_own=True)
        self._places: Mapping[int, Place] = {}
        self.steps_behind: int | None = None
        self._note_end = None if numbered is None or communicator.size == 1 else communicator.order.note_batch
        self._note = None if self._is_own else self._note_end
        self._is_ended = False
        # Whether this rank has ended and others have not.
        self._steps_alone = False
        # An empty batch with the dtypes and dimensions of this rank's batches, once they are known.
        self._template: Any = None
        self._reader: Reader | DeviceReader | None = None
        self._is_even = share.is_even or communicator.size == 1
        # A shortcut past `_step`, once reading has begun and no rank waits for another. Such a step may take only a few
        # microseconds, so each Python call counts.
        self._read_ready: Callable[[], Any] | None = None
        # What reads a batch, once there is a reader; noted in a timeline where one is wanted.
        self._read_batch: Callable[[], Any] | None = None

    @property
    def group(self) -> Communicator:
        """Local. The ranks that step together. They must all save and restore a checkpoint of the iterator."""
        return self._communicator

    @property
    def element_spec(self) -> Any:
        """Local. The `ArraySpec`s of this rank's batches; see `DistributedDataset.element_spec`."""
        return self._share.pipeline.spec(is_whole=self._communicator.size == 1)

    def __next__(self) -> Any:
        """Collective. This rank's next batch. After an error of reading the same batch is tried again.

        Raises:
            StopIteration: No rank has data left.
            ValueError: The call is inside `Strategy.run`.
            RuntimeError: This rank has more or fewer batches than were counted. On this rank alone: ranks that count
                on each other's lengths do not communicate.
        """
        entry = context.innermost()
        if entry is not None and entry.replica_context is not None:
            raise ValueError(
                "next(iterator) was called inside `Strategy.run` and should be called from outside of the function "
                "given to it. Pass the batch as an argument: strategy.run(fn, args=(next(iterator),))"
            )
        try:
            read = self._read_ready
            batch = self._step() if read is None else read()
        except StopIteration:
            if self._note_end is not None and not self._is_ended:
                self._note_end(self._dataset_number, self._iteration, -1)
            self._end()
            rank = self._communicator.rank
            if self._taken < self._share.counts[rank]:
                raise _count_error(rank, self._share.counts[rank], f"only {self._taken}") from None
            raise
        except BaseException:
            # The next element would be taken for this batch, and a generator that has raised looks like the end.
            self.close()
            raise
        self._taken = taken = self._taken + 1
        # The position of the batches given out, not of those read ahead.
        if self._note is not None:
            self._note(self._dataset_number, self._iteration, taken)
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
                f"get_next: end of the dataset after {self._taken} batches. Begin a new pass with iter(dataset), or "
                "call get_next_as_optional()"
            )
        )

    def get_next_as_optional(self) -> OptionalBatch:
        """Collective. This rank's next batch as an optional, which has no value at the end, on all ranks alike."""
        for batch in self:
            return OptionalBatch((batch,))
        return OptionalBatch(())

    def state(self) -> dict[str, int]:
        """Local. The position, the same on every rank.

        Under the policies AUTO, DATA, FILE and HINT any number of ranks can load it, and no example is repeated or left
        out. Under OFF, and where each rank has a dataset of its own, only the number of steps is common.

        Returns:
            `iteration`: the number of the pass. `batch`: the number of global batches (of steps, where only these are
            common) that the program has taken in this pass; batches that were only read ahead do not count.
            `seed_<k>`: the seed of each shuffle without a seed of the user's. `inner_seed_<k>`: for each `interleave`,
            the seed from which those of opened datasets follow. `batch_size`: the global one, where it is known and
            common. `passes`: the number of passes that have begun, where this is not the last one and the ranks share
            the dataset. `readers`, only for files and under HINT: the number of ranks that shared them. Another number
            of ranks finishes the pass in the global batches that those ranks would have had. Under `HybridStrategy`
            `groups`, the number of groups, and where other groups were at the last save, if elsewhere:
            `group_<g>_iteration` and `group_<g>_batch`.
        """
        share = self._share
        # How many passes a rank has made over a dataset of its own is its own affair; this is the same on every rank.
        passes = 0 if self._is_own else self._passes.count
        position = position_state(
            share.pipeline.stream, self._iteration, self._taken, share.readers, share.batch_size, passes
        )
        own = self._iteration, self._taken
        # What was noted may be from an earlier save.
        others = self._places if self._places.get(self._group.index) == own else {}
        return {**position, **groups_state(self._group, own, others)}

    @property
    def place_in_group(self) -> Place | None:
        """Local. The pass of this group, and its batches in it; None without groups. See `states.Stateful`."""
        return None if self._group.count == 1 else (self._iteration, self._taken)

    def note_places(self, places: Mapping[int, Place]) -> None:
        """Local. Note where all groups are, for a `state` before this one takes another batch."""
        self._places = dict(places)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Local, but all ranks must call it. Continue at the position of `state`.

        The dataset's next pass is the one after this, or after the last one that had begun.

        Raises:
            ValueError: The state belongs to another pipeline, or counts batches of a size that cannot be converted.
        """
        share = self._share
        found = load_position(share.pipeline.stream, state, share.readers, share.batch_size, self._group)
        self._iteration, self._taken, self._passes.count = found.iteration, found.taken, found.passes
        self.steps_behind = found.most if found.is_converted else None
        self._share = share.resumed(found.readers)
        self._is_even = self._share.is_even or self._communicator.size == 1
        self.close()
        self._is_ended = self._steps_alone = False
        # On all ranks: whether the ranks exchange templates must depend only on what they have in common.
        self._template = None

    def close(self) -> None:
        """Local. End prefetching; `next` continues from the same position. A second call does nothing."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._read_ready = self._read_batch = None

    def _read(self) -> Any:
        read = self._read_batch
        if read is None:
            share = self._share
            epoch = Epoch((self._iteration,), share.salt)
            batches = share.pipeline.iterate(epoch, self._taken, share.read)
            rank = self._communicator.rank
            count = share.counts[rank]
            if count >= 0:
                expected = itertools.islice(batches, max(0, count - self._taken))
                batches = itertools.chain(expected, _none_of(batches, rank, count))
            self._reader = (
                Reader(batches, self._depth) if self._namespace is np
                else DeviceReader(batches, self._depth, self._namespace)
            )
            read = self._read_batch = TRACE.timed(INPUT, self._reader.read)
            self._read_ready = read if self._is_even else None
        return read()

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
        """A step where lengths are known and differ: every rank knows which ranks have no data left."""
        if self._share.steps != INFINITE and self._taken >= self._share.steps:
            # Raises StopIteration, unless there is a batch too many.
            return self._read()
        ended = [count != INFINITE and self._taken >= count for count in self._share.counts]
        is_ended = ended[self._communicator.rank]
        batch = None if is_ended else self._read()
        if self._template is None:
            # In the first step, and on every rank, since these calls are collective. A rank whose data end later keeps
            # its own template; only ranks without any batch need that of another rank.
            mine = together(self._communicator, "making an empty batch", lambda: None if is_ended else _template(batch))
            templates = self._communicator.all_gather_object(mine) if any(ended) else [mine]
            self._template = mine if mine is not None else next(one for one in templates if one is not None)
        return self._empty() if is_ended else batch

    def _step_asking(self) -> Any:
        """A step where a length is unknown: the ranks exchange whether they have data."""
        batch: Any = None
        error: Exception | None = None
        # Nothing may leave this block by an exception: the other ranks already wait for this rank's state.
        try:
            batch = self._read()
            if self._template is None and self._share.pipeline.may_be_empty(batch):
                self._template = _template(batch)
            state = _READY
        except StopIteration:
            state = _ENDED_WITHOUT_TEMPLATE if self._template is None else _ENDED
            if self._steps_alone and self._share.is_common:
                error, state = _length_error(self._taken - 1), _FAILED
        except Exception as caught:
            error, state = caught, _FAILED
        decision = self._communicator.all_reduce_max(state)
        if decision == _FAILED:
            together(self._communicator, "reading a batch", lambda: _raise(error))
        if decision == _ENDED_WITHOUT_TEMPLATE:
            self._exchange_templates(is_ready=state == _READY)
        elif decision == _ENDED:
            raise StopIteration
        # Only now this rank knows that others have data. It sends them its state in the next step, which all take.
        self._steps_alone = state != _READY
        return batch if state == _READY else self._empty()

    def _empty(self) -> Any:
        """An empty batch, in the same memory as other batches."""
        if self._namespace is np:
            return self._template
        return tree.map_leaves(lambda leaf: self._namespace.asarray(leaf) if is_for_gpu(leaf) else leaf, self._template)

    def _exchange_templates(self, *, is_ready: bool) -> None:
        """Collective. Get a template from another rank, since some rank's data ended before its first batch."""
        answers = self._communicator.all_gather_object((is_ready, self._template))
        if not any(ready for ready, _ in answers):
            raise StopIteration
        templates = [template for _, template in answers if template is not None]
        if not templates:
            ranks = [rank for rank, (ready, _) in enumerate(answers) if not ready]
            raise mark_shared(unbatched_error(f"after {self._taken} steps ranks {ranks!r} have no data left"))
        if self._template is None:
            self._template = templates[0]


def _template(batch: Any) -> Any:
    """An empty batch with the batch's dtypes and other dimensions, in host memory; zeros for arrays without dimensions.

    Copies, since views would keep the memory of the whole batch.
    """
    if not any(leaf.shape for leaf in tree.flatten(batch)[0]):
        elements.first_dimension(batch)  # an error: nothing of this batch can be empty
    return tree.map_leaves(
        lambda leaf: arrays.to_host(leaf[:0]).copy() if leaf.shape else leaf.dtype.type(), batch
    )


def _none_of(batches: Iterator[Any], rank: int, count: int) -> Iterator[Any]:
    """Raise if there is a batch left: other ranks have ended their pass, and would wait for this one."""
    for _ in batches:
        raise _count_error(rank, count, "more")
    yield from ()


def _count_error(rank: int, count: int, got: str) -> RuntimeError:
    return RuntimeError(
        f"rank {rank}: the dataset has changed since it was distributed: expected a pass of {count} batches, got "
        f"{got}. Do not change files while a dataset reads them, or distribute the dataset again before the next pass"
    )


def _length_error(count: int) -> ValueError:
    return ValueError(
        f"the dataset ended here after {count} batches, and other ranks have more: expected the same elements in the "
        f"same order on every rank. Where ranks have data of their own use {FROM_FUNCTION}"
    )


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
