"""`Dataset` outside any strategy: tf.data's results, seeking, shuffling, errors."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.data import AUTOTUNE, INFINITE, UNKNOWN, ArraySpec, AutoShardPolicy, Dataset, Options

Build = Callable[[Dataset], Dataset]
not_right: Any = 2.5


def listed(dataset: Iterable[Any]) -> list[Any]:
    return [element.tolist() for element in dataset]


def numbers(count: int, *, indexable: bool) -> Dataset:
    return Dataset.range(count) if indexable else Dataset.from_iterable(lambda: (np.int64(i) for i in range(count)))


def test_range_gives_int64_scalars_and_batches_are_arrays() -> None:
    first = next(iter(Dataset.range(3)))
    assert isinstance(first, np.int64)
    assert listed(Dataset.range(10, 0, -4)) == [10, 6, 2]
    batch = next(iter(Dataset.range(5, output_type=np.float32).batch(2)))
    assert isinstance(batch, np.ndarray)
    assert batch.dtype == np.float32


@pytest.mark.parametrize("indexable", [True, False])
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda d: d.batch(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (lambda d: d.batch(4, drop_remainder=True), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda d: d.batch(4).repeat(2).skip(2), [[8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (lambda d: d.repeat(2).batch(15), [[*range(10), *range(5)], [*range(5, 10)]]),
        (lambda d: d.map(lambda x: x * x).take(3), [0, 1, 4]),
        (lambda d: d.take(-1).skip(8), [8, 9]),
        (lambda d: d.skip(-1), []),
        (lambda d: d.skip(20), []),
        (lambda d: d.shard(3, 1), [1, 4, 7]),
        (lambda d: d.shard(3, 1).shard(2, 1), [4]),
        (lambda d: d.repeat().skip(8).take(4), [8, 9, 0, 1]),
        (lambda d: d.repeat(0), []),
        (lambda d: d.take(8).batch(3, True).batch(2), [[[0, 1, 2], [3, 4, 5]]]),
        (lambda d: d.batch(4).map(lambda x: x.sum()), [6, 22, 17]),
        (lambda d: d.batch(2).shard(2, 1).map(lambda x: x + 1), [[3, 4], [7, 8]]),
        (lambda d: d.batch(4).prefetch(AUTOTUNE).take(1), [[0, 1, 2, 3]]),
    ],
)
def test_transformations_give_what_tf_data_gives(indexable: bool, build: Build, expected: list[Any]) -> None:
    dataset = build(numbers(10, indexable=indexable))
    assert listed(dataset) == expected
    assert dataset.cardinality() in (len(expected), UNKNOWN)
    if indexable:
        assert len(dataset) == len(expected)


@pytest.mark.parametrize("indexable", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        lambda d: d.shuffle(5, seed=3).repeat(3).batch(4),
        lambda d: d.repeat(3).shuffle(7, seed=3).batch(4, True).repeat(2),
        lambda d: d.shuffle(100, seed=1).batch(3).shuffle(2, seed=5),
        lambda d: d.map(lambda x: x + 1).shard(2, 1).take(4).skip(1),
        lambda d: d.batch(3, drop_remainder=True).batch(2).prefetch(1),
        lambda d: d.shuffle(4).batch(2),
    ],
)
def test_a_saved_position_resumes_exactly(indexable: bool, build: Build) -> None:
    dataset = build(numbers(11, indexable=indexable))
    list(dataset)
    whole = [element.tolist() for element in iter(dataset)]
    for taken in range(len(whole) + 1):
        dataset = build(numbers(11, indexable=indexable))
        list(dataset)
        iterator = iter(dataset)
        head = [next(iterator).tolist() for _ in range(taken)]
        fresh = build(numbers(11, indexable=indexable))
        resumed = iter(fresh)
        resumed.load_state(iterator.state())
        assert all(type(value) is int for value in iterator.state().values())
        rest = [element.tolist() for element in resumed]
        if not any("seed" in name for name in iterator.state()):
            assert head + rest == whole
        else:
            assert rest == [element.tolist() for element in iterator]
        assert iter(fresh).state()["iteration"] == 2


def test_shuffle_is_a_permutation_that_depends_on_seed_and_iteration_only() -> None:
    dataset = Dataset.range(1000).shuffle(1000, seed=7)
    first, second = listed(dataset), listed(dataset)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first != second
    again = Dataset.range(1000).shuffle(1000, seed=7)
    assert [listed(again), listed(again)] == [first, second]
    assert listed(Dataset.range(1000).shuffle(1000, seed=8)) != first
    assert listed(Dataset.range(1000).shuffle(5000, seed=7)) == first


def test_shuffle_keeps_the_order_when_told_to_and_repeats_reshuffle() -> None:
    kept = Dataset.range(50).shuffle(50, reshuffle_each_iteration=False)
    assert listed(kept) == listed(kept)
    twice = listed(Dataset.range(50).shuffle(50, seed=0).repeat(2))
    assert sorted(twice[:50]) == sorted(twice[50:]) == list(range(50))
    assert twice[:50] != twice[50:]
    train, test = kept.take(40), kept.skip(40)
    assert sorted(listed(train) + listed(test)) == list(range(50))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 2**70))
def test_a_shuffle_buffer_never_looks_further_ahead_than_its_size(count: int, buffer_size: int, seed: int) -> None:
    order = listed(Dataset.range(count).shuffle(buffer_size, seed=seed))
    assert sorted(order) == list(range(count))
    assert all(item < place + buffer_size for place, item in enumerate(order))
    stream = Dataset.from_iterable([np.int64(i) for i in range(count)]).shuffle(buffer_size, seed=seed)
    assert listed(stream) == order


def test_a_full_shuffle_is_uniform() -> None:
    places = np.zeros((5, 5))
    dataset = Dataset.range(5).shuffle(5, seed=0)
    for _ in range(2000):
        places[np.arange(5), listed(dataset)] += 1
    assert np.abs(places - 400).max() < 90


@pytest.mark.parametrize("buffer_size", [1, 3, 8, 20])
def test_batches_can_be_shuffled(buffer_size: int) -> None:
    batches = listed(Dataset.range(16).batch(2).shuffle(buffer_size, seed=1))
    assert sorted(batches) == [[i, i + 1] for i in range(0, 16, 2)]


def test_structures_and_dtypes_are_those_of_tf_data() -> None:
    Point = namedtuple("Point", "x y")
    dataset = Dataset.from_tensor_slices(
        {"b": [1.0, 2.0], "a": ([1, 2], Point(np.zeros((2, 3)), [True, False])), "c": [2**40, 1]}
    )
    element = next(iter(dataset.batch(2)))
    assert list(element) == ["b", "a", "c"]
    assert element["b"].dtype == np.float32
    assert element["c"].dtype == np.int64
    ints, point = element["a"]
    assert ints.dtype == np.int32
    assert isinstance(point, Point)
    assert point.x.dtype == np.float64
    assert point.y.dtype == bool
    assert Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10).cardinality() == 10
    whole = next(iter(Dataset.from_tensors(([1.0], [1.0])).repeat(3).batch(3)))
    assert whole[0].tolist() == [[1.0]] * 3
    assert whole[0].dtype == np.float32


def test_map_gets_tuples_as_arguments_and_dictionaries_whole() -> None:
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3.0)))
    assert listed(pairs.map(lambda a, b: a + b)) == [0.0, 2.0, 4.0]
    named = Dataset.from_tensor_slices({"a": np.arange(3)}).map(lambda element: (element["a"], 1.5)).batch(3)
    a, b = next(iter(named))
    assert a.tolist() == [0, 1, 2]
    assert b.dtype == np.float32


def test_what_the_user_does_to_an_element_does_not_reach_the_data() -> None:
    data = np.ones((4, 2))
    for dataset in (Dataset.from_tensor_slices(data), Dataset.from_tensor_slices(data).batch(2)):
        for element in dataset:
            element[...] = 0
    for element in Dataset.from_tensor_slices(data).shuffle(4).batch(2):
        element[...] = 0
    assert data.tolist() == np.ones((4, 2)).tolist()


def test_element_spec() -> None:
    dataset = Dataset.from_tensor_slices((np.zeros((5, 3), np.float32), np.zeros(5, np.int8)))
    f4, i1 = np.dtype(np.float32), np.dtype(np.int8)
    assert dataset.element_spec == (ArraySpec((3,), f4), ArraySpec((), i1))
    assert dataset.batch(2).element_spec == (ArraySpec((None, 3), f4), ArraySpec((None,), i1))
    assert dataset.batch(2, True).element_spec[0] == ArraySpec((2, 3), f4)
    mapped = dataset.map(lambda x, _: x.astype(np.float64)).batch(2).map(lambda x: x.reshape(len(x), 3, 1))
    assert mapped.element_spec == ArraySpec((None, 3, 1), np.dtype(np.float64))
    twice = Dataset.from_iterable([np.zeros(2)]).batch(2).batch(2)
    assert twice.element_spec == ArraySpec((None, 1, 2), np.dtype(np.float64))
    halves = Dataset.range(8).batch(4, drop_remainder=True).map(lambda x: x.reshape(2, 2))
    assert halves.element_spec == ArraySpec((2, 2), np.dtype(np.int64))
    assert Dataset.from_tensor_slices(np.zeros((0, 3), np.float32)).batch(2).element_spec == ArraySpec((None, 3), f4)
    with pytest.raises(ValueError, match="no element"):
        _ = Dataset.from_iterable([]).element_spec


def test_cardinality_and_len() -> None:
    assert Dataset.range(3).repeat().cardinality() == INFINITE == -1
    assert Dataset.from_iterable([1]).cardinality() == UNKNOWN == -2
    assert Dataset.from_iterable([1]).repeat().take(5).cardinality() == 5
    assert len(Dataset.range(10).shuffle(3).batch(4).repeat(2)) == 6
    assert Dataset.range(0)
    with pytest.raises(TypeError, match="infinite"):
        len(Dataset.range(3).repeat())


class Counting:
    """An array that says which rows were read."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.reads: list[list[int]] = []

    def __getitem__(self, index: Any) -> Any:
        self.reads.append(np.atleast_1d(np.arange(len(self.array))[index]).tolist())
        return self.array[index]


