"""Distributed datasets: every example exactly once, the same number of steps, and the same errors on every rank."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import pytest

from mpidist import context
from mpidist.comm.arithmetic.slices import even_sizes
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data import INFINITE, SHARD_HINT, UNKNOWN, ArraySpec, AutoShardPolicy, Dataset, Options, read_npy
from mpidist.data.distribution.distributed_dataset import DistributedDataset, distribute_datasets_from_function
from mpidist.data.distribution.distributed_iterator import DistributedIterator
from mpidist.data.input_context import InputContext
from mpidist.data.items.sharding import even_slice
from mpidist.errors import MismatchError, is_shared
from mpidist.options import InputOptions

pytestmark = pytest.mark.mpi


class Counting:
    """A communicator that counts its collectives."""

    def __init__(self, communicator: Communicator) -> None:
        self.calls = 0
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._communicator, name)
        if name in ("all_gather_object", "all_reduce_max", "broadcast_object", "barrier"):
            self.calls += 1
        return value


def by_rank(communicator: Communicator, batches: list[Any]) -> list[list[Any]]:
    """Step by step, each rank's rows."""
    gathered = communicator.all_gather_object([batch.tolist() for batch in batches])
    return [list(step) for step in zip(*gathered, strict=True)]


def joined(lists: list[list[Any]]) -> list[Any]:
    return list(itertools.chain(*lists))


def policy(name: str) -> Options:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return options


# Batches whose size nobody knows before they are read.
LOADED = Dataset.from_iterable([np.arange(4)], batched=True)


@pytest.mark.parametrize("auto", ["AUTO", "DATA"])
@pytest.mark.parametrize("size", [1, 2, 6, 8, 10])
@pytest.mark.parametrize("indexable", [True, False])
def test_each_rank_gets_its_contiguous_piece_of_every_global_batch(
    communicator: Communicator, auto: str, size: int, indexable: bool
) -> None:
    numbers = Dataset.range(14) if indexable else Dataset.from_iterable(lambda: iter(np.arange(14)))
    dataset = numbers.batch(size).with_options(policy(auto))
    steps = by_rank(communicator, list(DistributedDataset(dataset, communicator)))
    whole = [batch.tolist() for batch in dataset]
    assert [joined(step) for step in steps] == whole
    n = communicator.size
    assert [list(map(len, step)) for step in steps] == [even_sizes(len(batch), n) for batch in whole]


def test_empty_batches_keep_dtypes_and_other_dimensions(communicator: Communicator) -> None:
    data = (np.zeros((2, 3, 5), np.float16), {"labels": np.zeros(2, np.uint8)})
    images, rest = next(iter(DistributedDataset(Dataset.from_tensor_slices(data).batch(2), communicator)))
    rows = even_sizes(2, communicator.size)[communicator.rank]
    assert images.shape == (rows, 3, 5)
    assert images.dtype == np.float16
    assert rest["labels"].shape == (rows,)
    assert rest["labels"].dtype == np.uint8


