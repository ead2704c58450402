"""Transformations that join, split, pad, filter and keep: tf.data's results, seekable, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.data import AUTOTUNE, UNKNOWN, ArraySpec, Dataset
from mpidist.data.items.stream import Epoch

not_right: Any = 2.5


def listed(dataset: Dataset) -> list[Any]:
    return [[part.tolist() for part in one] if isinstance(one, tuple) else one.tolist() for one in dataset]


def numbers(count: int, *, indexable: bool = True) -> Dataset:
    return Dataset.range(count) if indexable else Dataset.from_iterable(lambda: (np.int64(i) for i in range(count)))


def test_interleave_takes_turns_as_tf_data_does() -> None:
    dataset = Dataset.range(1, 6).interleave(lambda x: Dataset.from_tensors(x).repeat(6), 2, 4)
    assert listed(dataset) == [
        1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5
    ]  # fmt: skip
    behind = Dataset.range(4).interleave(np.arange)
    assert listed(behind) == [0, 0, 1, 0, 1, 2]
    assert listed(Dataset.range(3).interleave(lambda x: iter([x, x]), cycle_length=3)) == [0, 1, 2, 0, 1, 2]
    batches = Dataset.range(2).interleave(lambda x: Dataset.range(x, x + 4).batch(2), None, None, AUTOTUNE, False)
    assert listed(batches) == [[0, 1], [2, 3], [1, 2], [3, 4]]
    assert listed(batches.batch(2)) == [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]


def test_zip_concatenate_enumerate_filter_unbatch() -> None:
    pairs = Dataset.zip(Dataset.range(5).shuffle(5, seed=1), Dataset.range(10, 13))
    assert pairs.cardinality() == 3
    assert listed(pairs.batch(2))[0][1] == [10, 11]
    assert listed(Dataset.zip((Dataset.range(2), Dataset.range(2).batch(1).unbatch()))) == [[0, 0], [1, 1]]
    assert listed(Dataset.range(2).concatenate(numbers(2, indexable=False)).batch(3)) == [[0, 1, 0], [1]]
    batches = Dataset.range(4).batch(2)
    assert listed(batches.concatenate(batches)) == [[0, 1], [2, 3]] * 2
    assert listed(Dataset.zip(batches, batches)) == [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]
    assert listed(Dataset.from_tensor_slices(np.array([7, 8])).enumerate(5)) == [[5, 7], [6, 8]]
    odd = Dataset.range(10).filter(lambda x: x % 2 == 1)
    assert listed(odd.batch(2)) == [[1, 3], [5, 7], [9]]
    assert odd.cardinality() == UNKNOWN
    full = Dataset.range(5).batch(2).filter(lambda batch: len(batch) == 2)
    assert listed(full) == [[0, 1], [2, 3]]
    assert len(Dataset.range(10).batch(3, drop_remainder=True).unbatch()) == 9
    assert listed(Dataset.range(4).batch(2).map(lambda x: x[::-1]).unbatch()) == [1, 0, 3, 2]


def test_elements_of_any_first_dimension_are_unbatched_and_rebatched() -> None:
    rows = Dataset.from_tensor_slices(np.arange(6).reshape(3, 2))
    assert listed(rows.unbatch()) == [0, 1, 2, 3, 4, 5]
    assert listed(rows.rebatch(4)) == [[0, 1, 2, 3], [4, 5]]
    assert listed(rows.rebatch([1, 2], drop_remainder=True)) == [[0], [1, 2], [3], [4, 5]]
    assert listed(Dataset.from_tensors(np.arange(6).reshape(3, 2)).unbatch().unbatch()) == [0, 1, 2, 3, 4, 5]
    pairs = Dataset.from_tensor_slices((np.arange(4).reshape(2, 2), np.array([[True, False], [False, True]])))
    assert listed(pairs.unbatch().skip(1)) == [[1, False], [2, False], [3, True]]
    grown = Dataset.range(4).map(np.arange)
    assert listed(grown.unbatch()) == [0, 0, 1, 0, 1, 2]
    assert listed(grown.rebatch(4)) == [[0, 0, 1, 0], [1, 2]]
    # The first element has no rows, and shows what a row is all the same.
    assert grown.unbatch().element_spec == ArraySpec((), np.dtype("int64"))
    assert listed(grown.take(1).rebatch(2)) == []


@pytest.mark.parametrize("indexable", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        lambda d: Dataset.zip(d, d.shuffle(4, seed=2)).batch(3),
        lambda d: d.concatenate(d.map(lambda x: x + 100)).shuffle(5, seed=1).batch(4),
        lambda d: d.interleave(lambda x: np.arange(x % 4) + 10 * x, 3, 2).batch(2),
        lambda d: d.interleave(lambda x: np.arange(x % 4) + 10 * x).repeat(2),
        lambda d: d.interleave(lambda x: iter(range(int(x) % 4))).batch(3),
        lambda d: d.filter(lambda x: x % 3 > 0).shuffle(3, seed=1).batch(2),
        lambda d: d.shuffle(9, seed=4).cache().repeat(2).batch(4),
        lambda d: d.cache().shuffle(9, seed=4).repeat(2).batch(4),
        lambda d: d.batch(4).cache().repeat(2),
        lambda d: d.batch(4).unbatch().enumerate().batch(3),
        lambda d: d.batch(4).map(lambda x: x * 2).unbatch().batch(3).unbatch(),
        lambda d: d.map(lambda x: np.ones(x % 3)).padded_batch(3).map(lambda x: x.sum(axis=1)),
        lambda d: d.map(lambda x: x + 1, 3).batch(4).map(lambda x: x * 2, num_parallel_calls=2).prefetch(2),
    ],
)
def test_a_position_resumes_through_them(indexable: bool, build: Callable[[Dataset], Dataset]) -> None:
    whole = listed(build(numbers(11, indexable=indexable)))
    for taken in range(len(whole) + 1):
        iterator = iter(build(numbers(11, indexable=indexable)))
        for _ in range(taken):
            next(iterator)
        resumed = iter(build(numbers(11, indexable=indexable)))
        resumed.load_state(iterator.state())
        rest = [[p.tolist() for p in one] if isinstance(one, tuple) else one.tolist() for one in resumed]
        assert rest == whole[taken:]


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30)
)
def test_interleave_gives_every_example_once_and_seeks(sizes: list[int], cycle: int, block: int, skip: int) -> None:
    def opened(x: Any) -> Any:
        return np.arange(sizes[x]) + 100 * x

    dataset = Dataset.range(len(sizes)).interleave(opened, cycle, block)
    order = listed(dataset)
    assert sorted(order) == [100 * i + j for i, size in enumerate(sizes) for j in range(size)]
    assert listed(dataset.skip(skip)) == order[skip:]
    kinds = Dataset.range(len(sizes)).interleave(lambda x: iter(opened(x)), cycle, block)
    assert listed(kinds.skip(skip)) == order[skip:]


def test_padded_batch() -> None:
    def ragged(x: Any) -> Any:
        return np.full(x, x, np.int32), np.float32(x)

    dataset = Dataset.range(1, 5).map(ragged)
    first, second = list(dataset.padded_batch(2))
    assert first[0].tolist() == [[1, 0], [2, 2]]
    assert second[0].tolist() == [[3, 3, 3, 0], [4, 4, 4, 4]]
    assert second[1].tolist() == [3, 4]
    fixed = dataset.padded_batch(3, padded_shapes=((5,), ()), padding_values=(-1, None), drop_remainder=True)
    (batch,) = fixed
    assert batch[0].shape == (3, 5)
    assert batch[0][0].tolist() == [1, -1, -1, -1, -1]
    assert fixed.element_spec == (ArraySpec((3, 5), np.dtype("int32")), ArraySpec((3,), np.dtype("float32")))
    assert dataset.padded_batch(2).element_spec[0] == ArraySpec((None, None), np.dtype("int32"))
    with pytest.raises(ValueError, match="larger than its padded shape"):
        list(dataset.padded_batch(4, padded_shapes=((3,), ())))
    grows = Dataset.from_iterable([np.array([1], np.int32), np.array([2**40, 2])]).padded_batch(2)
    assert next(iter(grows)).dtype == np.int64
    assert listed(grows) == [[[1, 0], [2**40, 2]]]
    named = Dataset.range(1, 3).map(lambda x: {"b": np.ones(x), "a": np.zeros((x, 2))})
    batch = next(iter(named.padded_batch(2, padded_shapes={"b": (None,), "a": (4, 2)})))
    assert batch["a"].shape == (2, 4, 2)
    assert batch["b"].tolist() == [[1, 0], [1, 1]]


def test_padded_shapes_may_be_ints_and_follow_the_structure_of_the_element() -> None:
    vectors = Dataset.range(1, 4).map(lambda x: np.full(x, x, np.int32))
    assert listed(vectors.padded_batch(3, 4)) == [[[1, 0, 0, 0], [2, 2, 0, 0], [3, 3, 3, 0]]]
    assert listed(vectors.padded_batch(3, np.int64(-1))) == listed(vectors.padded_batch(3, (None,)))
    assert vectors.padded_batch(3, 4).element_spec == ArraySpec((None, 4), np.dtype("int32"))
    pairs = Dataset.zip(vectors, {"b": vectors, "a": vectors.map(lambda x: x[0])})
    first, rest = next(iter(pairs.padded_batch(2, (3, {"b": 5, "a": ()}))))
    assert (first.shape, rest["b"].shape, rest["a"].shape) == ((2, 3), (2, 5), (2,))
    both = Dataset.zip(vectors, vectors)
    # For a pair of vectors these are two shapes; for a matrix they are one.
    assert [part.shape for part in next(iter(both.padded_batch(2, (3, None))))] == [(2, 3), (2, 2)]
    assert [part.shape for part in next(iter(both.padded_batch(2, [3, [4]])))] == [(2, 3), (2, 4)]
    matrices = vectors.map(lambda x: np.outer(x, x))
    assert next(iter(matrices.padded_batch(2, (3, None)))).shape == (2, 3, 2)
    wrong = ((both, 3), (both, (3,)), (vectors, {"a": 3}), (pairs, (3, {"b": 5})), (matrices, ((3,), 3)), (matrices, 3))
    for dataset, shapes in wrong:
        with pytest.raises(ValueError, match=r"padded_batch: expected .*padded"):
            list(dataset.padded_batch(2, shapes))


@pytest.mark.parametrize("batched", [False, True])
def test_map_with_threads_keeps_order_and_bounds_calls(batched: bool) -> None:
    lock = threading.Lock()
    running = most = 0

    def slow(x: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002 if x % 3 else 0.006)  # simulates work: later elements are ready before earlier ones
        with lock:
            running -= 1
        return x * 2

    dataset = Dataset.range(30).map(slow, num_parallel_calls=4)
    got = [row for batch in dataset.batch(8) for row in batch.tolist()] if batched else listed(dataset)
    assert got == [2 * i for i in range(30)]
    assert 2 <= most <= 5


@pytest.mark.parametrize("build", [lambda d: d, lambda d: d.batch(2).unbatch()])
def test_an_error_in_a_thread_comes_after_the_elements_before_it(build: Callable[[Dataset], Dataset]) -> None:
    def fails(x: Any) -> Any:
        if x == 6:
            raise KeyError("lost")
        return x

    iterator = iter(build(Dataset.range(10)).map(fails, num_parallel_calls=3))
    assert [int(next(iterator)) for _ in range(6)] == list(range(6))
    with pytest.raises(KeyError, match="lost"):
        next(iterator)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    "build",
    [
        lambda d, f: d.map(f),
        lambda d, f: d.map(f, num_parallel_calls=3),
        lambda d, f: d.map(f).batch(2).unbatch(),
        lambda d, f: d.interleave(lambda x: Dataset.from_tensors(f(x)), cycle_length=2),
        lambda d, f: d.shuffle(4, seed=1).map(f).cache(),
        lambda d, f: d.map(f).batch(1).map(lambda x: x[0]).cache().repeat(2),
        lambda d, f: d.filter(lambda x: f(x) >= 0),
    ],
)
def test_after_an_error_the_same_element_is_tried_again(
    depth: int, build: Callable[[Dataset, Callable[[Any], Any]], Dataset]
) -> None:
    expected = listed(build(Dataset.range(10), lambda x: x))
    failures = [KeyboardInterrupt("now"), OSError(5, "lost")]

    def fails_twice(x: Any) -> Any:
        if x == 6 and failures:
            raise failures.pop()
        return x

    iterator = iter(build(Dataset.range(10), fails_twice).prefetch(depth))
    found: list[int] = []
    positions: list[int] = []
    while len(found) < len(expected):
        try:
            found.append(int(next(iterator)))
        except (OSError, KeyboardInterrupt):
            positions.append(iterator.state()["batch"] - len(found))
    assert found == expected
    assert positions == [0, 0]
    assert failures == []
    assert list(iterator) == []


def test_cache_reads_once_and_what_the_user_does_to_an_element_does_not_reach_it() -> None:
    calls: list[int] = []

    def remember(x: Any) -> Any:
        calls.append(int(x))
        return np.array([x])

    for dataset in (Dataset.range(6).map(remember), numbers(6, indexable=False).map(remember)):
        calls.clear()
        cached = dataset.cache()
        for _ in range(3):
            for batch in cached.batch(4):
                batch[...] = -1
            for one in cached:
                one[...] = -1
        assert sorted(calls) == list(range(6))
        assert listed(cached) == [[i] for i in range(6)]
    partly = Dataset.range(6).map(remember).cache()
    calls.clear()
    assert listed(partly.skip(4)) == [[4], [5]]
    assert calls == [4, 5]
    once = Dataset.range(20).shuffle(20).cache()
    assert listed(once) == listed(once)


def test_a_cache_keeps_an_order_for_each_rank_that_shuffles_by_itself() -> None:
    """As under the policies OFF and DATA, one after another, in one process."""
    shuffled = numbers(20, indexable=False).shuffle(20)
    cached = shuffled.cache()

    def read(dataset: Dataset, salt: int) -> list[int]:
        return [int(x) for x in dataset.pipeline.iterate(Epoch((0,), salt), 0, dataset.pipeline.read)]

    for salt in (1, 0, 2, 1):
        assert read(cached, salt) == read(shuffled, salt)
    assert read(cached, 1) != read(cached, 0) != read(cached, 2)


def test_from_indexable_makes_only_what_is_asked_for() -> None:
    made: list[int] = []

    class Squares:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, number: int) -> Any:
            made.append(number)
            return {"x": np.full(2, number), "y": number * number}

    dataset = Dataset.from_indexable(Squares()).shuffle(20, seed=1).batch(4).skip(3).take(1)
    (batch,) = dataset
    assert sorted(made) == sorted(batch["x"][:, 0].tolist())
    assert (batch["y"] == batch["x"][:, 0] ** 2).all()


def test_torch_loaders_and_datasets() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    batches = list(Dataset.from_iterable(loader, batched=True))
    assert [y.tolist() for _, y in batches] == [[0, 1], [2, 3], [4]]
    assert batches[0][0].dtype == np.float32
    x, y = next(iter(Dataset.from_indexable(data).batch(5)))
    assert x.shape == (5, 2)
    assert y.tolist() == [0, 1, 2, 3, 4]


def test_grain_datasets() -> None:
    grain = pytest.importorskip("grain.python")
    source = grain.MapDataset.source(np.arange(10)).map(lambda x: x * 3)
    assert listed(Dataset.from_indexable(source).shard(2, 1).batch(5)) == [[3, 9, 15, 21, 27]]
    assert listed(Dataset.from_iterable(source.to_iter_dataset()).batch(10)) == [[3 * i for i in range(10)]]
    loader = grain.DataLoader(
        data_source=np.arange(6), sampler=grain.IndexSampler(6, num_epochs=1, shard_options=grain.NoSharding())
    )
    assert listed(Dataset.from_iterable(loader).batch(4)) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Dataset.range(3).unbatch(), ValueError, r"unbatch: .* got the shape \(\) for"),
        (lambda: list(Dataset.range(3).map(abs).unbatch()), ValueError, r"unbatch: .* got the shape \(\) for"),
        (lambda: list(Dataset.range(3).window(2).unbatch()), ValueError, "unbatch: .* got a dataset for the element"),
        (
            lambda: Dataset.from_tensor_slices((np.ones((2, 3)), np.ones((2, 2)))).rebatch(2), ValueError,
            r"rebatch: .* got the shape \(3,\) for \[0\], the shape \(2,\) for \[1\]",
        ),
        (lambda: Dataset.zip(Dataset.range(3), not_right), TypeError, "expected datasets"),
        (lambda: Dataset.zip({"a": Dataset.range(3), "b": 1}), TypeError, r"got 1 of type int at \['b'\]"),
        (Dataset.zip, TypeError, "expected datasets"),
        (lambda: Dataset.zip(Dataset.range(3), datasets=Dataset.range(3)), TypeError, "not both"),
        (lambda: Dataset.range(3).enumerate("0"), TypeError, "`start` must be an integer"),  # type: ignore[arg-type]
        (lambda: Dataset.range(3).concatenate(not_right), TypeError, "expected a dataset"),
        (lambda: Dataset.range(3).concatenate(Dataset.range(3).batch(2)), ValueError, "batches"),
        (lambda: Dataset.range(3).interleave(lambda x: x, cycle_length=0), ValueError, "cycle_length"),
        (lambda: Dataset.range(3).interleave(not_right), TypeError, "interleave: expected a function"),
        (lambda: Dataset.range(3).flat_map(not_right), TypeError, "flat_map: expected a function"),
        (lambda: Dataset.range(3).filter(not_right), TypeError, "filter: expected a function"),
        (lambda: Dataset.range(3).take_while(not_right), TypeError, "take_while: expected a function"),
        (lambda: Dataset.range(3).scan(0, not_right), TypeError, "scan: expected a function"),
        (lambda: list(Dataset.range(3).scan(0, lambda s, x: x)), TypeError, "to return a pair"),
        (lambda: list(Dataset.range(3).scan(0, lambda s, x: ((s, x), x))), TypeError, "structure of `initial_state`"),
        (lambda: Dataset.range(3).map(abs, num_parallel_calls=0), ValueError, "num_parallel_calls"),
        (lambda: Dataset.range(3).map(abs, deterministic=not_right), TypeError, "map: `deterministic` must be True"),
        (lambda: Dataset.range(3).batch(2, num_parallel_calls=-2), ValueError, "batch: `num_parallel_calls`"),
        (lambda: Dataset.range(3).batch(2, deterministic=not_right), TypeError, "batch: `deterministic`"),
        (lambda: Dataset.range(3).interleave(abs, num_parallel_calls=0), ValueError, "interleave: `num"),
        (lambda: Dataset.range(3).map(abs, num_parallel_calls=AUTOTUNE).shard(2, 5), ValueError, "index"),
        (lambda: Dataset.from_indexable(iter([1])), TypeError, "__getitem__"),
        (lambda: Dataset.range(3).shared(), ValueError, "dataset of arrays"),
        (lambda: Dataset.range(3).rebatch(2), ValueError, r"rebatch: .* got the shape \(\) for"),
        (lambda: Dataset.range(3).batch(2).rebatch([2, 0]), ValueError, "rebatch: `batch_size` must be an"),
        (lambda: Dataset.range(3).batch(2).rebatch([]), ValueError, "got an empty list"),
        (lambda: Dataset.range(3).batch(2).rebatch(not_right), TypeError, "rebatch: `batch_size` must be an integer"),
        (lambda: Dataset.range(3).window(0), ValueError, "window: `size` must be an integer of at least 1, got 0"),
        (lambda: Dataset.range(3).window(1, shift=-1), ValueError, "window: `shift` must be an integer of at least 1"),
        (lambda: Dataset.range(3).window(1, stride=not_right), TypeError, "window: `stride` must be an integer"),
        (lambda: list(Dataset.range(3).window(1).batch(2)), TypeError, "got 2 windows, which are datasets"),
        (lambda: list(Dataset.range(3).window(1).unique()), TypeError, "unique: expected elements that are arrays"),
        (lambda: Dataset.range(3).apply(not_right), TypeError, "apply: expected a function"),
        (lambda: Dataset.range(3).apply(lambda d: 3), TypeError, "to return a dataset, got 3"),  # type: ignore[arg-type, return-value]
        (lambda: Dataset.range(3).reduce(0, not_right), TypeError, "reduce: expected a function"),
        (lambda: Dataset.range(3).repeat().reduce(0, max), ValueError, "reduce: expected a dataset that ends"),
        (lambda: Dataset.range(3).reduce(0, lambda s, x: (s, x)), TypeError, "reduce: the function must return"),
    ],
)
def test_errors_say_what_was_expected(build: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


def test_shuffles_without_a_seed_inside_interleave_resume_and_differ() -> None:
    def build() -> Dataset:
        return Dataset.range(3).interleave(lambda x: Dataset.range(8).shuffle(8).map(lambda y: 8 * x + y))

    dataset = build()
    first, second = listed(dataset), listed(dataset)
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert listed(build()) != listed(build())
    orders = {tuple(row - 8 * k for row in first[8 * k : 8 * k + 8]) for k in range(3)}
    assert len(orders) == 3
    iterator = iter(dataset)
    head = [int(next(iterator)) for _ in range(11)]
    resumed = iter(build())
    resumed.load_state(iterator.state())
    rest = [int(row) for row in resumed]
    assert sorted(head + rest) == list(range(24))
    assert rest == [int(row) for row in iterator]


def test_the_order_inside_interleave_stays_where_it_is_asked_to() -> None:
    fixed = Dataset.range(3).interleave(lambda x: Dataset.range(20).shuffle(20, reshuffle_each_iteration=False))
    first, second = listed(fixed), listed(fixed)
    assert first == second
    assert first[:20] != first[20:40]
    parts = listed(fixed.take(25)) + listed(fixed.skip(25))
    assert parts == first


def test_two_shuffles_inside_interleave_are_independent_and_one_is_itself() -> None:
    def opened(_: Any) -> Dataset:
        one = Dataset.range(30).shuffle(30)
        return Dataset.zip(one, one, Dataset.range(30).shuffle(30))

    rows = listed(Dataset.range(1).interleave(opened))
    assert all(a == b for a, b, _ in rows)
    assert any(a != c for a, _, c in rows)


def test_positions_from_before_inner_seeds_can_be_loaded() -> None:
    iterator = iter(Dataset.range(4).shuffle(4, seed=1).interleave(np.arange).shuffle(3))
    assert set(iterator.state()) == {"iteration", "batch", "seed_1", "inner_seed_0"}
    iterator.load_state({"iteration": 1, "batch": 2, "seed_1": 5})
    assert len(list(iterator)) == 4
    with pytest.raises(ValueError, match="does not fit"):
        iterator.load_state({"iteration": 1, "batch": 2, "inner_seed_0": 5})


class _Stops:
    """Eight numbers, of which one cannot be given."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        if number == 2:
            raise StopIteration
        return np.int64(number)


