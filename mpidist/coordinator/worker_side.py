"""A worker's knowledge of itself: its index, and its part of the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mpidist import context
from mpidist.arguments import described
from mpidist.data.dataset import Dataset
from mpidist.data.input_context import InputContext
from mpidist.data.pipeline.iterator import DatasetIterator
from mpidist.parameter_server.worker.dataset_iterator import OwnIterator, PassPart
from mpidist.parameter_server.worker.worker import Worker


def experimental_get_current_worker_index() -> int:
    """Local. The index of the worker that runs this function, given to `schedule` or making a worker's data.

    Raises:
        RuntimeError: The call is outside such a function.
    """
    entry = context.innermost()
    if entry is None or not isinstance(entry.home, Worker):
        raise RuntimeError(
            "experimental_get_current_worker_index() is called inside a function that a worker runs: give the function "
            "to ClusterCoordinator(strategy).schedule. Pass the index to threads that it starts"
        )
    return entry.home.index


def same(dataset: Dataset) -> Dataset:
    """Local. A dataset that was sent."""
    return dataset


def make_dataset(dataset_fn: Callable[..., Any], place: InputContext) -> Any:
    """Local. Call the function that makes a dataset.

    Args:
        dataset_fn: The user's function.
        place: The place of this worker, for a function that has an argument without a default.

    Raises:
        TypeError: It returns no dataset.
    """
    parameters = inspect.signature(dataset_fn).parameters.values()
    wants = any(one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD for one in parameters)
    made = dataset_fn(place) if wants else dataset_fn()
    if not hasattr(made, "__iter__"):
        raise TypeError(
            "the function of create_per_worker_dataset must return a dataset, for instance "
            f"mpidist.data.Dataset.range(3); {getattr(dataset_fn, '__name__', 'it')} returned {described(made)}"
        )
    return made


def resume(
    dataset: Any, dataset_fn: Callable[..., Any] | Dataset, place: InputContext, parts: Mapping[int, Sequence[PassPart]]
) -> OwnIterator:
    """Local. The iterator over the rest of a pass, as a checkpoint describes it.

    Args:
        dataset: This worker's own, which continues with the next pass.
        dataset_fn: See `ClusterCoordinator.create_per_worker_dataset`.
        place: The place of this worker.
        parts: The part that each worker reads, by its index.

    Raises:
        ValueError: The dataset is another one than when the position was saved.
    """
    mine = parts.get(place.input_pipeline_id, ())

    def data_of(part: PassPart) -> Any:
        if isinstance(dataset_fn, Dataset) or (part.pipelines, part.pipeline) == (
            place.num_input_pipelines, place.input_pipeline_id
        ):
            return dataset
        return make_dataset(dataset_fn, InputContext(part.pipelines, part.pipeline, place.num_replicas_in_sync))

    begun = iter(dataset)
    if not isinstance(begun, DatasetIterator):
        raise ValueError(f"expected a dataset of mpidist.data, which can resume at a position, got {dataset!r}")
    last = max((part.pass_state.get("iteration", 0) for part in mine), default=0)
    begun.load_state({**begun.state(), "iteration": last})
    return OwnIterator(dataset, [partial(lambda part: part.open(data_of(part)), part) for part in mine])
