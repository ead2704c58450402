"""Distributed datasets of a strategy, loaded at their first use: they would be a third of what a strategy loads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from mpidist.options import InputOptions
from mpidist.variables.replicas import Replicas

if TYPE_CHECKING:
    from mpidist.data.dataset import Dataset
    from mpidist.data.distribution.distributed_dataset import DistributedDataset
    from mpidist.data.input_context import InputContext


def distribute(
    dataset: Dataset, replicas: Replicas, options: InputOptions | None, namespace: Any, **more: Any
) -> DistributedDataset:
    """Collective. See `DistributedDataset`."""
    made = _module().DistributedDataset(
        dataset, replicas.pipelines, options=options, namespace=namespace, everyone=replicas.everyone, **more
    )
    return cast("DistributedDataset", made)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset], replicas: Replicas, options: InputOptions | None, namespace: Any,
    **more: Any,
) -> DistributedDataset:
    """Collective. See `distribute_datasets_from_function`."""
    made = _module().distribute_datasets_from_function(
        dataset_fn, replicas.pipelines, options, namespace, everyone=replicas.everyone,
        replica_count=replicas.communicator.size, **more,
    )
    return cast("DistributedDataset", made)


def _module() -> Any:
    return importlib.import_module("mpidist.data.distribution.distributed_dataset")
