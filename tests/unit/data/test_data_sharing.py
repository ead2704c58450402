"""Splitting by hypothesis: ranks simulated side by side, over lengths, batch sizes, files and numbers of ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.comm.arithmetic.slices import even_sizes
from mpidist.comm.group.communicator import Communicator
from mpidist.data import UNKNOWN, AutoShardPolicy, Dataset, Options
from mpidist.data.dataset_base import interleaved, pipeline_of
from mpidist.data.distribution.share import RankShare, share_dataset
from mpidist.data.items.files import file_rows
from mpidist.data.items.stream import Epoch
from tests.helpers.amounts import amount

T = TypeVar("T")


class Played:
    """One rank of a job whose ranks all give the same, except for lengths, which the tests fill in."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.host = "here"

    def all_gather_object(self, value: T) -> list[T]:
        return [value] * self.size

    def all_reduce_max(self, value: int) -> int:
        return value


def shares(dataset: Dataset, size: int) -> list[RankShare]:
    ranks = [cast(Communicator, Played(rank, size)) for rank in range(size)]
    return [share_dataset(dataset, one, one) for one in ranks]


def batches(share: RankShare, start: int = 0) -> list[list[int]]:
    epoch = Epoch((0,), share.salt)
    return [batch.tolist() for batch in share.pipeline.iterate(epoch, start, share.read)]


def policy(name: str) -> Options:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return options


def of_files(sizes: list[int], cycle: int, *, lazy: bool) -> Dataset:
    """File k has the numbers from 1000 k on; lazy ones are arrays and counted, the others can only be iterated."""
    names = [str(k) for k in range(len(sizes))]

    def opened(name: Any) -> Any:
        numbers = np.arange(sizes[int(name)]) + 1000 * int(name)
        return pipeline_of(numbers if lazy else iter(numbers))

    listed = Dataset.from_tensor_slices(np.array(names)).pipeline
    names_only = replace(listed, stream=file_rows(names))
    count = (lambda name: sizes[int(name)]) if lazy else None
    return Dataset(interleaved(names_only, opened, cycle, 1, count), Options())


@settings(max_examples=amount(60, 2000))
@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 9), st.integers(1, 30), st.booleans())
def test_pieces_join_to_the_global_batches(length: int, size: int, ranks: int, buffer: int, drop: bool) -> None:
    if drop and length < size:
        return
    dataset = Dataset.range(length).shuffle(buffer, seed=length).batch(size, drop_remainder=drop)
    whole = [batch.tolist() for batch in dataset]
    steps = list(zip(*(batches(share) for share in shares(dataset, ranks)), strict=True))
    assert [[row for part in step for row in part] for step in steps] == whole
    assert [list(map(len, step)) for step in steps] == [even_sizes(len(batch), ranks) for batch in whole]


@settings(max_examples=amount(60, 2000))
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5),
    st.integers(1, 3), st.integers(0, 6), st.booleans(),
)
def test_files_are_read_once_and_other_ranks_finish_what_some_began(
    sizes: list[int], size: int, ranks: int, others: int, cycle: int, taken: int, lazy: bool
) -> None:
    dataset = of_files(sizes, cycle, lazy=lazy).shuffle(4, seed=1).batch(size)
    expected = sorted(1000 * k + i for k, count in enumerate(sizes) for i in range(count))
    first = shares(dataset, ranks)
    is_by_file = len(sizes) >= ranks
    assert {share.readers for share in first} == {ranks if is_by_file else 1}
    begun = [batches(share) for share in first]
    assert sorted(row for rank in begun for batch in rank for row in batch) == expected
    for share, seen in zip(first, begun, strict=True):
        assert share.steps == (len(seen) if lazy else UNKNOWN)
    if is_by_file:
        for rank, seen in enumerate(begun):
            assert {row // 1000 % ranks for batch in seen for row in batch} <= {rank}
        full = [sum(map(len, step)) for step in zip(*begun, strict=False)]
        assert all(count <= size for count in full)
    resumed = [share.resumed(first[0].readers) for share in shares(dataset, others)]
    assert {share.readers for share in resumed} == {first[0].readers}
    head = [row for rank in begun for batch in rank[:taken] for row in batch]
    rest = [row for share in resumed for batch in batches(share, taken) for row in batch]
    assert sorted(head + rest) == expected


@settings(max_examples=amount(60, 2000))
@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 9), st.booleans(), st.sampled_from(["OFF", "HINT"]))
def test_off_gives_each_rank_all_and_each_step_a_whole_batch(
    length: int, size: int, ranks: int, drop: bool, name: str
) -> None:
    if drop and length < size:
        return
    dataset = Dataset.range(length).shuffle(length, seed=3).batch(size, drop_remainder=drop).with_options(policy(name))
    order = [row.tolist() for row in dataset.unbatch()]
    seen = [batches(share) for share in shares(dataset, ranks)]
    assert [[row for batch in rank for row in batch] for rank in seen] == [order] * ranks
    whole = len(order) // size * ranks
    for step in itertools.islice(zip(*seen, strict=False), whole):
        sizes = [len(batch) for batch in step]
        assert sum(sizes) == size
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 200), st.integers(1, 17), st.integers(1, 30))
def test_shards_of_a_dataset_hold_each_example_once(length: int, parts: int, buffer: int) -> None:
    whole = Dataset.range(length).shuffle(buffer, seed=4)
    order = [row.tolist() for row in whole]
    shards = [[row.tolist() for row in whole.shard(parts, index)] for index in range(parts)]
    assert shards == [order[index::parts] for index in range(parts)]
    sizes = list(map(len, shards))
    assert sizes == even_sizes(length, parts)


@settings(max_examples=amount(40, 2000))
@given(st.integers(5, 60), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_hints_share_once_and_resume(length: int, size: int, ranks: int, others: int, taken: int) -> None:
    dataset = Dataset.range(length).shard(-1, -1).batch(size).with_options(policy("HINT"))
    begun = [batches(share) for share in shares(dataset, ranks) if share.pipeline.stream.cardinality()]
    assert sorted(row for rank in begun for batch in rank for row in batch) == list(range(length))
    head = [row for rank in begun for batch in rank[:taken] for row in batch]
    resumed = [share.resumed(ranks) for share in shares(dataset.with_options(policy("HINT")), others)]
    rest = [row for share in resumed for batch in batches(share, taken) for row in batch]
    assert sorted(head + rest) == list(range(length))