def test_lazy_arrays_are_read_in_increasing_order_once_a_batch() -> None:
    lazy = Counting(np.arange(20) * 10)
    batches = listed(Dataset.from_tensor_slices(lazy).shuffle(20, seed=1).batch(5).skip(1).take(2))
    assert len(lazy.reads) == 2
    assert all(read == sorted(read) for read in lazy.reads)
    assert [sorted(batch) for batch in batches] == [[10 * row for row in read] for read in lazy.reads]


def test_hdf5_datasets(tmp_path: Path) -> None:
    data = np.random.default_rng(0).random((30, 4)).astype(np.float32)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = data
        file["y"] = np.arange(30)
    with h5py.File(tmp_path / "data.h5") as file:
        dataset = Dataset.from_tensor_slices((file["x"], file["y"]))
        for x, y in dataset.shuffle(30, seed=0).repeat(2).batch(7).prefetch(2):
            assert np.array_equal(x, data[y])
        # One array in the file, the other in memory: the rows of a batch stand in the same order in both.
        for x, y in Dataset.from_tensor_slices((file["x"], np.arange(30))).shuffle(30, seed=0).batch(7):
            assert np.array_equal(x, data[y])
        x, y = next(iter(dataset))
        assert np.array_equal(x, data[0])
        assert y == 0


