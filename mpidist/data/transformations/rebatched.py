"""`rebatch`: the same rows in batches of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.arguments import flag
from mpidist.data.dataset_base import D, check_count
from mpidist.data.pipeline.pipeline import NO_ROWS, Pipeline
from mpidist.data.reading import element as elements


def rebatch(dataset: D, batch_size: int | Sequence[int] | npt.NDArray[np.integer], drop_remainder: bool = False) -> D:
    """Local. Put the rows of elements, usually the examples of batches, into batches of another size.

    It does what `unbatch` and then `batch` do: elements need not be batches, but all their arrays have the same first
    dimension. Over arrays only the row numbers of batches are moved.

    >>> from mpidist.data import Dataset
    >>> [x.tolist() for x in Dataset.range(7).batch(4).rebatch([2, 1])]
    [[0, 1], [2], [3, 4], [5], [6]]

    Args:
        dataset: A dataset of elements that have rows.
        batch_size: Number of examples in a batch, or several numbers, which are used in turn; under a strategy global
            batch sizes.
        drop_remainder: Whether to leave out a last batch that is smaller.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is less than 1, or there is no size; see also `unbatch`.
    """
    given: list[Any] = list(batch_size) if isinstance(batch_size, (Sequence, np.ndarray)) else [batch_size]
    sizes = tuple(check_count("rebatch: `batch_size`", size, 1) for size in given)
    if not sizes:
        raise ValueError("rebatch: `batch_size` must be an int or at least one int, got an empty list")
    is_full = flag("drop_remainder", drop_remainder, owner="rebatch: ")
    return dataset.with_pipeline(rows_of("rebatch", dataset.pipeline).batch(sizes, is_full))


def rows_of(caller: str, pipeline: Pipeline) -> Pipeline:
    """Local. A pipeline of the rows of the elements of another one.

    Raises:
        ValueError: Elements in memory have no rows. Elsewhere that is an error of reading.
    """
    if pipeline.is_cheap and not pipeline.is_batched:
        elements.require_rows(pipeline.sample(), f"{caller}: {NO_ROWS[0]}", NO_ROWS[1])
    return pipeline.unbatch()
