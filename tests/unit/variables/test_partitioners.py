"""Partitioners: tf.distribute's numbers, and the rows of each shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.variables.making.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    shards_of,
)

SHAPES = st.lists(st.integers(1, 3000), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "float64", "int8", "complex128"])


# As TensorFlow 2.20 was seen to give them.
@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "expected"),
    [
        (FixedShardsPartitioner(2), (10, 3), "float32", [2, 1]),
        (FixedShardsPartitioner(8), (3, 5), "float32", [3, 1]),
        (MinSizePartitioner(), (1024, 1024), "float32", [1, 1]),
        (MinSizePartitioner(max_shards=4), (1024, 1024), "float32", [4, 1]),
        (MinSizePartitioner(max_shards=100), (1024, 1024), "float32", [16, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), "float32", [2, 1]),
        (MinSizePartitioner(4, max_shards=10), (6, 1), "float32", [6, 1]),
        (MinSizePartitioner(256 << 10, max_shards=8), (1000, 64), "float32", [1, 1]),
        (MinSizePartitioner(256 << 10, max_shards=8), (2048, 64), "float32", [2, 1]),
        (MinSizePartitioner(256 << 10, max_shards=8), (2049, 64), "float32", [3, 1]),
        (MinSizePartitioner(256 << 10, max_shards=8), (100000, 64), "float32", [8, 1]),
        (MinSizePartitioner(64 << 20, max_shards=2), (10,), "int64", [1]),
        (MinSizePartitioner(16, max_shards=10), (4,), "S", [4]),
        (MinSizePartitioner(16, max_shards=10, bytes_per_string=8), (4,), "S", [2]),
        (MaxSizePartitioner(4), (6, 1), "float32", [6, 1]),
        (MaxSizePartitioner(4, max_shards=2), (6, 1), "float32", [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), "float32", [1, 1]),
        (MaxSizePartitioner(10), (6, 1), "float32", [3, 1]),
        (MaxSizePartitioner(3), (6, 1), "float32", [6, 1]),
        (MaxSizePartitioner(3, max_shards=0), (6, 1), "float32", [6, 1]),
        (MaxSizePartitioner(1 << 20), (1024, 1024), "float32", [4, 1]),
        (MaxSizePartitioner((1 << 20) - 1), (1024, 1024), "float32", [5, 1]),
        (MaxSizePartitioner(1 << 20, max_shards=3), (1024, 1024), "float32", [3, 1]),
        (MaxSizePartitioner(32), (4,), "S", [2]),
        (MaxSizePartitioner(32, bytes_per_string=32), (4,), "S", [4]),
        # TensorFlow divides by zero, or gives no shard.
        (MaxSizePartitioner(32), (0, 4), "float32", [1, 1]),
        (MaxSizePartitioner(32), (4, 0), "float32", [1, 1]),
        (FixedShardsPartitioner(3), (0, 4), "float32", [1, 1]),
        (MinSizePartitioner(32), (0,), "float32", [1]),
    ],
)
def test_the_numbers_of_tensorflow(
    partitioner: Partitioner, shape: tuple[int, ...], dtype: str, expected: list[int]
) -> None:
    assert partitioner(shape, dtype) == expected
    assert partitioner(list(shape), np.dtype(dtype)) == expected


def test_another_axis() -> None:
    assert FixedShardsPartitioner(2)((10, 3), "float32", axis=1) == [1, 2]
    assert MinSizePartitioner(4, 9)((2, 3), "float32", -1) == [1, 3]
    assert MaxSizePartitioner(8)((2, 3), "float32", 1) == [1, 3]


@given(SHAPES, DTYPES, st.integers(1, 1 << 24), st.integers(1, 50))
def test_sizes_of_shards(shape: tuple[int, ...], dtype: str, size: int, most: int) -> None:
    total = math.prod(shape) * np.dtype(dtype).itemsize
    [count, *others] = MinSizePartitioner(size, most)(shape, dtype)
    assert count == max(1, min(shape[0], most, math.ceil(total / size)))
    [free, *_], [limited, *more] = (MaxSizePartitioner(size, limit)(shape, dtype) for limit in (None, most))
    # The largest shard keeps to the size, unless it is one row.
    rows = math.ceil(shape[0] / free)
    assert rows == 1 or rows * total / shape[0] <= size
    assert limited == min(free, most)
    assert {*others, *more} <= {1}


@given(SHAPES, st.integers(1, 40))
def test_shards_are_all_rows_in_order_and_differ_by_one_at_most(shape: tuple[int, ...], count: int) -> None:
    shards = shards_of(FixedShardsPartitioner(count), shape, np.dtype("float32"), "table")
    assert [row for shard in shards for row in range(shape[0])[shard]] == list(range(shape[0]))
    sizes = [shard.stop - shard.start for shard in shards]
    assert sizes == [len(part) for part in np.array_split(np.arange(shape[0]), len(sizes))]


def test_thirteen_rows_in_five_shards() -> None:
    # The example of tf.distribute's document.
    rows = [list(range(13)[shard]) for shard in shards_of(FixedShardsPartitioner(5), (13,), np.dtype("int8"), "ids")]
    assert rows == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12]]


@pytest.mark.parametrize("given_counts", [None, 2, [], [0, 1], [1, 2], [2, 0], ["a", 1], [-1, 1], [1.5, 1]], ids=repr)
def test_what_a_partitioner_must_return(given_counts: Any) -> None:
    class Own(Partitioner):
        def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> Any:
            return given_counts

    with pytest.raises(ValueError, match=r"elements are 1 besides the first element \(non-zero\), got .* 'table' of"):
        shards_of(Own(), (4, 2), np.dtype("float32"), "table")


def test_wrong_arguments() -> None:
    for make in (
        lambda: FixedShardsPartitioner(0), lambda: MinSizePartitioner(0), lambda: MinSizePartitioner(1, 0),
        lambda: MinSizePartitioner(1, 1, 0), lambda: MaxSizePartitioner(0), lambda: MaxSizePartitioner(1, 1, 0),
    ):
        with pytest.raises(ValueError, match=r"Argument `\w+` must be positive. Received: 0"):
            make()
    with pytest.raises(ValueError, match="`max_shards` must be an integer of at least 0, got -1"):
        MaxSizePartitioner(1, -1)
    with pytest.raises(NotImplementedError, match="Partitioner does not define __call__"):
        Partitioner()((1,), "float32")
    with pytest.raises(ValueError, match=r"`axis` must be a dimension of the variable, got 0 for shape \(\)"):
        FixedShardsPartitioner(2)((), "float32")
    with pytest.raises(TypeError, match="`shape` must be a tuple of the sizes of a variable, got 3"):
        MinSizePartitioner()(3, "float32")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="`dtype` must be a dtype, for instance 'float32', got 'no'"):
        MaxSizePartitioner(3)((3,), "no")