def test_a_closed_hdf5_file_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(6)
        dataset = Dataset.from_tensor_slices(file["x"])
    for closed in (dataset, dataset.batch(2), dataset.shuffle(6, seed=0).batch(2)):
        with pytest.raises(ValueError, match=r"HDF5 file of a dataset was closed before .* Dataset\.from_files\(path"):
            list(closed)


@pytest.mark.parametrize("where", ["HDF5", "HDF5 as texts", "memory"])
def test_texts_and_other_objects(where: str, tmp_path: Path) -> None:
    kind = bytes if where == "HDF5" else str
    a, bb, c = rows = [kind(text, "ascii") if kind is bytes else text for text in ("a", "bb", "c")]
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = ["a", "bb", "c"]
        texts = {"HDF5": file["x"], "HDF5 as texts": file["x"].asstr(), "memory": np.array(rows, object)}[where]
        if not hasattr(texts, "dtype"):
            # In older versions of h5py it is nothing like an array.
            with pytest.raises(TypeError, match=r"AsStrWrapper\. Convert it to an array first"):
                Dataset.from_tensor_slices(texts)
            return
        dataset = Dataset.from_tensor_slices(texts)
        assert list(dataset) == rows
        assert dataset.element_spec.dtype == object
        for changed in (
            dataset, dataset.filter(lambda _: True), dataset.cache(), dataset.take_while(lambda _: True),
            dataset.batch(2).unbatch(), dataset.batch(1).unbatch().filter(lambda _: True),
        ):
            assert listed(changed.batch(2)) == [[a, bb], [c]]
        padded = list(dataset.padded_batch(2))
        assert [type(one) for batch in padded for one in batch] == [kind] * 3
        upper = dataset.map(kind.upper).filter(lambda text: len(text.item()) == 1)
        assert listed(upper.batch(2)) == [[a.upper(), c.upper()]]


