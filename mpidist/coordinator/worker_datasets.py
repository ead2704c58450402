"""Datasets of workers: the coordinator lets each worker make its own, and knows how far they have come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mpidist.arguments import described
from mpidist.coordinator.references import OwnContext
from mpidist.coordinator.remote_value import PerWorkerIterator, PerWorkerValues
from mpidist.coordinator.worker_side import make_dataset, resume, same
from mpidist.data.dataset import Dataset
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.data_positions import deal, from_state, to_state
from mpidist.parameter_server.queue.work import Work
from mpidist.parameter_server.worker.dataset_iterator import OwnIterator, PassPart


class Making(Protocol):
    """The coordinator's access to values of workers."""

    def __call__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        values: Callable[[int], PerWorkerValues],
    ) -> PerWorkerValues:
        """Local. Let each worker make a value; `values`, given its number, makes the object that represents them."""
        ...


class DataSets:
    """The datasets of workers, and their iterators.

    Args:
        make: Lets workers make values.
        make_again: Lets workers make values of a number again.
        wait_for: Waits until all workers have made the values of a number.
        closures: The closures of the coordinator.
        is_at_end: Whether an iterator has ended on all workers, by its number.
        workers: The ranks of all workers, in the order of their indices.
        work_of: The work that calls a function.
    """

    def __init__(
        self, make: Making, make_again: Callable[[int, Callable[..., Any], tuple[Any, ...]], None],
        wait_for: Callable[[int], None], closures: Closures, is_at_end: Callable[[int], bool],
        workers: Sequence[int], work_of: Callable[[Callable[..., Any], tuple[Any, ...]], Work],
    ) -> None:
        self._make = make
        self._make_again = make_again
        self._wait_for = wait_for
        self._closures = closures
        self._is_at_end = is_at_end
        self._workers = workers
        self._work_of = work_of
        # The functions that make the datasets of iterators, and these datasets.
        self._iterators: weakref.WeakKeyDictionary[
            PerWorkerIterator, tuple[Callable[..., Dataset] | Dataset, PerWorkerValues]
        ] = weakref.WeakKeyDictionary()

    def create(self, dataset_fn: Callable[..., Dataset] | Dataset) -> PerWorkerValues:
        """Local. See `ClusterCoordinator.create_per_worker_dataset`."""
        values = partial(PerWorkerValues, iterate=partial(self._iterate, dataset_fn))
        if isinstance(dataset_fn, Dataset):
            return self._make(same, (dataset_fn,), {}, values)
        if callable(dataset_fn):
            return self._make(make_dataset, (dataset_fn, OwnContext()), {}, values)
        raise ValueError(f"Unexpected dataset type! Expected a function or a Dataset, got {described(dataset_fn)}")

    def _iterate(self, dataset_fn: Callable[..., Dataset] | Dataset, dataset: PerWorkerValues) -> PerWorkerValues:
        def values(number: int) -> PerWorkerIterator:
            parts = {rank: [PassPart(len(self._workers), self._workers.index(rank))] for rank in self._closures.workers}
            self._closures.resources.positions.begin(number, parts)
            made = PerWorkerIterator(
                number, self._is_at_end, self._state, partial(self._load_state, dataset_fn, dataset)
            )
            self._iterators[made] = dataset_fn, dataset
            return made

        return self._make(OwnIterator, (dataset,), {}, values)

    def joined(self, rank: int, before: Sequence[int]) -> dict[int, Work]:
        """Local. Let a worker that joins continue the data of the lost worker whose place it takes.

        Args:
            rank: The worker.
            before: The ranks that had its place, which are lost.

        Returns:
            The work that makes its iterators, by their numbers; it makes all others as the first workers did.
        """
        index, works = self._workers.index(rank), {}
        fresh = PassPart(len(self._workers), index)
        for iterator, (dataset_fn, dataset) in list(self._iterators.items()):
            number = iterator.number
            parts = self._closures.resources.positions.take_over(number, rank, before, fresh)
            if parts is not None:
                works[number] = self._work_of(resume, (dataset, dataset_fn, OwnContext(), {index: parts}))
        return works

    def _state(self, number: int) -> dict[str, Any]:
        """See `PerWorkerIterator.state`."""
        self._wait_for(number)
        return to_state(self._closures.resources.positions.left(number))

    def _load_state(
        self, dataset_fn: Callable[..., Dataset] | Dataset, dataset: PerWorkerValues, number: int,
        saved: Mapping[str, Any],
    ) -> None:
        """See `PerWorkerIterator.load_state`."""
        parts = from_state(saved)
        if self._closures.uses(number):
            raise RuntimeError(
                "cannot restore the workers' dataset positions while functions that read these datasets are running: "
                "they would read from the restored positions. Call ClusterCoordinator.join() before `restore`"
            )
        # Those that are lost read nothing any more: what they had left is dealt to these.
        living = list(self._closures.workers)
        dealt = dict(zip(living, deal(parts, len(living)), strict=True))
        by_index = {self._workers.index(rank): its for rank, its in dealt.items()}
        # Noted first: a background thread may be notified at once that a worker has made its iterator.
        self._closures.resources.positions.begin(number, dealt)
        self._make_again(number, resume, (dataset, dataset_fn, OwnContext(), by_index))
