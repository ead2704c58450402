"""`interleave` and `flat_map`: the elements of datasets that a function makes of elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpidist.arguments import described
from mpidist.data.dataset_base import D, interleaved, pipeline_of
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements
from mpidist.data.reading.readers import counter_of
from mpidist.data.transformations.calls import AUTOTUNE, workers_of


def interleave(
    dataset: D,
    map_func: Callable[..., Any],
    cycle_length: int | None = None,
    block_length: int | None = None,
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
) -> D:
    """Local. Make a dataset of each element, and yield the elements of these datasets in turns.

    Over file names this step reads the files: under the policies AUTO and FILE rank r of n gets every n-th element,
    beginning with number r. Where the datasets are over arrays, a rank reads only its own rows of them.

    Args:
        dataset: The dataset.
        map_func: A function of an element that returns a dataset, an array or a structure of arrays (whose rows are the
            examples), or an iterable. A batch of a returned dataset counts as one example. The cardinality is known for
            `mpidist.data.read_npy`, `hdf5_reader(...)`, and a function with a method `count_examples(element)`.
        cycle_length: Number of datasets that are open at a time; with 1, None or AUTOTUNE they follow one another.
        block_length: Number of elements that a dataset yields in its turn; None means 1.
        num_parallel_calls: Kept for code written for tf.data; it changes nothing.
        deterministic: Kept for code written for tf.data. The order is always the same.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range.
    """
    if not callable(map_func):
        raise TypeError(f"interleave: expected a function, got {described(map_func)}")
    workers_of("interleave", num_parallel_calls, deterministic)
    cycle = 1 if cycle_length is None or cycle_length == AUTOTUNE else cycle_length
    block = 1 if block_length is None else block_length
    opened = partial(_opened_by, map_func)
    return dataset.with_pipeline(interleaved(dataset.pipeline, opened, cycle, block, counter_of(map_func)))


def flat_map(dataset: D, map_func: Callable[..., Any]) -> D:
    """Local. Make a dataset of each element, and yield the elements of one dataset after another.

    >>> from mpidist.data import Dataset
    >>> [int(x) for x in Dataset.range(4).flat_map(lambda x: Dataset.from_tensors(x).repeat(x))]
    [1, 2, 2, 3, 3, 3]

    Args:
        dataset: The dataset.
        map_func: See `interleave`.

    Raises:
        TypeError: `map_func` is not a function.
    """
    if not callable(map_func):
        raise TypeError(f"flat_map: expected a function, got {described(map_func)}")
    opened = partial(_opened_by, map_func)
    return dataset.with_pipeline(interleaved(dataset.pipeline, opened, 1, 1, counter_of(map_func)))


def _opened_by(map_func: Callable[..., Any], element: Any) -> Pipeline:
    return pipeline_of(elements.plain_call(map_func, element))
