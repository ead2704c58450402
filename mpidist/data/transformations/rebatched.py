"""`rebatch`: the same examples in batches of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.arguments import flag
from mpidist.data.dataset_base import D, check_count


def rebatch(dataset: D, batch_size: int | Sequence[int] | npt.NDArray[np.integer], drop_remainder: bool = False) -> D:
    """Local. Put the examples of batches into batches of another size. As `unbatch`, then `batch`.

    Over arrays only row numbers are moved.

    >>> from mpidist.data import Dataset
    >>> [x.tolist() for x in Dataset.range(7).batch(4).rebatch([2, 1])]
    [[0, 1], [2], [3, 4], [5], [6]]

    Args:
        dataset: A dataset with batches.
        batch_size: Number of examples in a batch, or several numbers, which are used in turn; under a strategy global
            batch sizes.
        drop_remainder: Leave out a last batch that is smaller.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is less than 1, there is no size, or the dataset is not known to have batches.
    """
    given: list[Any] = list(batch_size) if isinstance(batch_size, (Sequence, np.ndarray)) else [batch_size]
    sizes = tuple(check_count("rebatch: `batch_size`", size, 1) for size in given)
    if not sizes:
        raise ValueError("rebatch: `batch_size` must be an int or at least one int, got an empty list")
    if not dataset.pipeline.is_batched:
        raise ValueError(
            "rebatch: expected a dataset with batches, made by `batch`, got one without. Call `batch` instead"
        )
    is_full = flag("drop_remainder", drop_remainder, owner="rebatch: ")
    return dataset.with_pipeline(dataset.pipeline.unbatch().batch(sizes, is_full))
