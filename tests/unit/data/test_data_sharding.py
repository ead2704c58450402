"""Sharding: every example exactly once, and sizes as even as can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.arithmetic.slices import even_sizes
from mpidist.data.items.batching import Batch
from mpidist.data.items.files import FileShard
from mpidist.data.items.sharding import count_groups, even_slice, rotated_sizes, shared_sizes
from mpidist.data.items.stream import Epoch, RowNumbers

counts = st.integers(0, 10_000)
parts = st.integers(1, 65)


@given(counts, parts)
def test_even_sizes_sum_and_differ_by_at_most_one(count: int, n: int) -> None:
    sizes = even_sizes(count, n)
    assert len(sizes) == n
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(counts, parts)
def test_even_slices_are_contiguous_and_cover_everything(count: int, n: int) -> None:
    pieces = [list(range(count)[even_slice(count, n, index)]) for index in range(n)]
    assert [row for piece in pieces for row in piece] == list(range(count))
    assert [len(piece) for piece in pieces] == even_sizes(count, n)


@pytest.mark.parametrize(
    ("count", "n", "sizes"), [(8, 2, (4, 4)), (6, 4, (2, 2, 1, 1)), (10, 4, (3, 3, 2, 2)), (2, 4, (1, 1, 0, 0))]
)
def test_even_sizes_by_hand(count: int, n: int, sizes: tuple[int, ...]) -> None:
    assert even_sizes(count, n) == list(sizes)


@given(counts, parts)
def test_file_shards_hold_each_file_once(count: int, n: int) -> None:
    shards = []
    for index in range(n):
        blocks = FileShard(RowNumbers(count), n, index).blocks(Epoch(salt=index), 0)
        shards.append([int(file) for block in blocks for file in block])
    assert sorted(file for shard in shards for file in shard) == list(range(count))
    assert all(file % n == index for index, shard in enumerate(shards) for file in shard)


@given(st.integers(1, 100), st.integers(1, 17))
def test_rotated_sizes_make_global_steps_of_the_batch_size(batch_size: int, n: int) -> None:
    by_rank = [rotated_sizes(batch_size, n, rank) for rank in range(n)]
    assert all(sum(sizes) == batch_size for sizes in by_rank)
    assert all(sum(step) == batch_size for step in zip(*by_rank, strict=True))
    assert all(max(step) - min(step) <= 1 for step in zip(*by_rank, strict=True))
    # The order: that of the even sizes, beginning with the rank's own.
    assert [sizes[0] for sizes in by_rank] == even_sizes(batch_size, n)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 7))
def test_shared_sizes_make_global_steps_of_the_sizes_in_turn(batch_sizes: list[int], n: int) -> None:
    by_rank = [shared_sizes(batch_sizes, n, rank) for rank in range(n)]
    for step, sizes in enumerate(zip(*by_rank, strict=True)):
        assert sorted(sizes, reverse=True) == even_sizes(batch_sizes[step % len(batch_sizes)], n)
    assert len(by_rank[0]) % len(batch_sizes) == len(by_rank[0]) % n == 0
    assert [shared_sizes([batch_sizes[0]], n, rank) for rank in range(n)] == [
        rotated_sizes(batch_sizes[0], n, rank) for rank in range(n)
    ]


@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_batches_of_sizes_in_turn_are_the_same_from_any_start(count: int, sizes: list[int], drop: bool) -> None:
    batches = Batch(RowNumbers(count), tuple(sizes), drop)

    def begun_at(start: int) -> list[list[int]]:
        return [np.asarray(group).tolist() for block in batches.blocks(Epoch(), start) for group in block]

    whole = begun_at(0)
    assert len(whole) == batches.cardinality()
    for start in range(len(whole)):
        assert begun_at(start) == whole[start:]


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (3, 0, 0), (3, 2, 2), (3, 2, -1)])
def test_even_slice_refuses(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        even_slice(*arguments)


@pytest.mark.parametrize(
    ("total", "sizes", "drop", "groups"),
    [(0, (4,), False, 0), (9, (4,), False, 3), (9, (4,), True, 2), (8, (4,), True, 2), (2, (1, 0), False, 3),
     (2, (0, 1), False, 4), (7, (4, 3), False, 2), (8, (4, 3), True, 2), (10, (3, 4), True, 3)],
)
def test_count_groups_by_hand(total: int, sizes: tuple[int, ...], drop: bool, groups: int) -> None:
    assert count_groups(total, sizes, drop) == groups
