"""Transformations whose elements depend on others, or come from several datasets: their plain Python meaning."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import tree
from mpidist.data import UNKNOWN, ArraySpec, Dataset, DatasetSpec

Build = Callable[[Dataset], Dataset]


def plain(element: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf.tolist(), element)


def listed(dataset: Dataset) -> list[Any]:
    return [plain(element) for element in dataset]


def numbers(count: int, *, indexable: bool = True) -> Dataset:
    return Dataset.range(count) if indexable else Dataset.from_iterable(lambda: (np.int64(i) for i in range(count)))


def running(total: Any, x: Any) -> Any:
    return total + x.sum(), (total, x)


def last(window: Dataset) -> Any:
    return window.reduce(np.int64(0), lambda _, x: x)


# Each with the plain list of its elements over `range(11)`.
CASES: dict[str, tuple[Build, list[Any]]] = {
    "flat_map": (
        lambda d: d.flat_map(lambda x: Dataset.range(x % 3)).batch(4),
        [[0, 0, 1, 0], [0, 1, 0, 0], [1, 0]],
    ),
    "flat_map of batches": (
        lambda d: d.take(3).flat_map(lambda x: Dataset.range(x, x + 3).batch(2)),
        [[0, 1], [2], [1, 2], [3], [2, 3], [4]],
    ),
    "take_while": (lambda d: d.take_while(lambda x: x < 5).repeat(2), [0, 1, 2, 3, 4] * 2),
    "take_while of batches": (lambda d: d.batch(4).take_while(lambda x: x[0] < 8), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "scan": (
        lambda d: d.take(4).scan(np.int64(0), running).repeat(2),
        [(0, 0), (0, 1), (1, 2), (3, 3)] * 2,
    ),
    "scan of batches": (
        lambda d: d.batch(4).scan(np.int64(0), lambda total, batch: (total + batch.sum(), batch - total)),
        [[0, 1, 2, 3], [-2, -1, 0, 1], [-20, -19, -18]],
    ),
    "unique": (lambda d: d.map(lambda x: x * x % 5).unique().batch(2).repeat(2), [[0, 1], [4]] * 2),
    "rebatch": (
        lambda d: d.batch(4).rebatch(3).map(lambda x: x + 1).repeat(2),
        [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]] * 2,
    ),
    "rebatch in turn": (
        lambda d: d.batch(2).map(lambda x: -x).rebatch([3, 1], drop_remainder=True),
        [[0, -1, -2], [-3], [-4, -5, -6], [-7], [-8, -9, -10]],
    ),
    "unbatch of rows": (
        lambda d: d.map(lambda x: np.arange(x % 3)).unbatch().batch(3).repeat(2),
        [[0, 0, 1], [0, 0, 1], [0, 0, 1], [0]] * 2,
    ),
    "rebatch of rows": (
        lambda d: d.map(lambda x: (x * np.ones(x % 3, int), np.zeros((x % 3, 2)))).rebatch([4, 1]).map(lambda x, y: x),
        [[1, 2, 2, 4], [5], [5, 7, 8, 8], [10]],
    ),
    "window": (
        lambda d: d.window(3, 2, drop_remainder=True).flat_map(lambda window: window.batch(3)).batch(2).repeat(2),
        [[[0, 1, 2], [2, 3, 4]], [[4, 5, 6], [6, 7, 8]], [[8, 9, 10]]] * 2,
    ),
    "window over pairs": (
        lambda d: Dataset.zip(d, d.map(lambda x: -x)).window(2, 5).map(lambda a, b: (last(a), last(b))),
        [(1, -1), (6, -6), (10, -10)],
    ),
    "window of batches": (
        lambda d: d.batch(3).window(2, 1).skip(1).flat_map(lambda window: window.unbatch().batch(10)),
        [[3, 4, 5, 6, 7, 8], [6, 7, 8, 9, 10], [9, 10]],
    ),
    "enumerate of batches": (
        lambda d: d.batch(4).enumerate(7).skip(1),
        [(8, [4, 5, 6, 7]), (9, [8, 9, 10])],
    ),
    "zip of batches and examples": (
        lambda d: Dataset.zip({"x": d.batch(4), "y": d.skip(2)}).map(lambda both: (both["x"], both["y"])),
        [([0, 1, 2, 3], 2), ([4, 5, 6, 7], 3), ([8, 9, 10], 4)],
    ),
    "zip of a nest": (
        lambda d: Dataset.zip((d, {"b": d.skip(1), "a": (d, d.skip(9))})).batch(2),
        [([0, 1], {"b": [1, 2], "a": ([0, 1], [9, 10])})],
    ),
}


@pytest.mark.parametrize("indexable", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_elements_and_positions(case: str, indexable: bool) -> None:
    build, expected = CASES[case]
    assert listed(build(numbers(11, indexable=indexable))) == expected
    for taken in range(len(expected) + 1):
        iterator = iter(build(numbers(11, indexable=indexable)))
        for _ in range(taken):
            next(iterator)
        resumed = iter(build(numbers(11, indexable=indexable)))
        resumed.load_state(iterator.state())
        assert [plain(element) for element in resumed] == expected[taken:]


@given(
    st.integers(0, 30), st.integers(1, 5), st.booleans(), st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.booleans(), st.integers(0, 15),
)
def test_rebatching_is_unbatching_and_cutting(
    count: int, size: int, first_drops: bool, sizes: list[int], drop: bool, skip: int
) -> None:
    dataset = Dataset.range(count).batch(size, first_drops).rebatch(sizes, drop)
    rest = list(range(count - count % size if first_drops else count))
    expected = []
    for wanted in itertools.cycle(sizes):
        if not rest or (drop and len(rest) < wanted):
            break
        expected.append(rest[:wanted])
        rest = rest[wanted:]
    assert dataset.cardinality() == len(expected)
    assert listed(dataset.skip(skip)) == expected[skip:]
    examples = [x for batch in expected for x in batch]
    assert len(dataset.unbatch()) == len(examples)
    assert listed(dataset.unbatch().skip(skip)) == examples[skip:]
    assert listed(dataset.rebatch(2)) == [examples[k : k + 2] for k in range(0, len(examples), 2)]
    assert len(dataset.rebatch(2)) == -(-len(examples) // 2)


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.integers(0, 22))
def test_windows_are_those_of_slices(count: int, size: int, shift: int, stride: int, drop: bool, skip: int) -> None:
    expected = [list(range(count))[at : at + (size - 1) * stride + 1 : stride] for at in range(0, count, shift)]
    expected = [one for one in expected if len(one) == size or not drop]
    for dataset in (Dataset.range(count), numbers(count, indexable=False), Dataset.range(count).shuffle(1)):
        windows = dataset.window(size, shift, stride, drop)
        assert windows.cardinality() in (len(expected), UNKNOWN)
        assert [listed(window) for window in windows.skip(skip)] == expected[skip:]
        assert all(len(window) == len(one) for window, one in zip(windows, expected, strict=True))


def test_windows_are_structures_of_datasets_and_read_nothing_by_themselves() -> None:
    read: list[int] = []

    def remember(x: Any) -> Any:
        read.append(int(x))
        return {"x": x, "rest": (x * 2,)}

    windows = Dataset.range(1, 8).map(remember).window(3)
    _, second, third = windows
    assert read == [0]  # a sample, which tells the structure
    assert [int(x) for x in second["x"]] == [4, 5, 6]
    assert [int(x) for x in third["rest"][0].repeat(2)] == [14, 14]
    assert windows.element_spec["x"] == DatasetSpec(ArraySpec((), np.dtype("int64")))
    pairs = Dataset.range(4).window(2).map(lambda window: window.batch(2)).flat_map(lambda window: window)
    assert pairs.element_spec == ArraySpec((2,), np.dtype("int64"))
    mixed = Dataset.zip(windows, Dataset.range(4).batch(2))
    assert mixed.element_spec[0]["x"] == windows.element_spec["x"]
    assert mixed.element_spec[1] == ArraySpec((None,), np.dtype("int64"))
    assert [listed(one["x"]) for one in windows.cache()] == [[1, 2, 3], [4, 5, 6], [7]]
    both = Dataset.zip(windows, windows.skip(1)).flat_map(lambda a, b: Dataset.zip(a["x"], b["x"]))
    assert listed(both) == [(1, 4), (2, 5), (3, 6), (4, 7)]


def test_reduce_and_apply() -> None:
    dataset = Dataset.zip(Dataset.range(5), Dataset.range(5, 10))
    total, count = dataset.reduce((np.int64(0), 0), lambda state, pair: (state[0] + pair[0] * pair[1], state[1] + 1))
    assert (int(total), int(count)) == (80, 5)
    start = np.zeros(2)

    def add(state: Any, x: Any) -> Any:
        state += x
        return state

    assert Dataset.range(4).reduce(start, add).tolist() == [6, 6]
    assert start.tolist() == [0, 0]
    assert Dataset.range(0).reduce(7, add) == 7
    shuffled = Dataset.range(30).shuffle(30, seed=1)
    assert len({int(shuffled.reduce(np.int64(0), lambda s, x: (s * 31 + x) % 2**40)) for _ in range(3)}) == 3
    assert listed(Dataset.range(6).apply(lambda d: d.skip(2).batch(2))) == [[2, 3], [4, 5]]


def test_known_cardinalities_are_kept() -> None:
    assert Dataset.range(5).scan(0, lambda s, x: (s, x)).cardinality() == 5
    assert Dataset.range(5).take_while(bool).cardinality() == Dataset.range(5).unique().cardinality() == UNKNOWN
    assert Dataset.range(0).unique().cardinality() == 0
    assert Dataset.zip({"a": Dataset.range(5), "b": Dataset.range(3).batch(2)}).cardinality() == 2


def test_zip_keeps_the_structure() -> None:
    pair = namedtuple("pair", "first second")
    a, b = Dataset.range(2), Dataset.range(4, 6).map(lambda x: (x, x))
    assert listed(Dataset.zip(a)) == [0, 1]
    assert listed(Dataset.zip(pair(a, b))) == [pair(0, (4, 4)), pair(1, (5, 5))]
    assert listed(Dataset.zip(((a,), a))) == [((0,), 0), ((1,), 1)]
    assert listed(Dataset.zip(datasets=[a, [b, a]])) == [(0, ((4, 4), 0)), (1, ((5, 5), 1))]
    named = Dataset.zip({"z": a, "a": (b, a)})
    assert list(next(iter(named))) == ["z", "a"]
    assert named.element_spec["a"][1] == ArraySpec((), np.dtype("int64"))


def test_scan_goes_on_with_a_copy_of_its_state() -> None:
    def fill(state: Any, x: Any) -> Any:
        state[x] = x + 1
        return state, state

    scanned = Dataset.range(3).scan(np.zeros(3, np.int64), fill)
    for _ in range(2):
        kept = list(scanned)
        assert [one.tolist() for one in kept] == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    iterator = iter(scanned)
    next(iterator)[...] = -1
    assert next(iterator).tolist() == [1, 2, 0]
    assert scanned.element_spec == ArraySpec((3,), np.dtype("int64"))


def test_unique_tells_shapes_and_structures_apart_and_knows_texts() -> None:
    rows = [{"a": np.zeros(2)}, {"a": np.zeros((2, 1))}, {"b": np.zeros(2)}, {"a": np.zeros(2)}]
    assert [(*one, *one.values()) for one in listed(Dataset.from_iterable(rows).unique())] == [
        ("a", [0, 0]), ("a", [[0], [0]]), ("b", [0, 0])
    ]
    texts = Dataset.from_tensor_slices(np.array(["a", "bc"])).concatenate(Dataset.from_tensor_slices(np.array(["a"])))
    assert listed(texts.unique()) == ["a", "bc"]


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 5), st.integers(0, 25))
def test_they_mean_what_python_means(values: list[int], limit: int, skip: int) -> None:
    dataset = Dataset.from_tensor_slices(np.array(values, np.int64))
    assert listed(dataset.unique().skip(skip)) == list(dict.fromkeys(values))[skip:]
    below = list(itertools.takewhile(lambda x: x < limit, values))
    assert listed(dataset.take_while(lambda x: x < limit).skip(skip)) == below[skip:]
    sums = dataset.scan(np.int64(0), lambda total, x: (total + x, total + x)).skip(skip)
    assert listed(sums) == list(itertools.accumulate(values))[skip:]
    flat = dataset.flat_map(np.arange).skip(skip)
    assert listed(flat) == [k for x in values for k in range(x)][skip:]
