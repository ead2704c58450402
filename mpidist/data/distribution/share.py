"""A rank's share of a dataset: which items it follows and what it reads of each, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpidist.comm.agreement import require_same, together
from mpidist.comm.communicator import Communicator
from mpidist.data.dataset import Dataset
from mpidist.data.items.joined_shards import JoinedShards
from mpidist.data.items.sharding import rotated_sizes
from mpidist.data.items.stream import INFINITE, UNKNOWN
from mpidist.data.pipeline.files import file_count, file_digests, has_hint, shard_files, shard_hints
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.errors import mark_shared
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
        readers: How many ranks share the files of this pass, or the shards of a hint; 0 where there are none.
        others: The share of a pass that another number of readers has begun.
    """

    pipeline: Pipeline
    read: Callable[[Any], Any]
    counts: tuple[int, ...]
    salt: int
    readers: int = 0
    others: Callable[[int], Share] | None = None

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

    def resumed(self, readers: int) -> Share:
        """Local. The share of the rest of a pass that `readers` have begun."""
        return self if self.others is None or readers == self.readers else self.others(readers)


class _Facts(NamedTuple):
    """What a rank tells the others about its dataset."""

    policy: str
    cardinality: int
    batch_size: int | None
    is_batched: bool
    given_seeds: tuple[int | None, ...]
    drawn_seeds: tuple[int, ...]
    files: tuple[str, ...]


def share_dataset(dataset: Dataset, communicator: Communicator) -> Share:
    """Collective. This rank's share of a dataset that every rank gives alike, by its `auto_shard_policy`.

    DATA: the rank's contiguous piece of every global batch. OFF: all data, in batches of 1/n. FILE: its files, HINT:
    its shard, in batches of 1/n, and without a hint as OFF. AUTO: FILE where the dataset reads at least n files, else
    DATA.

    Raises:
        TypeError: No dataset.
        ValueError: It has no batches, or zero rows, or its policy cannot be followed.
        MismatchError: The ranks' datasets differ in length, batch size, seeds or files.
    """
    rank, size = communicator.rank, communicator.size
    policy, whole = together(communicator, FROM_DATASET, lambda: _prepare(dataset, size))
    pipeline = _own_part(whole, policy, size, rank)
    facts = communicator.all_gather_object(_facts_of(pipeline, policy.name))
    require_same([fact.policy for fact in facts], "the auto-shard policy of a dataset", "Set it on all ranks.")
    is_alike = policy is AutoShardPolicy.DATA
    if policy is not AutoShardPolicy.OFF:
        require_same(
            [(fact.cardinality if is_alike else None, fact.batch_size, fact.given_seeds, fact.files) for fact in facts],
            f"{FROM_DATASET}: (cardinality, batch size, seeds of shuffles, lists of files) of the dataset",
            f"Give every rank the same dataset; where ranks have data of their own use {FROM_FUNCTION}",
        )
    _adopt_seeds(pipeline, facts)
    others = _others(whole, dataset.options().experimental_distribute.auto_shard_policy, communicator)
    if is_alike:
        share = _common(whole, _counts(facts), communicator)
        return replace(share, readers=int(others is not None), others=others)
    readers = 0 if others is None else size
    return Share(pipeline, pipeline.read, _counts(facts), rank, readers, others)


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
        raise mark_shared(unbatched_error(f"the ranks' datasets have different lengths {counts!r}"))
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


