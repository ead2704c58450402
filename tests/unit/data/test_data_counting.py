"""Lists of files: their order, what is known of their examples before they are read, and that they are seeked."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.data import UNKNOWN, ArraySpec, Dataset, hdf5_reader, read_npy, read_npz
from mpidist.data.items.shuffle import is_steady
from mpidist.data.items.stream import Epoch
from mpidist.data.reading.source import ArraySource

SIZES = (5, 0, 7, 3)


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Files of different sizes, in four formats."""
    for k, size in enumerate(SIZES):
        rows = np.arange(size) + 100 * k
        np.save(tmp_path / f"{k}.npy", rows)
        np.savez(tmp_path / f"{k}.npz", x=rows)
        with h5py.File(tmp_path / f"{k}.h5", "w") as file:
            file["x"], file["y"] = rows, np.zeros((size, 2))
    return [str(tmp_path / f"{k}") for k in range(len(SIZES))]


@pytest.mark.parametrize(
    ("suffix", "reader", "count"),
    [
        ("npy", read_npy, 15), ("h5", hdf5_reader("x"), 15), ("h5", hdf5_reader("x", "y"), 15),
        ("npz", read_npz, UNKNOWN), ("npy", lambda name: list(np.load(name)), UNKNOWN),
        ("npy", hdf5_reader("x"), UNKNOWN), ("h5", hdf5_reader("z"), UNKNOWN), ("nothing", read_npy, UNKNOWN),
    ],
)
def test_the_number_of_examples_is_known_where_the_reader_tells(
    names: list[str], suffix: str, reader: Callable[[str], Any], count: int
) -> None:
    dataset = Dataset.from_files([f"{name}.{suffix}" for name in names], reader, cycle_length=2)
    assert dataset.cardinality() == count
    assert dataset.shuffle(4).batch(4).cardinality() == (UNKNOWN if count == UNKNOWN else 4)
    if count != UNKNOWN:
        assert len(list(dataset)) == len(list(dataset.repeat(2))) / 2 == len(dataset) == count


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (lambda files: files, 15),
        (lambda files: files.take(3), UNKNOWN), (lambda files: files.shard(2, 0), UNKNOWN),
        (lambda files: files.skip(1), UNKNOWN), (lambda files: files.repeat(2), UNKNOWN),
        (lambda files: files.filter(lambda name: True), UNKNOWN),
    ],
)
def test_what_differs_between_passes_is_not_counted(
    names: list[str], chosen: Callable[[Dataset], Dataset], count: int
) -> None:
    shuffled = Dataset.list_files([f"{name}.npy" for name in names])
    assert chosen(shuffled).interleave(read_npy).cardinality() == count


def test_a_part_of_a_list_in_order_is_counted(names: list[str]) -> None:
    files = Dataset.list_files([f"{name}.npy" for name in names], shuffle=False)
    assert files.shard(2, 0).interleave(read_npy).cardinality() == 12
    assert files.shard(2, 1).interleave(read_npy).cardinality() == 3
    assert files.take(3).skip(1).interleave(read_npy).cardinality() == 7


@given(st.lists(st.sampled_from(["shuffle", "take", "skip", "shard"]), max_size=4), st.integers(0, 9))
def test_a_steady_stream_has_the_same_items_in_every_pass(steps: list[str], number: int) -> None:
    dataset = Dataset.range(20)
    for step in steps:
        apply: dict[str, Callable[[Dataset], Dataset]] = {
            "shuffle": lambda one: one.shuffle(6, seed=number),
            "take": lambda one: one.take(8),
            "skip": lambda one: one.skip(2),
            "shard": lambda one: one.shard(2, 1),
        }
        dataset = apply[step](dataset)
    stream = dataset.pipeline.stream
    passes = [[int(row) for block in stream.blocks(Epoch((k,)), 0) for row in block] for k in range(4)]
    if is_steady(stream):
        assert all(sorted(one) == sorted(passes[0]) for one in passes)
    if is_steady(stream, in_order=True):
        assert all(one == passes[0] for one in passes)