def _stops(x: Any) -> Any:
    return next(iter(())) if x == 2 else x


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(8).map(_stops),
        lambda: Dataset.range(8).map(_stops, num_parallel_calls=2),
        lambda: Dataset.range(8).map(_stops).batch(4),
        lambda: Dataset.range(8).batch(1).map(lambda x: _stops(x[0])),
        lambda: Dataset.range(8).filter(lambda x: _stops(x) >= 0),
        lambda: Dataset.range(8).take_while(lambda x: _stops(x) >= 0),
        lambda: Dataset.range(8).scan(np.int64(0), lambda total, x: (total, _stops(x))),
        lambda: Dataset.range(8).interleave(lambda x: Dataset.from_tensors(_stops(x))),
        lambda: Dataset.from_indexable(_Stops()),
        lambda: Dataset.from_indexable(_Stops()).batch(4),
    ],
)
def test_a_stop_of_a_users_function_is_no_end_of_the_data(make: Callable[[], Dataset]) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(make())


@pytest.mark.parametrize("seed", range(6))
def test_a_finite_repetition_goes_on_behind_an_empty_pass(seed: int) -> None:
    read: list[int] = []

    def is_small(x: Any) -> Any:
        read.append(int(x))
        return x < 5

    repeated = Dataset.range(10).shuffle(10, seed=seed).take(1).filter(is_small).repeat(8)
    kept = [int(x) for x in repeated]
    assert max(read) >= 5, "no pass was empty"
    assert kept == [x for x in read if x < 5]
    assert len(read) == 8
    iterator = iter(repeated)
    next(iterator)
    resumed = iter(repeated)
    resumed.load_state(iterator.state())
    assert [int(x) for x in resumed] == [int(x) for x in iterator]


def test_an_endless_repetition_of_nothing_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="got no element in a pass"):
        list(Dataset.range(3).filter(lambda x: x > 3).repeat())


@pytest.mark.parametrize("first", [1, 2, 3, 5])
def test_parts_of_different_dtypes_make_no_batch(first: int) -> None:
    halves = Dataset.from_tensor_slices(np.arange(3, dtype="float32") + 0.5)
    with pytest.raises(ValueError, match=r"the same shape and dtype, got .* float32 and .* int64"):
        list(Dataset.range(first).concatenate(halves).batch(first + 2))
