"""`sample_from_datasets`: elements of several datasets in random order, by weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.arguments import described, flag
from mpidist.data.dataset_base import BaseDataset
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed, Stream, drop_items
from mpidist.data.options import options_of_all
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import ExamplePlace, PlaceSource
from mpidist.data.transformations.random_numbers import END, RandomNumbers, random_numbers

_END = object()


@dataclass(frozen=True)
class Choices:
    """Random numbers of datasets, by weights that stay the same; without end.

    Attributes:
        numbers: Each decides one choice.
        weights: The weights, not negative and not all 0; they need not add up to 1.
    """

    numbers: RandomNumbers
    weights: tuple[float, ...]

    def cardinality(self) -> int:
        """Local. INFINITE."""
        return INFINITE

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Choices from number `start` on; seeks at no cost."""
        for block in self.numbers.blocks(epoch, start):
            yield _choose(self.weights, block)

    def seeds(self) -> list[Seed]:
        """Local. The seed of the numbers."""
        return self.numbers.seeds()


@dataclass(frozen=True)
class WeightedChoices:
    """Random numbers of datasets, each by weights of its own, until there are no more weights.

    Attributes:
        numbers: Each decides one choice.
        weights: The pipeline whose elements are the weights.
        count: Number of weights in an element.
    """

    numbers: RandomNumbers
    weights: Pipeline
    count: int

    def cardinality(self) -> int:
        """Local. The number of weights."""
        return self.weights.stream.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Choices from number `start` on; seeks as the pipeline of weights does."""
        numbers = itertools.chain.from_iterable(self.numbers.blocks(epoch, start))
        for weights, number in zip(self.weights.iterate(epoch, start, self.weights.read), numbers, strict=False):
            yield _choose(_checked(weights, self.count), np.array([number]))

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the weights, then that of the numbers."""
        return [*self.weights.stream.seeds(), *self.numbers.seeds()]


@dataclass(frozen=True)
class Chosen:
    """The items of several pipelines, each in its own order; numbers say which pipeline comes next.

    Attributes:
        pipelines: The pipelines.
        choices: The stream whose items are numbers of pipelines.
        stops: Whether to end where a pipeline without items left is chosen; else the choice is passed over.
    """

    pipelines: tuple[Pipeline, ...]
    choices: Stream
    stops: bool

    def cardinality(self) -> int:
        """Local. The sum of all cardinalities, where no choice ends the data; else UNKNOWN, or INFINITE."""
        counts = self._counts
        is_endless = self.choices.cardinality() == INFINITE
        if is_endless and (counts == [INFINITE] * len(counts) or (INFINITE in counts and not self.stops)):
            return INFINITE
        return sum(counts) if is_endless and not self.stops and min(counts) >= 0 else UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks by following the choices, where all cardinalities are known.

        Else it seeks by reading and dropping.
        """
        if start > 0 and UNKNOWN in self._counts:
            yield from drop_items(self.blocks(epoch, 0), start)
            return
        choice, taken = self._place(epoch, start)
        items = [
            itertools.chain.from_iterable(pipeline.stream.blocks(epoch, begin))
            for pipeline, begin in zip(self.pipelines, taken, strict=True)
        ]
        left = set(range(len(items)))
        for number in itertools.chain.from_iterable(self.choices.blocks(epoch, choice)):
            item = next(items[number], _END)
            if item is not _END:
                yield [ExamplePlace(self.pipelines[number], item)]
                continue
            left.discard(int(number))
            if self.stops or not left:
                return

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the pipelines, in their order, then those of the choices."""
        return [*(seed for one in self.pipelines for seed in one.stream.seeds()), *self.choices.seeds()]

    @property
    def _counts(self) -> list[int]:
        return [pipeline.stream.cardinality() for pipeline in self.pipelines]

    def _place(self, epoch: Epoch, start: int) -> tuple[int, list[int]]:
        """The number of the choice after item `start`, and how many items each pipeline has given before.

        Where there is no such item: that of a choice after the last item.
        """
        counts = self._counts
        choice, given, taken = 0, 0, [0] * len(counts)
        for block in self.choices.blocks(epoch, 0) if start else ():
            numbers = np.asarray(block)
            places = [np.flatnonzero(numbers == number) for number in range(len(counts))]
            found = [
                those if count == INFINITE else those[: count - begin]
                for those, count, begin in zip(places, counts, taken, strict=True)
            ]
            passed = np.sort(np.concatenate(found))
            if self.stops and len(passed) < len(numbers):
                # The first choice that is not among those of items ends the data.
                end = int(np.setdiff1d(np.arange(len(numbers)), passed)[0])
                passed = passed[passed < end]
            else:
                end = len(numbers)
            is_here = given + len(passed) > start
            is_last = is_here or end < len(numbers)
            end = int(passed[start - given]) if is_here else end
            taken = [begin + int(np.searchsorted(those, end)) for begin, those in zip(taken, found, strict=True)]
            choice, given = choice + end, given + len(passed)
            if is_last or taken == counts:
                break
        return choice, taken


