"""A rank's share of a dataset: the items it follows and the rows it reads of each, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpidist.arguments import described
from mpidist.comm.group.agreement import require_same, together
from mpidist.comm.group.communicator import Communicator
from mpidist.data.dataset import Dataset
from mpidist.data.items.sharding import shared_sizes
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed, Stream, join, take_seeds
from mpidist.data.pipeline.file_sharding import (
    file_count,
    file_digests,
    has_hint,
    is_all_of_files,
    shard_files,
    shard_hints,
)
from mpidist.data.pipeline.pipeline import UNBATCHED, Pipeline
from mpidist.data.transformations.zipped import Zip
from mpidist.errors import mark_shared
from mpidist.options import AutoShardPolicy

FROM_DATASET = "experimental_distribute_dataset"
FROM_FUNCTION = "distribute_datasets_from_function"


@dataclass(frozen=True)
class RankShare:
    """The data of one rank.

    Attributes:
        pipeline: A pipeline whose stream has one item per step of this rank.
        read: A function that reads this rank's batch of an item.
        counts: For each rank the number of steps that it has data for, or INFINITE, or UNKNOWN.
        salt: 0 where all ranks follow the same stream, else the rank, which makes shuffles without a seed differ.
        readers: Number of ranks that share the files of this pass, or the shards of a hint; 0 where there are none.
        others: A function that returns the share of a pass that another number of readers has begun.
        is_common: Whether all ranks follow the same stream, which thus ends on all of them after the same step.
    """

    pipeline: Pipeline
    read: Callable[[Any], Any]
    counts: tuple[int, ...]
    salt: int
    readers: int = 0
    others: Callable[[int], RankShare] | None = None
    is_common: bool = False

    @property
    def steps(self) -> int:
        """Local. The number of steps until the last rank has no data left; or INFINITE, or UNKNOWN."""
        if UNKNOWN in self.counts:
            return UNKNOWN
        return INFINITE if INFINITE in self.counts else max(self.counts)

    @property
    def batch_size(self) -> int:
        """Local. The global batch size; 0 where it is unknown, or ranks have only the number of steps in common."""
        return self.pipeline.batch_size if self.is_common or self.readers else 0

    @property
    def is_even(self) -> bool:
        """Local. Whether every rank is known to have data for every step."""
        return UNKNOWN not in self.counts and len(set(self.counts)) == 1

    def resumed(self, readers: int) -> RankShare:
        """Local. This rank's share in the rest of a pass that `readers` ranks have begun."""
        return self if self.others is None or readers == self.readers else self.others(readers)


class _Facts(NamedTuple):
    """The facts about a rank's dataset that the ranks compare."""

    policy: str
    cardinality: int
    batch_sizes: tuple[int, ...] | None
    is_batched: bool
    given_seeds: tuple[int | None, ...]
    drawn_seeds: tuple[int, ...]
    shuffles: tuple[str, ...]
    files: tuple[str, ...]


def share_dataset(dataset: Dataset, communicator: Communicator, everyone: Communicator) -> RankShare:
    """Collective. This rank's share of a dataset that is the same on every rank, by the `auto_shard_policy`.

    DATA gives the rank's contiguous piece of every global batch. The other policies give batches of 1/n of the global
    size: OFF of all data, FILE of the rank's files, HINT of the rank's shard (without a hint as OFF). AUTO is FILE
    where the dataset reads at least n files and nothing else, else DATA.

    Args:
        dataset: The dataset.
        communicator: The ranks that share it.
        everyone: All ranks of the strategy, which take the same seeds.

    Raises:
        TypeError: `dataset` is not a `Dataset`.
        ValueError: The dataset has no batches, or its policy cannot be followed.
        MismatchError: The ranks' datasets differ in length, batch size, seeds or files.
    """
    rank, size = communicator.rank, communicator.size
    policy, whole = together(everyone, FROM_DATASET, lambda: _prepare(dataset, size))
    pipeline = _pipeline_of(whole, policy, size, rank)
    own = _facts_of(pipeline, policy.name)
    facts = communicator.all_gather_object(own)
    # Where a replica has several ranks, all of them must read the same examples.
    known = facts if everyone is communicator else everyone.all_gather_object(own)
    require_same([fact.policy for fact in known], "the auto-shard policy of a dataset", "Set it on all ranks.")
    # Under DATA all ranks follow one stream, so even its length must agree; else each rank follows a shard of its own.
    is_one_stream = policy is AutoShardPolicy.DATA
    if policy is not AutoShardPolicy.OFF:
        require_same(
            [
                (
                    fact.cardinality if is_one_stream else None, fact.batch_sizes, fact.given_seeds,
                    fact.shuffles if is_one_stream else None, fact.files,
                )
                for fact in known
            ],
            f"{FROM_DATASET}: (cardinality, batch sizes, seeds of shuffles, shuffles, lists of files) of the dataset",
            f"Give every rank the same dataset; where ranks have data of their own use {FROM_FUNCTION}",
        )
    _adopt_seeds(pipeline, facts, communicator, everyone)
    others = _others(whole, dataset.options().experimental_distribute.auto_shard_policy, communicator)
    if is_one_stream:
        # 1 means one stream over all files; ranks that load this position must not shard the files.
        share = _common(whole, _counts(facts), communicator)
        return replace(share, readers=int(others is not None), others=others)
    readers = 0 if others is None else size
    return RankShare(pipeline, pipeline.read, _counts(facts), rank, readers, others)


