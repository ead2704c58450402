"""The input of groups: each group gets batches of its own of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpidist.data.dataset import Dataset
from mpidist.data.items.groups import ALONE, GroupPlace
from mpidist.data.items.stream import Shard, take_seeds
from mpidist.options import AutoShardPolicy
from mpidist.strategy.hybrid.groups import HybridGroups


def share_among_groups(
    dataset: Any, groups: HybridGroups, first_value: Callable[[str, Any], Any]
) -> tuple[Any, GroupPlace]:
    """Local, and Collective over all groups where a shuffle has no seed. The batches of this rank's group; its place.

    A value that is no batched dataset is returned as it is: the caller refuses it.

    Args:
        dataset: The dataset, the same on every rank.
        groups: All groups.
        first_value: A function, Collective over all groups, of a subject and a value; it returns the first group's
            value.
    """
    if groups.count == 1 or not isinstance(dataset, Dataset):
        return dataset, ALONE
    if dataset.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF:
        return dataset, ALONE
    pipeline = dataset.pipeline
    if pipeline.is_assumed and not pipeline.is_batched:
        pipeline = pipeline.as_batches()
    if not pipeline.is_batched:
        return dataset, ALONE
    shared = dataset.with_pipeline(replace(pipeline, stream=Shard(pipeline.stream, groups.count, groups.index)))
    drawn = [seed for seed in pipeline.stream.seeds() if seed.drawn]
    if drawn:
        # Else each group would have an order of its own: some examples would be read by several groups, others by none.
        values = first_value("the seeds of a dataset", [seed.value for seed in drawn])
        take_seeds(drawn, values)
    return shared, GroupPlace(groups.count, groups.index)