@pytest.mark.parametrize("cycle_length", [1, 2])
@pytest.mark.parametrize("repeated", [False, True])
def test_a_resumed_pass_reads_only_what_is_left(cycle_length: int, repeated: bool) -> None:
    read: list[int] = []

    class Lazy:
        """Rows that say when they are read."""

        dtype = np.dtype(np.int64)

        def __init__(self, number: int) -> None:
            self.rows = np.arange(6) + 100 * number
            self.shape = self.rows.shape

        def __getitem__(self, index: Any) -> Any:
            read.extend(np.atleast_1d(self.rows[index]).tolist())
            return self.rows[index]

    def build() -> Dataset:
        files = Dataset.from_files([str(k) for k in range(5)], lambda name: Lazy(int(name)), cycle_length=cycle_length)
        return (files.repeat(2) if repeated else files).batch(4)

    whole = [batch.tolist() for batch in build()]
    iterator = iter(build())
    for _ in range(4):
        next(iterator)
    resumed = iter(build())
    resumed.load_state(iterator.state())
    read.clear()
    assert [batch.tolist() for batch in resumed] == whole[4:]
    assert sorted(read) == sorted(row for batch in whole[4:] for row in batch)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 50), st.booleans())
def test_batches_of_blocks_that_cut_them(length: int, size: int, start: int, drop: bool) -> None:
    # Two datasets one behind the other: blocks of their own, whose ends lie within batches.
    first = Dataset.range(length // 3)
    stream = first.concatenate(Dataset.range(length // 3, length)).batch(size, drop_remainder=drop)
    rows = [list(range(begin, min(begin + size, length))) for begin in range(0, length, size)]
    expected = [row for row in rows if len(row) == size or not drop]
    assert [batch.tolist() for batch in stream.skip(start)] == expected[start:]


@pytest.mark.parametrize("rows", [[3], [4, 5, 6], [6, 5, 4], [4, 4, 5], [0, 2, 1, 3]])
def test_rows_are_copies_in_the_order_asked_for(rows: list[int]) -> None:
    data = np.arange(16).reshape(8, 2)
    for items in (rows, np.array(rows)):
        batch, labels = ArraySource((data, data[:, 0])).rows(items)
        assert batch.tolist() == data[rows].tolist()
        assert labels.tolist() == data[rows, 0].tolist()
        assert not np.shares_memory(batch, data)
        assert not np.shares_memory(labels, data)


def test_threads_read_headers_one_at_a_time(tmp_path: Path) -> None:
    # Some versions of Python raise SystemError where two threads parse at a time: NumPy parses headers, and the
    # collector of garbage lets another thread run in the middle of it.
    np.save(tmp_path / "x.npy", np.zeros(2, [(f"f{k}", "f4") for k in range(200)]))
    errors: list[SystemError] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0)

    def read() -> None:
        for _ in range(30):
            Garbage()
            try:
                read_npy(tmp_path / "x.npy")
            except SystemError as error:
                errors.append(error)

    threshold = gc.get_threshold()
    gc.set_threshold(100)
    try:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    assert errors == []


def test_the_first_file_that_has_an_example_shows_shapes_and_dtypes() -> None:
    def opened(x: Any) -> Any:
        return iter([np.zeros(3, np.float32)] * int(x))

    found = Dataset.range(3).interleave(opened)
    assert found.element_spec == ArraySpec((3,), np.dtype(np.float32))
    assert Dataset.from_iterable([]).concatenate(found).batch(2).element_spec.dtype == np.float32
    with pytest.raises(ValueError, match="expected at least one example"):
        _ = Dataset.range(1).interleave(opened).element_spec

    def fails(x: Any) -> Any:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        _ = Dataset.range(3).map(fails).concatenate(Dataset.range(3)).element_spec
