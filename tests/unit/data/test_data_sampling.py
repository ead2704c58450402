"""Random numbers, samples of several datasets, and generators: distributions, positions, and errors."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.data import INFINITE, UNKNOWN, ArraySpec, Dataset

pair = namedtuple("pair", "x y")
not_right: Any = 2.5


def listed(dataset: Dataset) -> list[Any]:
    return [element.tolist() for element in dataset]


def counted(count: int, first: int = 0) -> Dataset:
    return Dataset.from_iterable(lambda: (np.int64(first + i) for i in range(count)))


def test_random_numbers_follow_from_the_seed_and_are_even() -> None:
    numbers = np.array(listed(Dataset.random(seed=7).take(40_000)))
    assert numbers.dtype == np.int64
    assert listed(Dataset.random(seed=7).take(40_000)) == numbers.tolist()
    assert listed(Dataset.random(seed=8).take(5)) != numbers[:5].tolist()
    assert listed(Dataset.random().take(5)) != listed(Dataset.random().take(5))
    assert numbers.min() >= 0
    assert 2**31 < numbers.max() < 2**32
    # 16 equal parts of about 2500 numbers each; 5 standard deviations are 242.
    assert np.abs(np.bincount(numbers // 2**28, minlength=16) - 2500).max() < 242
    assert Dataset.random().cardinality() == INFINITE


def test_random_numbers_differ_between_passes_only_on_request() -> None:
    same, anew = Dataset.random(3).take(5), Dataset.random(3, rerandomize_each_iteration=True).take(5)
    assert listed(same) == listed(same) == listed(same.repeat(2))[5:]
    passes = [listed(anew) for _ in range(3)]
    assert len(set(map(tuple, passes))) == 3
    assert listed(Dataset.random(3, True).take(5)) == passes[0]


def test_random_numbers_from_any_place_on() -> None:
    for is_anew in (True, False):
        whole = listed(Dataset.random(1, is_anew).take(20_003))
        for start in (0, 1, 8191, 8192, 20_000):
            assert listed(Dataset.random(1, is_anew).skip(start).take(3)) == whole[start : start + 3]


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4), st.data(), st.booleans(), st.booleans(), st.integers(0, 50),
    st.integers(0, 5),
)
def test_samples_keep_the_order_of_each_dataset_and_seek(
    sizes: list[int], data: Any, stops: bool, is_known: bool, skip: int, seed: int
) -> None:
    weights = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)).filter(any))
    make = (lambda n, k: Dataset.range(k, k + n)) if is_known else counted
    datasets = [make(size, 100 * k) for k, size in enumerate(sizes)]
    sampled = Dataset.sample_from_datasets(datasets, weights, seed, stops)
    order = listed(sampled)
    parts = [[x for x in order if x // 100 == k] for k in range(len(sizes))]
    for k, (size, weight, part) in enumerate(zip(sizes, weights, parts, strict=True)):
        whole = list(range(100 * k, 100 * k + size))
        assert part == whole[: len(part)] if stops else part == (whole if weight else [])
    if stops:
        assert any(len(part) == size for part, size, weight in zip(parts, sizes, weights, strict=True) if weight)
    assert sampled.cardinality() in (UNKNOWN, len(order))
    assert is_known or sampled.cardinality() == UNKNOWN
    assert listed(sampled.skip(skip)) == order[skip:]
    assert [x for batch in listed(sampled.batch(3)) for x in batch] == order


def test_shapes_are_those_of_the_first_dataset_with_an_element() -> None:
    empty = Dataset.from_generator(lambda: iter(()))
    spec = ArraySpec((), np.dtype("int64"))
    assert Dataset.sample_from_datasets([empty, Dataset.range(3)]).element_spec == spec
    assert empty.concatenate(Dataset.range(3)).element_spec == spec


def test_samples_follow_their_weights() -> None:
    endless = [Dataset.range(k, k + 1).repeat() for k in range(3)]
    for weights in ([1, 2, 5], np.array([0.125, 0.25, 0.625]), Dataset.from_tensors([2.0, 4.0, 10.0]).repeat()):
        sampled = Dataset.sample_from_datasets(endless, weights, seed=3)
        counts = np.bincount(listed(sampled.take(8000)))
        assert np.abs(counts - [1000, 2000, 5000]).max() < 220
    assert Dataset.sample_from_datasets(endless).cardinality() == INFINITE
    assert Dataset.sample_from_datasets(endless, stop_on_empty_dataset=True).cardinality() == INFINITE
    mixed = [*endless, Dataset.range(3)]
    assert Dataset.sample_from_datasets(mixed).cardinality() == INFINITE
    assert Dataset.sample_from_datasets(mixed, stop_on_empty_dataset=True).cardinality() == UNKNOWN
    assert Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(4)]).cardinality() == 7


def test_weights_of_a_dataset_choose_one_by_one_and_end_the_samples() -> None:
    turns = Dataset.from_tensor_slices(np.eye(2)[[0, 1, 1, 0, 1]])
    sampled = Dataset.sample_from_datasets([Dataset.range(9), Dataset.range(10, 19)], turns)
    assert listed(sampled) == [0, 10, 11, 1, 12]
    assert listed(sampled.skip(3)) == [1, 12]
    assert sampled.cardinality() == UNKNOWN


def test_samples_are_made_anew_only_on_request() -> None:
    datasets = [Dataset.range(10), Dataset.range(10, 20)]
    same = Dataset.sample_from_datasets(datasets)
    assert listed(same) == listed(same)
    anew = Dataset.sample_from_datasets(datasets, seed=1, rerandomize_each_iteration=True)
    assert len({tuple(listed(anew)) for _ in range(4)}) == 4


@pytest.mark.parametrize(
    "build",
    [
        lambda: Dataset.random(5).map(lambda x: x % 100).take(9).batch(2),
        lambda: Dataset.random(rerandomize_each_iteration=True).take(4).repeat(2),
        lambda: Dataset.sample_from_datasets([Dataset.range(5).shuffle(5), counted(4, 10)], [1, 2]).repeat(2),
        lambda: Dataset.sample_from_datasets([Dataset.range(6).batch(2), Dataset.range(9).batch(4)]),
        lambda: Dataset.sample_from_datasets(
            [Dataset.range(5), Dataset.range(9)], Dataset.random().map(lambda x: np.array([x % 2, 1])).take(12)
        ),
        lambda: Dataset.from_generator(lambda n: iter(range(n)), output_types=np.int16, args=(7,)).batch(2).repeat(2),
    ],
)
def test_a_position_resumes_in_them(build: Callable[[], Dataset]) -> None:
    dataset = build()
    list(dataset)
    iterator = iter(dataset)
    for _ in itertools.count():
        state = iterator.state()
        rest, again = iter(build()), iter(dataset)
        rest.load_state(state)
        again.load_state(state)
        assert [x.tolist() for x in rest] == [x.tolist() for x in again]
        if next(iterator, None) is None:
            break
    assert state["batch"] > 3


def test_generators_give_what_their_signature_says() -> None:
    def examples(count: Any, scale: Any) -> Iterator[Any]:
        assert (type(count), type(scale)) == (np.ndarray, np.ndarray)
        for k in range(count):
            yield {"x": [float(scale) * k] * k, "y": (k, "text")}

    rest = (ArraySpec((), np.dtype(np.uint8)), ArraySpec((), np.dtype(str)))
    signature = {"x": ArraySpec((None,), np.dtype(np.float64)), "y": rest}
    dataset = Dataset.from_generator(examples, args=(3, 0.5), output_signature=signature)
    for _ in range(2):
        last = list(dataset)[-1]
        assert last["x"].dtype == np.float64
        assert last["x"].tolist() == [1.0, 1.0]
        assert last["y"] == (2, "text")
        assert last["y"][0].dtype == np.uint8
    assert dataset.cardinality() == UNKNOWN
    old = Dataset.from_generator(lambda: [([1, 2], 3)], (np.int64, np.float32), ((2,), None))
    assert old.element_spec == (ArraySpec((2,), np.dtype("int64")), ArraySpec((), np.dtype("float32")))
    named = Dataset.from_generator(lambda: [pair(1, 2), (3, 4)], pair(np.int64, np.int64))
    assert list(named) == [pair(1, 2), pair(3, 4)]
    assert listed(Dataset.from_generator(lambda: [1, 2])) == [1, 2]
    assert next(iter(Dataset.from_generator(lambda: [1.5]))).dtype == np.float32


def generated(element: Any, **options: Any) -> Callable[[], object]:
    return lambda: list(Dataset.from_generator(lambda: [element], **options))


SPEC = ArraySpec((2, None), np.dtype(np.int32))


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Dataset.random("a"), TypeError, "random: `seed` must be an integer"),
        (lambda: Dataset.random(1, not_right), TypeError, "random: `rerandomize_each_iteration` must be True or False"),
        (lambda: Dataset.sample_from_datasets([]), ValueError, "expected a list of at least one dataset"),
        (lambda: Dataset.sample_from_datasets([not_right]), TypeError, "expected a list of at least one dataset"),
        (lambda: Dataset.sample_from_datasets(Dataset.range(3)), TypeError, "expected a list of at least one dataset"),
        (lambda: Dataset.sample_from_datasets([Dataset.range(3)], [1, 2]), ValueError, "`weights` of 1 numbers, one"),
        (lambda: Dataset.sample_from_datasets([Dataset.range(3)], [-1]), ValueError, "not negative and not all 0"),
        (lambda: Dataset.sample_from_datasets([Dataset.range(3)], [0]), ValueError, "not negative and not all 0"),
        (lambda: Dataset.sample_from_datasets([Dataset.range(3)], ["a"]), TypeError, "or a dataset of them"),
        (
            lambda: list(Dataset.sample_from_datasets([Dataset.range(3)], Dataset.range(3))),
            ValueError,
            "`weights` of 1 numbers, one for",
        ),
        (lambda: Dataset.sample_from_datasets([Dataset.range(3)], seed=not_right), TypeError, "datasets: `seed`"),
        (
            lambda: Dataset.sample_from_datasets([Dataset.range(3)], stop_on_empty_dataset=not_right),
            TypeError,
            "`stop_on_empty_dataset` must be True or False",
        ),
        (
            lambda: Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(3).batch(2)]),
            ValueError,
            "some have not. Call `batch` after sample_from_datasets",
        ),
        (lambda: Dataset.from_generator(iter([1])), TypeError, "without calling it"),
        (lambda: list(Dataset.from_generator(lambda: 3)), TypeError, "expected the function to return an iterable"),
        (lambda: Dataset.from_generator(list, output_signature=3), TypeError, "to hold an ArraySpec for each array"),
        (lambda: Dataset.from_generator(list, np.int32, output_signature=SPEC), ValueError, "another combination"),
        (lambda: Dataset.from_generator(list, output_shapes=(3,)), ValueError, "another combination"),
        (lambda: Dataset.from_generator(list, (np.int32, int), ((),)), ValueError, "structure of `output_types`"),
        (lambda: Dataset.from_generator(list, {"a": int}, {"b": ()}), ValueError, "structure of `output_types`"),
        (generated([[1], [2], [3]], output_signature=SPEC), ValueError, r"of shape \(2, None\), got one of shape"),
        (generated([[1.5], [2]], output_signature=SPEC), TypeError, "numbers that the dtype int32 can hold"),
        (generated([[2**40], [2]], output_signature=SPEC), TypeError, "numbers that the dtype int32 can hold"),
        (generated("a", output_types=np.float32), TypeError, "numbers that the dtype float32 can hold"),
        (generated({"a": (1, [2, [3]])}, output_types={"a": (int, int)}), TypeError, r"at \['a'\]\[1\] an array"),
        (generated({"b": 1}, output_types={"a": int}), TypeError, r"a dictionary with the keys \['a'\]"),
        (generated({"a": (1, 2, 3)}, output_types={"a": (int, int)}), TypeError, r"at \['a'\] a tuple of 2 parts"),
        (lambda: Dataset.from_generator(list).element_spec, ValueError, "yields at least one element"),
    ],
)
def test_errors_say_what_was_expected(build: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()
