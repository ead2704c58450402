"""`filter`, `take_while`, `scan` and `unique`: results that depend on the values of elements, or of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from mpidist import tree
from mpidist.arguments import described
from mpidist.data.dataset_base import D
from mpidist.data.items.stream import UNKNOWN, Epoch, Items, Seed
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements
from mpidist.data.reading.source import ElementSource


@dataclass(frozen=True)
class Replayed:
    """Elements that are made of all elements of a pipeline, in order.

    Attributes:
        pipeline: The pipeline, whose elements are all read.
        make: A function that makes the elements of a pass of those of the pipeline.
        keeps_count: Whether `make` makes one element of each.
    """

    pipeline: Pipeline
    make: Callable[[Iterator[Any]], Iterator[Any]]
    keeps_count: bool = False

    def cardinality(self) -> int:
        """Local. UNKNOWN unless the count is kept: only reading to the end would give it; 0 for an empty pipeline."""
        known = self.pipeline.stream.cardinality()
        return known if self.keeps_count or known == 0 else UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Elements from number `start` on; seeks by reading all from the beginning of the pass."""
        for number, element in enumerate(self.make(self.pipeline.iterate(epoch, 0, self.pipeline.read))):
            if number >= start:
                yield [element]

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the pipeline's stream."""
        return self.pipeline.stream.seeds()


def filter_elements(dataset: D, predicate: Callable[..., Any]) -> D:
    """Local. Keep the elements for which `predicate` is true. Their number is unknown; every rank reads all.

    Raises:
        TypeError: `predicate` is not a function.
    """
    holds = _predicate("filter", predicate)
    return _replayed(dataset, partial(filter, holds))


def take_while(dataset: D, predicate: Callable[..., Any]) -> D:
    """Local. Keep the elements before the first for which `predicate` is false. Every rank reads all of them.

    A pass continues from a saved position by reading it again from its beginning.

    >>> from mpidist.data import Dataset
    >>> [int(x) for x in Dataset.range(10).take_while(lambda x: x < 3)]
    [0, 1, 2]

    Raises:
        TypeError: `predicate` is not a function.
    """
    holds = _predicate("take_while", predicate)
    return _replayed(dataset, partial(takewhile, holds))


def unique(dataset: D) -> D:
    """Local. Keep the first of elements that are equal. Every rank reads all, and keeps all different ones in memory.

    Two elements are equal where their structures, shapes and values are. A pass continues from a saved position by
    reading it again from its beginning.

    >>> from mpidist.data import Dataset
    >>> [int(x) for x in Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()]
    [1, 37, 2]
    """
    return _replayed(dataset, _without_repetition)


def scan(dataset: D, initial_state: Any, scan_func: Callable[[Any, Any], Any]) -> D:
    """Local. Make an element of each element and of a state that is passed from one to the next. Every rank reads all.

    Each pass begins with `initial_state`; so does each repetition of a `repeat` after it. A pass continues from a saved
    position by reading it again from its beginning, or from that of the repetition where the number of elements is
    known. Under the policies FILE, HINT and OFF each rank has a state of its own.

    >>> import numpy as np
    >>> from mpidist.data import Dataset
    >>> sums = Dataset.range(5).scan(np.int64(0), lambda total, x: (total + x, total + x))
    >>> [int(x) for x in sums]
    [0, 1, 3, 6, 10]

    Args:
        dataset: The dataset.
        initial_state: An array, or a tuple or dictionary of arrays.
        scan_func: A function of the state and the element, two arguments also where the element is a tuple. It returns
            the next state, of the same structure, and the new element.

    Raises:
        TypeError: `scan_func` is not a function. While reading: it does not return a pair, or another state.
    """
    if not callable(scan_func):
        raise TypeError(f"scan: expected a function `scan_func(state, element)`, got {described(scan_func)}")
    state = elements.convert(initial_state)
    made = partial(_scanned, state, scan_func)
    first = dataset.pipeline.sample
    source = ElementSource(lambda item: item, lambda: next(made(iter([first()]))))
    pipeline = dataset.pipeline
    stream = Replayed(pipeline, made, keeps_count=True)
    return dataset.with_pipeline(
        replace(pipeline.in_whole(), source=source, stream=stream, is_loaded=pipeline.is_batched)
    )


def next_state(caller: str, state: Any, value: Any) -> Any:
    """Local. A state that a user's function has returned, as arrays.

    Args:
        caller: The caller of the function, for errors.
        state: The state before.
        value: The function's result.

    Raises:
        TypeError: The structures differ.
    """
    following = elements.convert(value)
    expected, got = tree.flatten(state)[1], tree.flatten(following)[1]
    if expected != got:
        raise TypeError(
            f"{caller}: the function must return a state of the structure of `initial_state`, expected {expected}, got "
            f"{got}. Change `initial_state`, or what the function returns"
        )
    return following


def _replayed(dataset: D, make: Callable[[Iterator[Any]], Iterator[Any]]) -> D:
    pipeline = dataset.pipeline
    return dataset.with_pipeline(
        replace(pipeline.in_whole(), stream=Replayed(pipeline, make), is_loaded=pipeline.is_batched)
    )


def _predicate(caller: str, predicate: Callable[..., Any]) -> Callable[[Any], bool]:
    if not callable(predicate):
        raise TypeError(f"{caller}: expected a function, got {described(predicate)}")

    def holds(element: Any) -> bool:
        answer = elements.call(predicate, element)
        if getattr(answer, "size", 0) != 1 or answer.dtype.kind not in "biuf":
            raise TypeError(
                f"{caller}: expected the predicate to return one True or False, got {described(answer)}. Join several "
                "with numpy.all or numpy.any"
            )
        return bool(answer)

    return holds


def _without_repetition(those: Iterator[Any]) -> Iterator[Any]:
    seen: set[Any] = set()
    for element in those:
        leaves, spec = tree.flatten(element)
        if not all(map(elements.is_array, leaves)):
            raise TypeError(
                "unique: expected elements that are arrays, got datasets. Call `unique` before `window`"
            )
        key = (spec, *((leaf.shape, *leaf.ravel().tolist()) for leaf in leaves))
        if key not in seen:
            seen.add(key)
            yield element


def _scanned(initial_state: Any, function: Callable[[Any, Any], Any], those: Iterator[Any]) -> Iterator[Any]:
    # Copies: a function that writes to its state must not change the next pass, nor an element that it has given; and
    # the program may write to an element.
    state = _copied(initial_state)
    for element in those:
        result = function(state, element)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(
                "scan: expected `scan_func` to return a pair, the next state and the new element, got "
                f"{described(result)}"
            )
        state = _copied(next_state("scan", state, result[0]))
        yield elements.convert(result[1])


def _copied(state: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf.copy(), state)