def sample_from_datasets(
    datasets: Sequence[Any],
    weights: Any = None,
    seed: int | None = None,
    stop_on_empty_dataset: bool = False,
    rerandomize_each_iteration: bool | None = None,
) -> Any:
    """Local. Elements of several datasets in random order; each dataset keeps its own order.

    Over arrays only row numbers are moved, and a rank reads only its own rows.

    >>> from mpidist.data import Dataset
    >>> both = Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(100, 103)], weights=[0.5, 0.5], seed=1)
    >>> sorted(int(x) for x in both)
    [0, 1, 2, 100, 101, 102]

    Args:
        datasets: Datasets of the same kind of elements, at least one. Either all have batches, or none.
        weights: One number per dataset, not negative: the probability that it is chosen next, up to a common factor. Or
            a dataset of such vectors, one for each choice; the result ends where it ends. None: equal weights.
        seed: The seed of the choices, which never depend on the number of ranks. None draws a seed; a distributed
            dataset uses that of rank 0 on all ranks.
        stop_on_empty_dataset: Whether to end where a dataset without elements left is chosen; else another choice is
            made, until all datasets have ended.
        rerandomize_each_iteration: Whether each iteration makes other choices; None means False.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no dataset, the weights do not fit, or some datasets have batches and some have not.
    """
    caller = "sample_from_datasets"
    given = list(datasets) if isinstance(datasets, (list, tuple)) else []
    if not given or not all(isinstance(one, BaseDataset) for one in given):
        kind = ValueError if isinstance(datasets, (list, tuple)) and not given else TypeError
        raise kind(f"{caller}: expected a list of at least one dataset, got {described(datasets)}")
    stops = flag("stop_on_empty_dataset", stop_on_empty_dataset, owner=f"{caller}: ")
    numbers = random_numbers(caller, seed, rerandomize_each_iteration)
    choices: Stream
    if isinstance(weights, BaseDataset):
        choices = WeightedChoices(numbers, weights.pipeline, len(given))
    else:
        checked = _checked([1.0] * len(given) if weights is None else weights, len(given))
        # A dataset of weight 0 is never chosen: no iteration may wait for its end.
        given = [one for one, weight in zip(given, checked, strict=True) if weight > 0]
        choices = Choices(numbers, tuple(weight for weight in checked if weight > 0))
    pipelines = tuple(one.pipeline for one in given)
    if len({pipeline.is_batched for pipeline in pipelines}) > 1:
        raise ValueError(
            f"{caller}: expected datasets that all have batches, or none of them, but some have and some have not. "
            f"Call `batch` after {caller}"
        )
    options = options_of_all(caller, [one.options() for one in given])
    source = PlaceSource(lambda: pipelines)
    stream = Chosen(pipelines, choices, stops)
    is_assumed = all(pipeline.is_assumed for pipeline in pipelines)
    return type(given[0])(
        Pipeline(source, stream, is_loaded=pipelines[0].is_batched, is_assumed=is_assumed), options
    )


def _choose(weights: tuple[float, ...], numbers: Items) -> npt.NDArray[np.int64]:
    limits = np.cumsum(weights)
    # To the right: an interval of width 0 is never hit.
    return np.searchsorted(limits / limits[-1], np.asarray(numbers) / END, side="right")


def _checked(weights: Any, count: int) -> tuple[float, ...]:
    try:
        array = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"sample_from_datasets: expected `weights` of {count} numbers, or a dataset of them, got "
            f"{described(weights)}"
        ) from None
    if array.shape != (count,) or not (np.isfinite(array).all() and (array >= 0).all() and array.any()):
        raise ValueError(
            f"sample_from_datasets: expected `weights` of {count} numbers, one for each dataset, not negative and not "
            f"all 0, got {described(weights)}"
        )
    return tuple(array.tolist())