def take_dataset(dataset: Dataset, communicator: Communicator, everyone: Communicator) -> RankShare:
    """Collective. A share that is the whole dataset of this rank; other ranks may have other datasets.

    Args:
        dataset: The dataset of this rank.
        communicator: The ranks that step together.
        everyone: All ranks of the strategy, which take the same seeds.

    Raises:
        TypeError: `dataset` is not a `Dataset`.
        ValueError: Lengths differ and the datasets are not batched.
    """
    pipeline = together(everyone, FROM_FUNCTION, lambda: _checked(dataset, FROM_FUNCTION)).pipeline
    own = _facts_of(pipeline, "NONE")
    facts = communicator.all_gather_object(own)
    if everyone is not communicator:
        _require_same_pieces(everyone.all_gather_object((communicator.rank, own)))
    counts = _counts(facts)
    if len(set(counts)) > 1 and not all(fact.is_batched for fact in facts):
        raise mark_shared(unbatched_error(f"the ranks' datasets have different lengths {counts!r}"))
    _adopt_seeds(pipeline, facts, communicator, everyone)
    return RankShare(pipeline, pipeline.read, counts, communicator.rank)


def unbatched_error(cause: str) -> ValueError:
    """Local. The error for a rank that needs an empty batch where the dataset has no batches."""
    return ValueError(
        f"{FROM_FUNCTION}: {cause}. A rank without data would get empty batches, but the datasets have no batches. "
        "Call `batch` in `dataset_fn`"
    )


def _checked(dataset: Any, caller: str) -> Dataset:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{caller}: expected a mpidist.data.Dataset, got {described(dataset)}. Make one with "
            "Dataset.from_tensor_slices(arrays) or Dataset.from_iterable(loader)"
        )
    return dataset


def _prepare(dataset: Any, size: int) -> tuple[AutoShardPolicy, Pipeline]:
    """The policy to follow (DATA, FILE, HINT or OFF), and the pipeline to apply it to."""
    checked = _checked(dataset, FROM_DATASET)
    policy = wanted = checked.options().experimental_distribute.auto_shard_policy
    pipeline = checked.pipeline
    if pipeline.is_assumed and not pipeline.is_batched:
        pipeline = pipeline.as_batches()
    if not pipeline.is_batched:
        raise ValueError(
            f"{UNBATCHED[0]}, got one without. {UNBATCHED[1]}. What the function of interleave or flat_map returns are "
            "examples, even where it calls `batch`"
        )
    files = file_count(pipeline)
    is_enough = files is not None and (files == INFINITE or files >= size)
    if policy is AutoShardPolicy.AUTO:
        is_by_file = is_enough and pipeline.grouping is not None and is_all_of_files(pipeline, Zip)
        policy = AutoShardPolicy.FILE if is_by_file else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and not is_enough:
        got = "no files" if files is None else f"{max(files, 0) or 'an unknown number of'} files"
        raise ValueError(
            f"{FROM_DATASET}: auto_shard_policy FILE needs at least as many files as ranks: expected {size}, got a "
            f"dataset of {got}. Use AUTO or DATA, or shard the data in {FROM_FUNCTION}"
        )
    if policy is AutoShardPolicy.HINT and not has_hint(pipeline):
        policy = AutoShardPolicy.OFF
    if policy is not AutoShardPolicy.DATA and pipeline.grouping is None:
        raise ValueError(
            f"{FROM_DATASET}: auto_shard_policy {wanted.name} needs to know the global batch size, but the dataset was "
            "made from ready batches, or a step after `batch` hides it: zip, enumerate, filter, scan and others. Call "
            f"`batch` after these steps, or use {FROM_FUNCTION} or the policy DATA"
        )
    return policy, pipeline


def _pipeline_of(pipeline: Pipeline, policy: AutoShardPolicy, readers: int, reader: int) -> Pipeline:
    """The pipeline that one of several readers follows.

    Under DATA that is the whole pipeline. Else the reader has data of its own, in batches of about 1/`readers` of the
    global size.
    """
    if policy is AutoShardPolicy.DATA or pipeline.grouping is None or readers == 1:
        return pipeline
    if policy is AutoShardPolicy.FILE:
        pipeline = shard_files(pipeline, readers, reader)
    elif policy is AutoShardPolicy.HINT:
        pipeline = shard_hints(pipeline, readers, reader)
    grouping = pipeline.grouping
    if grouping is None:
        return pipeline
    return pipeline.rebatch(shared_sizes(grouping.sizes, readers, reader), grouping.drop_remainder)


