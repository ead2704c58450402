"""A worker's knowledge of itself: its index, and its part of the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mpidist import context
from mpidist.data.dataset import Dataset
from mpidist.data.input_context import InputContext
from mpidist.serving.worker import Worker


def experimental_get_current_worker_index() -> int:
    """Local. The index of the worker that runs this: in a function of `schedule`, or one that makes a worker's data.

    Raises:
        RuntimeError: Elsewhere.
    """
    entry = context.innermost()
    if entry is None or not isinstance(entry.home, Worker):
        raise RuntimeError(
            "experimental_get_current_worker_index() is called inside a function that a worker runs: give the function "
            "to ClusterCoordinator(strategy).schedule. Threads that it starts must be given the index"
        )
    return entry.home.index


def same(dataset: Dataset) -> Dataset:
    """Local. A data set that was sent."""
    return dataset


def make_dataset(dataset_fn: Callable[..., Any], place: InputContext) -> Any:
    """Local. Call the function that makes a data set.

    Args:
        dataset_fn: The user's.
        place: Which worker this is; for a function with an argument that has no default.
    """
    parameters = inspect.signature(dataset_fn).parameters.values()
    wants = any(one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD for one in parameters)
    return dataset_fn(place) if wants else dataset_fn()