def test_known_equal_lengths_need_no_communication(communicator: Communicator) -> None:
    counting = Counting(communicator)
    dataset = Dataset.range(50).shuffle(50).repeat(2).batch(8)
    distributed = DistributedDataset(dataset, cast(Communicator, counting))
    assert counting.calls <= 2
    before = counting.calls
    assert len(list(distributed)) == len(list(distributed)) == 13
    assert counting.calls == before


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("buffer_size", [4, 100])
def test_all_ranks_shuffle_alike_and_anew_in_each_pass(
    communicator: Communicator, seed: int | None, buffer_size: int
) -> None:
    distributed = DistributedDataset(Dataset.range(40).shuffle(buffer_size, seed).batch(7), communicator)
    passes = [[row for step in by_rank(communicator, list(distributed)) for row in joined(step)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(40))
    assert passes[0] != passes[1]
    assert len(set(communicator.all_gather_object(tuple(passes[0])))) == 1


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("indexable", [True, False])
@pytest.mark.parametrize("depth", [0, 3])
def test_another_number_of_ranks_resumes_without_loss_or_repetition(
    communicator: Communicator, seed: int | None, indexable: bool, depth: int
) -> None:
    def build() -> Dataset:
        numbers = Dataset.range(45) if indexable else Dataset.from_iterable(lambda: iter(np.arange(45)))
        return numbers.shuffle(20, seed).map(lambda x: x * 3).batch(6).repeat(2)

    options = InputOptions(experimental_per_replica_buffer_size=depth)
    distributed = DistributedDataset(build(), communicator, options=options)
    for _ in distributed:
        pass
    iterator = iter(distributed)
    head = by_rank(communicator, [next(iterator) for _ in range(3)])
    state = iterator.state()
    assert len(set(communicator.all_gather_object(tuple(sorted(state.items()))))) == 1
    assert state["iteration"] == 1
    assert state["batch"] == 3
    resumed = iter(DistributedDataset(build(), SoloCommunicator()))
    resumed.load_state(state)
    rest = [row for batch in resumed for row in batch.tolist()]
    seen = [row for step in head for row in joined(step)] + rest
    assert sorted(seen) == sorted([3 * i for i in range(45)] * 2)
    continued = by_rank(communicator, list(iterator))
    assert [row for step in continued for row in joined(step)] == rest
    back = iter(distributed)
    back.load_state(state)
    assert by_rank(communicator, list(back)) == continued
    assert iter(distributed).state()["iteration"] == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_pass_after_two_that_are_resumed_is_the_third(communicator: Communicator, order: tuple[int, int]) -> None:
    """In whichever order a checkpoint loads the two: behind the first one alone the second would come again."""

    def begin(ranks: Communicator) -> tuple[DistributedDataset, list[DistributedIterator]]:
        distributed = DistributedDataset(Dataset.range(40).shuffle(40, seed=1).batch(40), ranks)
        return distributed, [iter(distributed), iter(distributed)]

    def passes(ranks: Communicator, distributed: DistributedDataset, begun: list[DistributedIterator]) -> list[Any]:
        return [joined(by_rank(ranks, list(batches))[0]) for batches in (*begun, iter(distributed))]

    distributed, begun = begin(communicator)
    states = [iterator.state() for iterator in begun]
    expected = passes(communicator, distributed, begun)
    assert len(set(map(tuple, expected))) == 3
    for ranks in (communicator, SoloCommunicator()):
        distributed, begun = begin(ranks)
        for number in order:
            begun[number].load_state(states[number])
        assert passes(ranks, distributed, begun) == expected


def test_another_number_of_ranks_resumes_with_another_batch_size(communicator: Communicator) -> None:
    def build(size: int) -> Dataset:
        return Dataset.range(50).shuffle(50).batch(size).map(lambda x: x)

    n = communicator.size
    iterator = iter(DistributedDataset(build(4 * n), communicator))
    seen = [row for step in by_rank(communicator, [next(iterator), next(iterator)]) for row in joined(step)]
    state = iterator.state()
    alone = iter(DistributedDataset(build(4), SoloCommunicator()))
    alone.load_state(state)
    rest = [row for batch in alone for row in batch.tolist()]
    assert sorted(seen + rest) == list(range(50))
    with pytest.raises(ValueError, match=rf"is 2 batches of {4 * n} examples, which this dataset with batches of 17"):
        iter(DistributedDataset(build(17), communicator)).load_state(state)
    with pytest.raises(ValueError, match=r"make no step but map and prefetch after `batch`"):
        iter(DistributedDataset(build(4 * n + 4).repeat(2), communicator)).load_state(state)
    # At the end of the pass, and from before sizes were saved.
    at_end = iter(DistributedDataset(build(7), communicator))
    at_end.load_state({**state, "batch": -(-50 // (4 * n))})
    assert list(at_end) == []
    del state["batch_size"]
    older = iter(DistributedDataset(build(4 * n), communicator))
    older.load_state(state)
    assert by_rank(communicator, list(older)) == by_rank(communicator, list(iterator))


def test_a_rank_reads_only_its_rows(communicator: Communicator) -> None:
    read: list[int] = []

    class Lazy:
        shape = (32,)
        dtype = np.dtype(np.int64)

        def __getitem__(self, index: Any) -> Any:
            rows = np.arange(32)[index]
            read.extend(np.atleast_1d(rows).tolist())
            return rows

    mapped = []

    def remember(x: Any) -> Any:
        mapped.append(int(x))
        return x

    dataset = Dataset.from_tensor_slices(Lazy()).shuffle(32, seed=0).map(remember).batch(8).skip(1).repeat(1)
    mine = [row for batch in DistributedDataset(dataset, communicator) for row in batch.tolist()]
    assert sorted(read) == sorted(mapped) == sorted(mine)
    everyone = joined(communicator.all_gather_object(read))
    assert len(everyone) == len(set(everyone)) == 24


def test_hdf5_is_read_in_the_prefetching_thread(communicator: Communicator) -> None:
    data = np.random.default_rng(0).random((37, 3))
    with h5py.File("only in memory", "w", driver="core", backing_store=False) as file:
        file["x"], file["row"] = data, np.arange(37)
        dataset = Dataset.from_tensor_slices((file["x"], file["row"])).shuffle(37, seed=1).batch(10)
        batches = list(DistributedDataset(dataset, communicator))
    assert all(np.array_equal(x, data[row]) for x, row in batches)
    steps = by_rank(communicator, [row for _, row in batches])
    assert sorted(row for step in steps for row in joined(step)) == list(range(37))


def test_a_rank_without_texts_gets_an_empty_batch(communicator: Communicator) -> None:
    with h5py.File("only in memory", "w", driver="core", backing_store=False) as file:
        file["x"] = ["a", "bb", "c"]
        batches = list(DistributedDataset(Dataset.from_tensor_slices(file["x"]).batch(2), communicator))
    steps = by_rank(communicator, batches)
    assert [joined(step) for step in steps] == [[b"a", b"bb"], [b"c"]]
    assert {batch.dtype for batch in batches} == {np.dtype(object)}


def test_what_is_no_dataset_is_said_once(communicator: Communicator) -> None:
    wrong: Any = None
    with pytest.raises(TypeError, match=r"^experimental_distribute_dataset: expected a mpidist"):
        DistributedDataset(wrong, communicator)


def test_a_map_after_batch_sees_the_global_batch(communicator: Communicator) -> None:
    dataset = Dataset.range(10).batch(4).map(lambda x: x - x.sum())
    steps = by_rank(communicator, list(DistributedDataset(dataset, communicator)))
    assert [joined(step) for step in steps] == [batch.tolist() for batch in dataset]


def test_batches_of_a_loader_are_shared_out(communicator: Communicator) -> None:
    dataset = Dataset.from_iterable([[np.arange(5), np.ones(5)], [np.arange(2), np.ones(2)]], batched=True)
    batches = list(DistributedDataset(dataset, communicator))
    steps = by_rank(communicator, [x for x, _ in batches])
    assert [joined(step) for step in steps] == [[0, 1, 2, 3, 4], [0, 1]]


@pytest.mark.parametrize("mapped", [False, True])
def test_off_gives_every_rank_all_data_in_smaller_batches(communicator: Communicator, mapped: bool) -> None:
    n = communicator.size
    dataset = Dataset.range(14).batch(2 * n).with_options(policy("OFF"))
    expected = [list(range(14))[i : i + 2] for i in range(0, 14, 2)]
    if mapped:
        dataset = dataset.map(lambda x: x + 1)
        expected = [[x + 1 for x in batch] for batch in expected]
    assert [batch.tolist() for batch in DistributedDataset(dataset, communicator)] == expected


def test_off_with_an_uneven_batch_size_steps_together(communicator: Communicator) -> None:
    n = communicator.size
    dataset = Dataset.range(5 * n + 3).batch(n + 1).with_options(policy("OFF"))
    steps = by_rank(communicator, list(DistributedDataset(dataset, communicator)))
    for rank in range(n):
        assert joined([step[rank] for step in steps]) == list(range(5 * n + 3))
    assert all(len(joined(step)) == n + 1 for step in steps[:4])


def test_off_shuffles_differently_on_each_rank_without_a_seed(communicator: Communicator) -> None:
    n = communicator.size
    dataset = Dataset.range(100).shuffle(100).batch(n).with_options(policy("OFF"))
    mine = [row for batch in DistributedDataset(dataset, communicator) for row in batch.tolist()]
    assert sorted(mine) == list(range(100))
    assert len(set(communicator.all_gather_object(tuple(mine)))) == n


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("first", [0, 2])
def test_uneven_lengths_end_together_with_empty_batches(communicator: Communicator, known: bool, first: int) -> None:
    def dataset_fn(place: InputContext) -> Dataset:
        assert place == InputContext(communicator.size, communicator.rank, communicator.size)
        rows = 2 * (place.input_pipeline_id + first)
        data = (np.full((rows, 2), place.input_pipeline_id), np.arange(rows, dtype=np.float32))
        if known:
            return Dataset.from_tensor_slices(data).batch(2)
        return Dataset.from_iterable(lambda: iter([(data[0][i], data[1][i]) for i in range(rows)])).batch(2)

    n = communicator.size
    if first == 0 and n == 1:
        return
    distributed = distribute_datasets_from_function(dataset_fn, communicator)
    assert distributed.cardinality == (n - 1 + first if known else UNKNOWN)
    for _ in range(2):
        batches = list(distributed)
        assert len(batches) == n - 1 + first
        assert sum(len(x) for x, _ in batches) == 2 * (communicator.rank + first)
        assert all(x.shape[1:] == (2,) and y.dtype == np.float32 for x, y in batches)


def test_uneven_lengths_resume(communicator: Communicator) -> None:
    def dataset_fn(place: InputContext) -> Dataset:
        return Dataset.range(3 * place.input_pipeline_id + 2).batch(1)

    distributed = distribute_datasets_from_function(dataset_fn, communicator)
    whole = by_rank(communicator, list(distributed))
    iterator = iter(distributed)
    iterator.load_state({"iteration": 4, "batch": 2})
    assert by_rank(communicator, list(iterator)) == whole[2:]


def test_uneven_lengths_resume_where_some_ranks_have_read_before(communicator: Communicator) -> None:
    def dataset_fn(place: InputContext) -> Dataset:
        return Dataset.range(3 * place.input_pipeline_id + 2).batch(1)

    distributed = distribute_datasets_from_function(dataset_fn, communicator)
    whole = by_rank(communicator, list(distributed))
    used, new = iter(distributed), iter(distributed)
    next(used)
    iterator = used if communicator.rank == 0 else new
    iterator.load_state({"iteration": 4, "batch": 1})
    assert by_rank(communicator, list(iterator)) == whole[1:]


@pytest.mark.parametrize("indexable", [True, False])
@pytest.mark.parametrize("name", ["DATA", "OFF"])
def test_a_position_is_loaded_into_an_exhausted_iterator(
    communicator: Communicator, name: str, indexable: bool
) -> None:
    numbers = Dataset.range(9) if indexable else Dataset.from_iterable(lambda: iter(np.arange(9)))
    iterator = iter(DistributedDataset(numbers.batch(2).with_options(policy(name)), communicator))
    next(iterator)
    state = iterator.state()
    whole = by_rank(communicator, list(iterator))
    assert list(iterator) == []
    for _ in range(2):
        iterator.load_state(state)
        assert by_rank(communicator, list(iterator)) == whole


def test_infinite_and_finite_lengths_go_on_for_ever(communicator: Communicator) -> None:
    def dataset_fn(place: InputContext) -> Dataset:
        dataset = Dataset.range(2).batch(2)
        return dataset.repeat() if place.input_pipeline_id == 0 else dataset

    distributed = distribute_datasets_from_function(dataset_fn, communicator)
    iterator = iter(distributed)
    batches = [next(iterator).tolist() for _ in range(4)]
    assert distributed.cardinality == INFINITE
    assert batches == ([[0, 1]] * 4 if communicator.rank == 0 else [[0, 1], [], [], []])


@pytest.mark.parametrize("known", [True, False])
def test_unbatched_datasets_of_different_lengths_are_an_error_on_every_rank(
    communicator: Communicator, known: bool
) -> None:
    if communicator.size == 1:
        return

    def dataset_fn(place: InputContext) -> Dataset:
        count = place.input_pipeline_id + 1
        return Dataset.range(count) if known else Dataset.from_iterable(lambda: iter(range(count)))

    with pytest.raises(ValueError, match="Call `batch` in `dataset_fn`") as caught:
        list(distribute_datasets_from_function(dataset_fn, communicator))
    assert is_shared(caught.value)


def test_unbatched_datasets_of_one_length_pass(communicator: Communicator) -> None:
    distributed = distribute_datasets_from_function(lambda place: Dataset.range(4).take(3), communicator)
    assert list(distributed) == [0, 1, 2]
    distributed = distribute_datasets_from_function(lambda _: Dataset.from_iterable(lambda: iter("ab")), communicator)
    assert [str(element) for element in distributed] == ["a", "b"]


def batches_of(*counts: int) -> Iterator[tuple[Any, Any]]:
    """Batches that a generator has made itself, numbered through."""
    begin = 0
    for count in counts:
        yield np.arange(begin, begin + count), np.full((count, 2), float(begin))
        begin += count


UNBATCHED: dict[str, Any] = {
    "iterable": Dataset.from_iterable,
    "generator": lambda f: Dataset.from_generator(f, output_types=(np.int64, np.float32)),
    "mapped": lambda f: Dataset.from_iterable(f).map(lambda x, y: (x, y)),
    "filtered": lambda f: Dataset.from_iterable(f).filter(lambda x, y: True),
    "kept": lambda f: Dataset.from_iterable(f).cache(),
    "joined": lambda f: Dataset.from_iterable(f).take(2).concatenate(Dataset.from_generator(f).skip(2)),
    "sampled": lambda f: Dataset.sample_from_datasets([Dataset.from_iterable(f)]),
    "zipped": lambda f: Dataset.zip(
        Dataset.from_iterable(f).map(lambda x, y: x), Dataset.from_iterable(f).map(lambda x, y: y)
    ),
}


@pytest.mark.parametrize("kind", UNBATCHED)
def test_elements_of_an_unbatched_generator_are_global_batches(communicator: Communicator, kind: str) -> None:
    counts = (7, 1, 0, 4)
    distributed = DistributedDataset(UNBATCHED[kind](lambda: batches_of(*counts)), communicator)
    assert [spec.shape for spec in distributed.element_spec] == [(None,), (None, 2)]
    for _ in range(2):
        given = list(distributed)
        assert all(x.dtype == np.int64 and y.shape == (len(x), 2) for x, y in given)
        steps = by_rank(communicator, [x for x, _ in given])
        assert [joined(step) for step in steps] == [x.tolist() for x, _ in batches_of(*counts)]
        assert all(max(sizes) - min(sizes) <= 1 for sizes in ([len(piece) for piece in step] for step in steps))


def test_batches_of_a_generator_beside_batches_are_cut_alike(communicator: Communicator) -> None:
    labels = Dataset.from_generator(lambda: (np.arange(k, min(k + 4, 10)) for k in range(0, 10, 4)))
    rates = Dataset.from_iterable([0.5, 0.25, 0.125])
    given = list(DistributedDataset(Dataset.zip((Dataset.range(10).batch(4), labels, rates)), communicator))
    assert all(x.tolist() == y.tolist() for x, y, _ in given)
    assert [float(rate) for *_, rate in given] == [0.5, 0.25, 0.125]
    steps = [joined(step) for step in by_rank(communicator, [x for x, *_ in given])]
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("is_endless", [False, True])
def test_an_unbatched_generator_of_examples_wants_a_batch_on_any_number_of_ranks(
    communicator: Communicator, is_endless: bool
) -> None:
    examples = Dataset.from_iterable(lambda: ((np.zeros(28), label) for label in range(5)))
    distributed = DistributedDataset(examples.repeat() if is_endless else examples, communicator)
    with pytest.raises(ValueError, match=r"the shape \(28,\) for \[0\], the shape \(\) for \[1\]\. Call the `batch`"):
        next(iter(distributed))
    columns = (examples.map(lambda x, y: x), examples.map(lambda x, y: y))
    with pytest.raises(ValueError, match=r"the shape \(28,\) for \[0\], the shape \(\) for \[1\]"):
        next(iter(DistributedDataset(Dataset.zip(columns), communicator)))
    with pytest.raises(ValueError, match=r"got one without\. Call the `batch` method"):
        DistributedDataset(Dataset.from_iterable(batches_of, batched=False), communicator)
    # What a generator gives is read in the passes only.
    once = iter(batches_of(4, 4))
    seen = [x for x, _ in DistributedDataset(Dataset.from_generator(lambda: once), communicator)]
    assert [joined(step) for step in by_rank(communicator, seen)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_position_in_an_unbatched_generator_is_found_again(communicator: Communicator) -> None:
    distributed = DistributedDataset(Dataset.from_iterable(lambda: batches_of(5, 3, 4, 2)), communicator)
    iterator = iter(distributed)
    next(iterator)
    state = iterator.state()
    left = [x.tolist() for x, _ in iterator]
    iterator.load_state(state)
    assert [x.tolist() for x, _ in iterator] == left


def test_ready_batches_of_generators_of_different_lengths_end_together(communicator: Communicator) -> None:
    def dataset_fn(place: InputContext) -> Dataset:
        return Dataset.from_generator(lambda: batches_of(*range(1, place.input_pipeline_id + 2)))

    given = list(distribute_datasets_from_function(dataset_fn, communicator))
    own = communicator.rank + 1
    assert [len(x) for x, _ in given] == [*range(1, own + 1), *[0] * (communicator.size - own)]
    assert all(y.shape == (len(x), 2) for x, y in given)


def test_a_read_that_fails_on_one_rank_fails_on_all_where_a_flag_is_exchanged(communicator: Communicator) -> None:
    last = communicator.size - 1

    def elements() -> Iterator[int]:
        yield 1
        if communicator.rank == last:
            raise OSError(5, "disk lost")
        yield 2

    iterator = iter(DistributedDataset(Dataset.from_iterable(elements).batch(1), communicator))
    next(iterator)
    with pytest.raises(OSError, match="disk lost"):
        next(iterator)


@pytest.mark.parametrize("shorter", [0, 3])
@pytest.mark.parametrize("name", ["AUTO", "DATA"])
def test_an_iterable_that_is_shorter_on_one_rank_is_an_error_on_every_rank(
    communicator: Communicator, name: str, shorter: int
) -> None:
    if communicator.size == 1:
        return
    count = shorter if communicator.rank == communicator.size - 1 else 6
    dataset = Dataset.from_iterable(range(count)).batch(2).with_options(policy(name))
    iterator = iter(DistributedDataset(dataset, communicator))
    batches = -(-shorter // 2)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"rank {communicator.size - 1} .*ended here after {batches} batches"):
            list(iterator)


def test_a_dataset_as_an_iterable_keeps_its_order_on_all_ranks_and_after_a_resume(communicator: Communicator) -> None:
    def build() -> Dataset:
        return Dataset.from_iterable(Dataset.range(24).shuffle(24)).shuffle(3).batch(4)

    distributed = DistributedDataset(build(), communicator)
    assert sorted(row for step in by_rank(communicator, list(distributed)) for row in joined(step)) == list(range(24))
    iterator = iter(distributed)
    seen = [next(iterator), next(iterator)]
    again = iter(DistributedDataset(build(), communicator))
    again.load_state(iterator.state())
    seen += list(again)
    assert sorted(row for step in by_rank(communicator, seen) for row in joined(step)) == list(range(24))


@pytest.mark.parametrize("depth", [0, 2])
def test_after_an_error_on_one_rank_all_try_the_same_batch_again(communicator: Communicator, depth: int) -> None:
    rank, n = communicator.rank, communicator.size
    failures = [OSError(5, "disk lost")] if rank == n - 1 else []

    def fails_once(x: Any) -> Any:
        if x >= 3 * n and failures:
            raise failures.pop()
        return x

    # Of unknown length: all ranks know of the error.
    dataset = Dataset.range(8 * n).filter(lambda x: True).map(fails_once).batch(n).prefetch(depth)
    iterator = iter(DistributedDataset(dataset, communicator))
    found = [next(iterator) for _ in range(3)]
    with pytest.raises(OSError, match="disk lost"):
        next(iterator)
    assert iterator.state() == {"iteration": 0, "batch": 3, "batch_size": communicator.size}
    found += list(iterator)
    assert [row for step in by_rank(communicator, found) for row in joined(step)] == list(range(8 * n))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Dataset.range(3), r"expected a function that makes a dataset.*of type Dataset\. Give a dataset to exp"),
        (lambda _: np.arange(1000), r"expected a mpidist\.data\.Dataset, got an array of shape \(1000,\) and"),
    ],
)
def test_what_is_no_input_function_on_one_rank_is_an_error_on_every_rank(
    communicator: Communicator, given: Any, words: str
) -> None:
    mine = given if communicator.rank == communicator.size - 1 else lambda _: Dataset.range(3)
    with pytest.raises(TypeError, match=rf"distribute_datasets_from_function: .*{words}"):
        distribute_datasets_from_function(mine, communicator)


def test_an_array_on_one_rank_is_an_error_on_every_rank_and_is_not_printed(communicator: Communicator) -> None:
    is_last = communicator.rank == communicator.size - 1
    given: Any = np.arange(1000) if is_last else Dataset.range(3).batch(1)
    with pytest.raises(TypeError, match=r"got an array of shape \(1000,\) and dtype int64, of type ndarray\. Make one"):
        DistributedDataset(given, communicator)
    options: Any = {"experimental_per_replica_buffer_size": 2}
    with pytest.raises(TypeError, match=r"`options` must be mpidist\.InputOptions or None, got .* of type dict"):
        DistributedDataset(Dataset.range(3).batch(1), communicator, options=options)


def test_dataset_fn_that_fails_on_one_rank_fails_on_all(communicator: Communicator) -> None:
    def dataset_fn(place: InputContext) -> Dataset:
        if place.input_pipeline_id == communicator.size - 1:
            raise FileNotFoundError(2, "no such data")
        return Dataset.range(3)

    with pytest.raises(FileNotFoundError, match="no such data"):
        distribute_datasets_from_function(dataset_fn, communicator)


@pytest.mark.parametrize(
    ("dataset", "error", "words"),
    [
        (Dataset.range(4), ValueError, "Call the `batch` method"),
        ([1, 2], TypeError, "expected a mpidist.data.Dataset"),
        (Dataset.range(4).batch(2).with_options(policy("FILE")), ValueError, "files"),
        (LOADED.with_options(policy("HINT")), ValueError, "HINT needs to know the global batch size"),
    ],
)
def test_errors_are_raised_on_every_rank(
    communicator: Communicator, dataset: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        DistributedDataset(dataset, communicator)


@pytest.mark.parametrize("name", ["AUTO", "DATA", "OFF", "HINT"])
@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(0).batch(2),
        Dataset.range(2).batch(3, drop_remainder=True),
        Dataset.range(0).batch(2).repeat(),
        Dataset.range(2).batch(3, drop_remainder=True).repeat(),
        Dataset.range(5).take(0).shuffle(4).repeat().batch(2),
        Dataset.range(5).shard(SHARD_HINT, SHARD_HINT).skip(9).batch(2),
        Dataset.range(5).filter(lambda x: x > 9).batch(2),
        Dataset.range(5).filter(lambda x: x > 9).repeat(2).batch(2),
        Dataset.range(5).map(lambda x: x).filter(lambda x: x > 9).batch(2).map(lambda x: x.sum(keepdims=True)),
        Dataset.from_iterable([]).batch(2).repeat(3),
        Dataset.range(0).interleave(np.arange).batch(2),
        Dataset.range(1).interleave(np.arange).batch(2),
    ],
)
def test_no_examples_end_at_once_on_every_rank(communicator: Communicator, dataset: Dataset, name: str) -> None:
    distributed = DistributedDataset(dataset.with_options(policy(name)), communicator)
    for _ in range(2):
        iterator = iter(distributed)
        assert list(iterator) == []
        assert not iterator.get_next_as_optional().has_value()
        iterator.load_state(iterator.state())
        assert list(iterator) == []
    by_function = distribute_datasets_from_function(lambda _: dataset, communicator)
    assert list(by_function) == []


def test_files_without_examples_end_at_once_on_every_rank(communicator: Communicator, mpi_tmp_path: Path) -> None:
    if communicator.rank == 0:
        for number in range(2 * communicator.size):
            np.save(mpi_tmp_path / f"{number}.npy", np.arange(0))
    communicator.barrier()
    for name in ("AUTO", "FILE", "DATA", "OFF"):
        for reader in (read_npy, lambda file: list(np.load(file))):
            dataset = Dataset.from_files(str(mpi_tmp_path / "*.npy"), reader).batch(2).with_options(policy(name))
            assert list(DistributedDataset(dataset, communicator)) == []
    assert list(DistributedDataset(Dataset.from_files(str(mpi_tmp_path / "*.npy"), read_npy).repeat().batch(2),
                                   communicator)) == []


@pytest.mark.parametrize("name", ["AUTO", "DATA", "OFF", "HINT"])
def test_an_endless_repetition_of_nothing_is_an_error_on_every_rank(communicator: Communicator, name: str) -> None:
    # Whether there is something is known only after reading to the end.
    dataset = Dataset.range(5).filter(lambda x: x > 9).repeat().batch(2).with_options(policy(name))
    with pytest.raises(ValueError, match="to repeat without end, got no element in a pass"):
        list(DistributedDataset(dataset, communicator))


def test_prefetch_of_zero_reads_in_the_thread_of_the_program(communicator: Communicator) -> None:
    readers: list[str] = []

    def remember(x: Any) -> Any:
        readers.append(threading.current_thread().name)
        return x

    dataset = Dataset.range(8 * communicator.size).map(remember).batch(2 * communicator.size)
    for name in ("DATA", "OFF"):
        for one, expected in ((dataset.prefetch(4).prefetch(0), "MainThread"), (dataset, "mpidist-prefetch")):
            readers.clear()
            list(DistributedDataset(one.with_options(policy(name)), communicator))
            assert set(readers) == {expected}
    mapped = dataset.map(lambda x: x).prefetch(0).with_options(policy("OFF"))
    readers.clear()
    list(DistributedDataset(mapped, communicator))
    assert set(readers) == {"MainThread"}


@pytest.mark.parametrize("what", ["length", "seed", "batch", "buffer", "each iteration"])
def test_different_datasets_are_told_from_each_other(communicator: Communicator, what: str) -> None:
    if communicator.size == 1:
        return
    other = communicator.rank == communicator.size - 1
    dataset = Dataset.range(8 + (other and what == "length")).shuffle(
        8 - 4 * (other and what == "buffer"), seed=1 + (other and what == "seed"),
        reshuffle_each_iteration=not (other and what == "each iteration"),
    )
    with pytest.raises(MismatchError, match="Give every rank the same dataset"):
        DistributedDataset(dataset.batch(2 + (other and what == "batch"), drop_remainder=False), communicator)


def test_the_end_is_said_in_three_ways(communicator: Communicator) -> None:
    iterator = iter(DistributedDataset(Dataset.range(4).batch(4), communicator))
    assert iterator.get_next().tolist() == list(range(4))[even_slice(4, communicator.size, communicator.rank)]
    with pytest.raises(IndexError, match="end of the dataset"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    optional = iterator.get_next_as_optional()
    assert not optional.has_value()
    with pytest.raises(ValueError, match="no batch"):
        optional.get_value()
    again = iter(DistributedDataset(Dataset.range(4).batch(4), communicator)).get_next_as_optional()
    assert again.has_value()
    assert len(again.get_value()) == even_sizes(4, communicator.size)[communicator.rank]


def test_a_distributed_dataset_has_a_spec_but_no_transformations(communicator: Communicator) -> None:
    distributed: Any = DistributedDataset(Dataset.range(8).batch(4, drop_remainder=True), communicator)
    rows = 4 if communicator.size == 1 else None
    assert distributed.element_spec == ArraySpec((rows,), np.dtype(np.int64))
    assert distributed.cardinality == 2
    with pytest.raises(AttributeError, match="map"):
        distributed.map(lambda x: x)
    with pytest.raises(TypeError, match="has no len"):
        len(distributed)


def test_next_inside_run_is_refused(communicator: Communicator) -> None:
    iterator = iter(DistributedDataset(Dataset.range(8).batch(4), communicator))
    context.push(context.Entry("strategy", "replica context", None))
    try:
        with pytest.raises(ValueError, match="outside"):
            next(iterator)
    finally:
        context.pop()


def test_prefetching_reads_ahead_and_the_position_does_not(communicator: Communicator) -> None:
    read = []

    def remember(x: Any) -> Any:
        read.append(x)
        return x

    dataset = Dataset.range(100).map(remember).batch(4)
    options = InputOptions(experimental_per_replica_buffer_size=3)
    iterator = iter(DistributedDataset(dataset, communicator, options=options))
    next(iterator)
    mine = even_sizes(4, communicator.size)[communicator.rank]
    while len(read) < 4 * mine:
        time.sleep(0.01)
    assert iterator.state() == {"iteration": 0, "batch": 1, "batch_size": 4}
    iterator.close()


def test_input_context() -> None:
    place = InputContext(4, 2, 4)
    assert str(place) == "mpidist.InputContext(input pipeline id 2, total: 4)"
    assert place.get_per_replica_batch_size(8) == 2
    assert place.get_per_replica_batch_size(0) == 0
    with pytest.raises(ValueError, match="The `global_batch_size` 8 is not divisible by `num_replicas_in_sync` 3 "):
        InputContext(3, 0, 3).get_per_replica_batch_size(8)
    assert InputContext() == InputContext(1, 0, 1)