def _others(
    pipeline: Pipeline, wanted: AutoShardPolicy, communicator: Communicator
) -> Callable[[int], RankShare] | None:
    """A function that continues with a pass of another number of readers; None where ranks share no files or hints."""
    is_by_file = wanted in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE) and file_count(pipeline) is not None
    is_by_hint = wanted is AutoShardPolicy.HINT and has_hint(pipeline)
    if pipeline.grouping is None or not (is_by_file or is_by_hint):
        return None
    policy = AutoShardPolicy.FILE if is_by_file else AutoShardPolicy.HINT

    def others(readers: int) -> RankShare:
        shards = [_pipeline_of(pipeline, policy, readers, reader) for reader in range(readers)]
        joined = pipeline
        if readers > 1:
            joined = replace(shards[0], stream=JoinedShards(tuple(shard.stream for shard in shards)))
        known = joined.stream.cardinality()
        # UNKNOWN for files, even where this rank can count: the ranks have not compared these counts, and one that
        # cannot open a file would take part in other collective calls than the rest.
        count = UNKNOWN if is_by_file and known > 0 else known
        share = _common(joined, (count,) * communicator.size, communicator)
        return replace(share, readers=readers, others=others)

    return others


def _common(pipeline: Pipeline, counts: tuple[int, ...], communicator: Communicator) -> RankShare:
    """A share in which all ranks follow the same batches and each reads its piece of them."""
    rank, size = communicator.rank, communicator.size
    # A single rank also checks whether elements that are assumed to be batches have rows.
    read = pipeline.piece_reader(size, rank) if size > 1 or pipeline.is_assumed else pipeline.read
    return RankShare(pipeline, read, counts, 0, is_common=True)


def _facts_of(pipeline: Pipeline, policy: str) -> _Facts:
    seeds = pipeline.stream.seeds()
    return _Facts(
        policy=policy,
        cardinality=pipeline.stream.cardinality(),
        batch_sizes=None if pipeline.grouping is None else pipeline.grouping.sizes,
        is_batched=pipeline.is_batched,
        given_seeds=tuple(None if seed.drawn else seed.value for seed in seeds),
        drawn_seeds=tuple(seed.value for seed in seeds if seed.drawn),
        shuffles=tuple(seed.use for seed in seeds),
        files=file_digests(pipeline),
    )


def _require_same_pieces(everyone: list[tuple[int, _Facts]]) -> None:
    """Raise MismatchError unless ranks that have the same piece, since they are of one replica, read the same."""
    for piece in sorted({number for number, _ in everyone}):
        require_same(
            [
                (fact.cardinality, fact.batch_sizes, fact.given_seeds, fact.shuffles, fact.files)
                for number, fact in everyone if number == piece
            ],
            f"{FROM_FUNCTION}: (cardinality, batch sizes, seeds of shuffles, shuffles, lists of files) of the dataset "
            f"of the ranks of replica {piece}",
            "Make the dataset from `input_pipeline_id`, and not from the rank.",
        )


def _adopt_seeds(
    pipeline: Pipeline, facts: list[_Facts], communicator: Communicator, everyone: Communicator
) -> None:
    """Collective. Give shuffles without a seed the seeds that rank 0 drew; a rank's further shuffles keep their own."""
    # Without this each rank would have an order of its own: some examples would be read twice in a pass, others never.
    # Ranks that have the same piece of a batch, in another group, must read the same examples, too.
    values = facts[0].drawn_seeds if everyone is communicator else everyone.broadcast_object(facts[0].drawn_seeds)
    drawn = [seed for seed in pipeline.stream.seeds() if seed.drawn]
    take_seeds(drawn, values)


def _counts(facts: list[_Facts]) -> tuple[int, ...]:
    return tuple(fact.cardinality for fact in facts)


@dataclass(frozen=True)
class JoinedShards:
    """Joins the readers' groups of each step into one group, until no reader has a group left.

    It lets any number of ranks finish a pass that other ranks have begun, each over its own shard of the data: the new
    ranks share the global batches that the old ones would have made together.

    Attributes:
        shards: One stream of groups per reader. Reader k shuffles as rank k would.
    """

    shards: tuple[Stream, ...]

    def cardinality(self) -> int:
        """Local. The largest cardinality of a shard."""
        counts = [shard.cardinality() for shard in self.shards]
        if UNKNOWN in counts:
            return UNKNOWN
        return INFINITE if INFINITE in counts else max(counts)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. One group per block; seeks as the shards do."""
        groups_by_shard = [
            (group for block in shard.blocks(epoch._replace(salt=salt), start) for group in block)
            for salt, shard in enumerate(self.shards)
        ]
        while True:
            groups = [group for group in (next(one, None) for one in groups_by_shard) if group is not None]
            if not groups:
                return
            # Empty groups are left out of the join, except where all are empty: the step takes place all the same.
            yield [join([group for group in groups if len(group)] or groups[:1])]

    def seeds(self) -> list[Seed]:
        """Local. The seeds of one shard: all have the same ones."""
        return self.shards[0].seeds()