def test_iterables_are_read_lazily_and_again_in_each_pass() -> None:
    opened = 0
    given = []

    def generate() -> Iterator[list[Any]]:
        nonlocal opened
        opened += 1
        for i in range(6):
            given.append(i)
            yield [np.full(2, i), i]

    dataset = Dataset.from_iterable(generate).batch(2)
    iterator = iter(dataset)
    x, y = next(iterator)
    assert x.tolist() == [[0, 0], [1, 1]]
    assert y.dtype == np.int32
    assert given == [0, 1]
    assert len(list(dataset)) == len(list(dataset)) == 3
    assert opened == 3


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Dataset.from_tensor_slices((np.zeros(3), np.zeros(4))), ValueError, "first dimension"),
        (lambda: Dataset.from_tensor_slices(np.float32(1)), ValueError, "first dimension"),
        (lambda: Dataset.from_tensor_slices(object()), TypeError, "expected arrays"),
        (lambda: Dataset.from_iterable(iter([1])), TypeError, "only once"),
        (lambda: Dataset.from_iterable(not_right), TypeError, "iterable"),
        (lambda: Dataset.range(3).batch(0), ValueError, "batch_size"),
        (lambda: Dataset.range(3).batch(not_right), TypeError, "batch_size"),
        (lambda: Dataset.range(3).shuffle(0), ValueError, "buffer_size"),
        (lambda: Dataset.range(3).prefetch(-2), ValueError, "buffer_size"),
        (lambda: Dataset.range(3).shard(2, 2), ValueError, "index"),
        (lambda: Dataset.range(3).map(not_right), TypeError, "function"),
        (lambda: Dataset.range(3).with_options(not_right), TypeError, "Options"),
        (lambda: list(Dataset.from_iterable([np.zeros(2), np.zeros(3)]).batch(2)), ValueError, "same shape"),
        (lambda: list(Dataset.from_iterable([]).repeat()), ValueError, "no element"),
        (lambda: list(Dataset.from_iterable([(1, 2), 3]).batch(2)), ValueError, "same structure"),
    ],
)
def test_errors_name_the_argument(build: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


def test_a_position_of_another_pipeline_is_refused() -> None:
    iterator = iter(Dataset.range(3).shuffle(3))
    with pytest.raises(ValueError, match="seed_0"):
        iterator.load_state({"iteration": 0, "batch": 1})
    with pytest.raises(ValueError, match="does not fit"):
        iter(Dataset.range(3)).load_state({"iteration": 0, "batch": -1})


@pytest.mark.parametrize("depth", [0, 2])
def test_a_position_is_loaded_into_an_exhausted_iterator(depth: int) -> None:
    iterator = iter(Dataset.range(8).batch(2).prefetch(depth))
    state = iterator.state()
    assert len(list(iterator)) == 4
    assert list(iterator) == []
    iterator.load_state(state)
    assert len(list(iterator)) == 4
    iterator.load_state({"iteration": 0, "batch": 3})
    assert listed(iterator) == [[6, 7]]


@pytest.mark.parametrize("drop", [False, True])
def test_a_position_is_loaded_with_another_batch_size(drop: bool) -> None:
    def build(size: int) -> Dataset:
        return Dataset.range(50).shuffle(50, seed=1).batch(size, drop)

    rows = [row for batch in build(50) for row in batch.tolist()]
    iterator = iter(build(6))
    for taken in range(len(build(6)) + 1):
        for size in (1, 2, 3, 4, 7, 12):
            other = iter(build(size))
            is_end = taken == len(build(6))
            if 6 * taken % size and not is_end:
                with pytest.raises(ValueError, match=rf"{taken} batches of 6 .* with batches of {size} cannot"):
                    other.load_state(iterator.state())
                continue
            other.load_state(iterator.state())
            rest = [row for batch in other for row in batch.tolist()]
            left = rows[6 * taken : 50 - 50 % size if drop else 50]
            assert rest == ([] if is_end else left)
        if taken < len(build(6)):
            next(iterator)


def test_no_examples_end_at_once() -> None:
    assert listed(Dataset.range(0).batch(2).repeat()) == listed(Dataset.range(3).filter(lambda x: x > 9)) == []
    assert listed(Dataset.range(3).take(0).shuffle(3).repeat().batch(2)) == []


def test_options_are_copied() -> None:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    dataset = Dataset.range(3).with_options(options).batch(2)
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    assert dataset.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    assert Dataset.range(1).options().experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    with pytest.raises(ValueError, match="auto_shard_policy"):
        options.experimental_distribute.auto_shard_policy = "EVERYTHING"


def policy(name: str) -> Options:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return options


def test_later_options_replace_earlier_ones_only_where_they_are_set() -> None:
    dataset = Dataset.range(3).with_options(policy("FILE")).with_options(Options(deterministic=False))
    assert dataset.options().experimental_distribute == policy("FILE").experimental_distribute
    assert dataset.options().deterministic is False
    again = dataset.with_options(policy("AUTO")).options()
    assert again.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    assert again.deterministic is False
    merged = policy("DATA").merge(Options(deterministic=True))
    assert merged == Options(policy("DATA").experimental_distribute, True)


def test_a_dataset_of_several_has_the_options_of_all() -> None:
    plain, off = Dataset.range(3), Dataset.range(3).with_options(policy("OFF"))
    several = [Dataset.zip(plain, off), Dataset.zip((off, plain)), plain.concatenate(off), off.concatenate(plain)]
    several += [Dataset.zip(off, off), off.concatenate(off), off.enumerate()]
    assert [one.options() for one in several] == [policy("OFF")] * 7
    data = Dataset.range(3).with_options(policy("DATA"))
    with pytest.raises(ValueError, match=r"zip: .*one auto_shard_policy, got OFF and DATA\. Call with_options"):
        Dataset.zip(plain, off, data)
    with pytest.raises(ValueError, match=r"concatenate: .*one auto_shard_policy, got DATA and OFF"):
        data.concatenate(off)


def test_options_that_do_not_exist_are_errors() -> None:
    options: Any = Options()
    with pytest.raises(AttributeError, match="experimental_slak"):
        options.experimental_slak = True
    with pytest.raises(AttributeError, match="auto_shard_polcy"):
        options.experimental_distribute.auto_shard_polcy = AutoShardPolicy.OFF
    options.experimental_distribute = AutoShardPolicy.OFF
    with pytest.raises(TypeError, match=r"with_options: .*expected mpidist.data.DistributeOptions, got .*OFF"):
        Dataset.range(3).with_options(options)
