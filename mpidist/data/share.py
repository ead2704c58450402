"""A rank's share of a dataset: which items it follows and what it reads of each, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mpidist.comm.agreement import require_same, together
from mpidist.comm.communicator import Communicator
from mpidist.data.dataset import Dataset
from mpidist.data.pipeline import Pipeline
from mpidist.data.sharding import rotated_sizes
from mpidist.data.stream import INFINITE, UNKNOWN
from mpidist.errors import mark_collective
from mpidist.options import AutoShardPolicy

FROM_DATASET = "experimental_distribute_dataset"
FROM_FUNCTION = "distribute_datasets_from_function"


@dataclass(frozen=True)
class Share:
    """What one rank reads.

    Attributes:
        pipeline: Its stream has one item per step of this rank.
        read: This rank's batch of an item.
        counts: How many steps each rank has data for, or INFINITE, or UNKNOWN.
        salt: 0 where all ranks follow the same stream, else the rank: shuffles without a seed then differ.
    """

    pipeline: Pipeline
    read: Callable[[Any], Any]
    counts: tuple[int, ...]
    salt: int

    @property
    def steps(self) -> int:
        """Local. How many steps there are: until the last rank has none left; or INFINITE, or UNKNOWN."""
        if UNKNOWN in self.counts:
            return UNKNOWN
        return INFINITE if INFINITE in self.counts else max(self.counts)

    @property
    def is_even(self) -> bool:
        """Local. Whether it is known that every rank has data for every step."""
        return UNKNOWN not in self.counts and len(set(self.counts)) == 1


class _Facts(NamedTuple):
    """What a rank tells the others about its dataset."""

    policy: str
    cardinality: int
    batch_size: int | None
    is_batched: bool
    given_seeds: tuple[int | None, ...]
    drawn_seeds: tuple[int, ...]


def share_dataset(dataset: Dataset, communicator: Communicator) -> Share:
    """Collective. This rank's share of a dataset that every rank gives alike, by its `auto_shard_policy`.

    AUTO and DATA: the rank's contiguous piece of every global batch. OFF: all data, in batches of 1/n.

    Raises:
        TypeError: No dataset.
        ValueError: It has no batches, or zero rows, or its policy cannot be followed.
        MismatchError: The ranks' datasets differ in length, batch size or seeds.
    """
    policy, pipeline = together(communicator, FROM_DATASET, lambda: _prepare(dataset, communicator))
    facts = communicator.all_gather_object(_facts_of(pipeline, policy.name))
    require_same([fact.policy for fact in facts], "the auto-shard policy of a dataset", "Set it on all ranks.")
    is_alike = policy is AutoShardPolicy.DATA
    if is_alike:
        require_same(
            [(fact.cardinality, fact.batch_size, fact.given_seeds) for fact in facts],
            f"{FROM_DATASET}: (cardinality, batch size, seeds of shuffles) of the dataset",
            f"Give every rank the same dataset; where ranks have data of their own use {FROM_FUNCTION}",
        )
    _adopt_seeds(pipeline, facts)
    rank, size = communicator.rank, communicator.size
    read = partial(pipeline.read_piece, parts=size, index=rank) if is_alike and size > 1 else pipeline.read
    return Share(pipeline, read, _counts(facts), 0 if is_alike else rank)


def take_dataset(dataset: Dataset, communicator: Communicator) -> Share:
    """Collective. The whole dataset that this rank brings, which may differ from those of others.

    Raises:
        TypeError: No dataset.
        ValueError: No rank has any rows, or lengths differ and the datasets are not batched.
    """
    pipeline = together(communicator, FROM_FUNCTION, lambda: _checked(dataset, FROM_FUNCTION)).pipeline
    facts = communicator.all_gather_object(_facts_of(pipeline, "NONE"))
    counts = _counts(facts)
    if len(set(counts)) > 1 and not all(fact.is_batched for fact in facts):
        raise mark_collective(unbatched_error(f"the ranks' datasets have different lengths {counts!r}"))
    _adopt_seeds(pipeline, facts)
    return Share(pipeline, pipeline.read, counts, communicator.rank)


def unbatched_error(cause: str) -> ValueError:
    """Local. The error where a rank would need an empty batch of a dataset without batches."""
    return ValueError(
        f"{FROM_FUNCTION}: {cause}, and a rank that has no data left gets empty batches; but the datasets have no "
        "batches. Call `batch` in `dataset_fn`"
    )


def zero_rows_error() -> ValueError:
    """Local. The error where there is nothing to read on any rank."""
    return ValueError(
        "dataset of zero rows: there is no batch to give to any rank. Check the source, and `take`, `skip`, `shard` "
        "and `drop_remainder`"
    )


def _checked(dataset: Any, caller: str) -> Dataset:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{caller}: expected a mpidist.data.Dataset, got {dataset!r} of type {type(dataset).__name__}. Make one "
            "with Dataset.from_tensor_slices(arrays) or Dataset.from_iterable(loader)"
        )
    return dataset


def _prepare(dataset: Any, communicator: Communicator) -> tuple[AutoShardPolicy, Pipeline]:
    checked = _checked(dataset, FROM_DATASET)
    policy = checked.options().experimental_distribute.auto_shard_policy
    pipeline = checked.pipeline
    if not pipeline.is_batched:
        raise ValueError(
            f"{FROM_DATASET}: the dataset has no batches, so there is nothing to share out between replicas. Call the "
            "`batch` method on the dataset, with the global batch size"
        )
    if policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        raise ValueError(
            f"{FROM_DATASET}: auto_shard_policy {policy.name} needs a dataset of "
            f"{'files' if policy is AutoShardPolicy.FILE else 'a shard with a hint'}, and this one has none. Use DATA, "
            f"or shard the data in {FROM_FUNCTION}"
        )
    if policy is not AutoShardPolicy.OFF:
        return AutoShardPolicy.DATA, pipeline
    if pipeline.grouping is None:
        raise ValueError(
            f"{FROM_DATASET}: auto_shard_policy OFF needs to know the global batch size, and the dataset was made of "
            f"batches. Make it of examples and call `batch`, or use {FROM_FUNCTION}"
        )
    if communicator.size > 1:
        sizes = rotated_sizes(pipeline.grouping.batch_size, communicator.size, communicator.rank)
        pipeline = pipeline.rebatch(sizes, pipeline.grouping.drop_remainder)
    return policy, pipeline


def _facts_of(pipeline: Pipeline, policy: str) -> _Facts:
    seeds = pipeline.stream.seeds()
    return _Facts(
        policy=policy,
        cardinality=pipeline.stream.cardinality,
        batch_size=None if pipeline.grouping is None else pipeline.grouping.batch_size,
        is_batched=pipeline.is_batched,
        given_seeds=tuple(None if seed.drawn else seed.value for seed in seeds),
        drawn_seeds=tuple(seed.value for seed in seeds if seed.drawn),
    )


def _adopt_seeds(pipeline: Pipeline, facts: list[_Facts]) -> None:
    """Shuffles without a seed use that of rank 0; where a rank has more of them, its further ones stay its own."""
    drawn = [seed for seed in pipeline.stream.seeds() if seed.drawn]
    for seed, value in zip(drawn, facts[0].drawn_seeds, strict=False):
        seed.value = value


def _counts(facts: list[_Facts]) -> tuple[int, ...]:
    counts = tuple(fact.cardinality for fact in facts)
    if not any(counts):
        raise mark_collective(zero_rows_error())
    return counts