def _prepare(dataset: Any, size: int) -> tuple[AutoShardPolicy, Pipeline]:
    """The policy that is followed (DATA, FILE, HINT or OFF), and what it is applied to."""
    checked = _checked(dataset, FROM_DATASET)
    policy = wanted = checked.options().experimental_distribute.auto_shard_policy
    pipeline = checked.pipeline
    if not pipeline.is_batched:
        raise ValueError(
            f"{FROM_DATASET}: the dataset has no batches, so there is nothing to share out between replicas. Call the "
            "`batch` method on the dataset, with the global batch size"
        )
    files = file_count(pipeline)
    is_enough = files is not None and (files == INFINITE or files >= size)
    if policy is AutoShardPolicy.AUTO:
        policy = AutoShardPolicy.FILE if is_enough and pipeline.grouping is not None else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and not is_enough:
        cause = "this one has none" if files is None else f"this one has {max(files, 0) or 'an unknown number'}"
        raise ValueError(
            f"{FROM_DATASET}: auto_shard_policy FILE needs a dataset of at least as many files as ranks, {size}, and "
            f"{cause}. Use AUTO or DATA, or shard the data in {FROM_FUNCTION}"
        )
    if policy is AutoShardPolicy.HINT and not has_hint(pipeline):
        policy = AutoShardPolicy.OFF
    if policy is not AutoShardPolicy.DATA and pipeline.grouping is None:
        raise ValueError(
            f"{FROM_DATASET}: auto_shard_policy {wanted.name} needs to know the global batch size, and the dataset was "
            f"made of batches. Make it of examples and call `batch`, or use {FROM_FUNCTION}"
        )
    return policy, pipeline


def _own_part(pipeline: Pipeline, policy: AutoShardPolicy, parts: int, index: int) -> Pipeline:
    """What one of several readers follows; where each has data of its own, in batches of its part of the size."""
    if policy is AutoShardPolicy.DATA or pipeline.grouping is None or parts == 1:
        return pipeline
    if policy is AutoShardPolicy.FILE:
        pipeline = shard_files(pipeline, parts, index)
    elif policy is AutoShardPolicy.HINT:
        pipeline = shard_hints(pipeline, parts, index)
    grouping = pipeline.grouping
    if grouping is None:
        return pipeline
    return pipeline.rebatch(rotated_sizes(grouping.batch_size, parts, index), grouping.drop_remainder)


def _others(
    pipeline: Pipeline, wanted: AutoShardPolicy, communicator: Communicator
) -> Callable[[int], Share] | None:
    """What goes on with a pass that another number of readers has begun; None where ranks do not share readers."""
    is_by_file = wanted in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE) and file_count(pipeline) is not None
    is_by_hint = wanted is AutoShardPolicy.HINT and has_hint(pipeline)
    if pipeline.grouping is None or not (is_by_file or is_by_hint):
        return None
    policy = AutoShardPolicy.FILE if is_by_file else AutoShardPolicy.HINT

    def others(readers: int) -> Share:
        parts = [_own_part(pipeline, policy, readers, reader) for reader in range(readers)]
        shards = tuple(part.stream for part in parts)
        joined = pipeline if readers == 1 else replace(parts[0], stream=JoinedShards(shards))
        known = joined.stream.cardinality()
        # Ranks did not agree on the count of these files: one that cannot open them tells the others when it reads.
        count = UNKNOWN if is_by_file and known > 0 else known
        share = _common(joined, (count,) * communicator.size, communicator)
        return replace(share, readers=readers, others=others)

    return others


def _common(pipeline: Pipeline, counts: tuple[int, ...], communicator: Communicator) -> Share:
    """The rank's piece of batches that all ranks follow."""
    rank, size = communicator.rank, communicator.size
    read = pipeline.piece_reader(size, rank) if size > 1 else pipeline.read
    return Share(pipeline, read, counts, 0)


def _facts_of(pipeline: Pipeline, policy: str) -> _Facts:
    seeds = pipeline.stream.seeds()
    return _Facts(
        policy=policy,
        cardinality=pipeline.stream.cardinality(),
        batch_size=None if pipeline.grouping is None else pipeline.grouping.batch_size,
        is_batched=pipeline.is_batched,
        given_seeds=tuple(None if seed.drawn else seed.value for seed in seeds),
        drawn_seeds=tuple(seed.value for seed in seeds if seed.drawn),
        files=file_digests(pipeline),
    )


def _adopt_seeds(pipeline: Pipeline, facts: list[_Facts]) -> None:
    """Shuffles without a seed use that of rank 0; where a rank has more of them, its further ones stay its own."""
    drawn = [seed for seed in pipeline.stream.seeds() if seed.drawn]
    for seed, value in zip(drawn, facts[0].drawn_seeds, strict=False):
        seed.value = value


def _counts(facts: list[_Facts]) -> tuple[int, ...]:
    counts = tuple(fact.cardinality for fact in facts)
    if not any(counts):
        raise mark_shared(zero_rows_error())
    return counts
