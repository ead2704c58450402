"""Transformations whose elements depend on others: shared in one order, and resumed by another number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import tree
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data import AutoShardPolicy, Dataset, Options
from mpidist.data.distribution.distributed_dataset import DistributedDataset, distribute_datasets_from_function
from mpidist.data.items.sharding import even_slice
from mpidist.options import InputOptions

pytestmark = pytest.mark.mpi

Build = Callable[[Dataset], Dataset]


def numbers(*, indexable: bool) -> Dataset:
    return Dataset.range(45) if indexable else Dataset.from_iterable(lambda: iter(np.arange(45)))


def policy(name: str) -> Options:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return options


def plain(element: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf.tolist(), element)


def whole(communicator: Communicator, mine: list[Any]) -> list[Any]:
    """The global batches that the ranks' pieces make; what has no rows must be the same on all ranks."""
    steps = []
    for pieces in zip(*communicator.all_gather_object(mine), strict=True):
        columns = list(zip(*(tree.flatten(piece)[0] for piece in pieces), strict=True))
        assert all(np.ndim(first) or {first} == set(others) for first, *others in columns if others)
        joined = tree.map_leaves(lambda *those: np.concatenate(those) if np.ndim(those[0]) else those[0], *pieces)
        steps.append(plain(joined))
    return steps


CASES: dict[str, Build] = {
    "flat_map": lambda d: d.flat_map(lambda x: Dataset.range(x, x + x % 4)).batch(7),
    "flat_map of batches": lambda d: d.flat_map(lambda x: Dataset.range(x, x + 5).batch(2, True)).batch(6),
    "take_while": lambda d: d.shuffle(45, seed=2).take_while(lambda x: x != 44).batch(4),
    "scan": lambda d: d.scan(np.int64(0), lambda s, x: (s + x, (s, x))).shuffle(9).batch(6).repeat(2),
    "scan of batches": lambda d: d.batch(6).scan(np.int64(0), lambda s, x: (s + x.sum(), x + s)),
    "unique": lambda d: d.map(lambda x: x * x % 30).unique().batch(4).repeat(2),
    "random": lambda d: Dataset.random(rerandomize_each_iteration=True).take(45).batch(6),
    "samples": lambda d: Dataset.sample_from_datasets([d, d.shuffle(45).map(lambda x: -x)], [1, 2]).batch(7).repeat(2),
    "samples that stop": lambda d: Dataset.sample_from_datasets([d, d.repeat()], None, 3, True, True).batch(5),
    "samples of batches": lambda d: Dataset.sample_from_datasets([d.batch(4), d.batch(6)]),
    "samples by weights": lambda d: Dataset.sample_from_datasets([d, d], d.map(lambda x: np.array([1, x]))).batch(4),
    "from_generator": lambda d: Dataset.from_generator(np.arange, np.int32, (), (45,)).shuffle(9).batch(6).repeat(2),
    "rebatch": lambda d: d.shuffle(45).batch(10).rebatch(7).repeat(2),
    "rebatch in turn": lambda d: d.batch(10).map(lambda x: x * 2).rebatch([5, 2, 4]),
    "unbatch of rows": lambda d: d.shuffle(45).map(lambda x: np.arange(x, x + x % 4)).unbatch().batch(7).repeat(2),
    "rebatch of rows": lambda d: d.shuffle(45).map(lambda x: np.full((x % 5, 2), x)).rebatch([8, 3]),
    "elements with rows": lambda d: (
        Dataset.from_iterable(lambda: (np.arange(i, i + i % 7) for i in range(20)))
        .shuffle(9).map(lambda x: x + 1).repeat(2)
    ),
    "window": lambda d: d.shuffle(45).window(4, 3, 2).flat_map(lambda w: w.batch(4, True)).batch(3).repeat(2),
    "window of batches": lambda d: d.batch(5).window(2, 1).flat_map(lambda w: w.unbatch().shuffle(10)).batch(8),
    "enumerate": lambda d: d.shuffle(45).batch(6).enumerate().repeat(2),
    "enumerate, then map": lambda d: d.batch(6).enumerate().map(lambda i, x: {"i": i, "x": x + i}),
    "zip": lambda d: Dataset.zip({"a": d.batch(7), "b": (d.batch(7).map(lambda x: -x), d.skip(1))}),
}


@pytest.mark.parametrize("indexable", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_ranks_share_them_and_another_number_of_ranks_goes_on(
    communicator: Communicator, case: str, indexable: bool
) -> None:
    def begin(ranks: Communicator) -> Any:
        return DistributedDataset(CASES[case](numbers(indexable=indexable)), ranks)

    # The order without ranks, with the seeds that all ranks share.
    distributed = begin(communicator)
    iterator = iter(distributed)
    alone = iter(CASES[case](numbers(indexable=indexable)))
    alone.load_state({**iterator.state(), "batch": 0})
    expected = [plain(batch) for batch in alone]
    head = [next(iterator) for _ in range(3)]
    state = iterator.state()
    assert whole(communicator, head) == expected[:3]
    # One rank alone, which saves again, and then all ranks.
    one = iter(begin(SoloCommunicator()))
    one.load_state(state)
    assert plain(next(one)) == expected[3]
    last = iter(begin(communicator))
    last.load_state(one.state())
    assert whole(communicator, list(last)) == expected[4:]
    assert whole(communicator, list(iterator)) == expected[3:]
    # And the other way round: a pass that one rank began.
    first = iter(begin(SoloCommunicator()))
    first.load_state({**state, "batch": 0})
    assert [plain(next(first)) for _ in range(2)] == expected[:2]
    many = iter(begin(communicator))
    many.load_state(first.state())
    assert whole(communicator, list(many)) == expected[2:]


def test_a_rank_reads_its_own_rows_of_enumerated_and_zipped_batches(communicator: Communicator) -> None:
    read: list[int] = []

    def remember(x: Any) -> Any:
        read.append(int(x))
        return x

    examples = Dataset.from_tensor_slices(np.arange(12).reshape(4, 3))
    batches = Dataset.range(24).map(remember).batch(6).enumerate()
    options = InputOptions(experimental_per_replica_buffer_size=0)
    distributed = DistributedDataset(Dataset.zip(batches, examples), communicator, options=options)
    n, rank = communicator.size, communicator.rank
    for step, ((number, mine), example) in enumerate(distributed):
        assert number == step
        assert mine.tolist() == list(range(6 * step, 6 * step + 6))[even_slice(6, n, rank)]
        assert example.tolist() == [3 * step, 3 * step + 1, 3 * step + 2]
    assert sorted(itertools.chain(*communicator.all_gather_object(read))) == list(range(24))


def test_a_rank_reads_its_own_windows_only(communicator: Communicator) -> None:
    read: list[int] = []

    def remember(x: Any) -> Any:
        read.append(int(x))
        return x

    windows = Dataset.range(1, 25).map(remember).window(2).flat_map(lambda window: window.batch(2)).batch(6)
    mine = list(itertools.chain(*DistributedDataset(windows, communicator)))
    # A zero is the sample that tells the structure.
    assert sorted(set(read) - {0}) == sorted(x for x in read if x) == sorted(np.ravel(mine).tolist())
    assert sorted({*itertools.chain(*communicator.all_gather_object(read))} - {0}) == list(range(1, 25))


def test_a_rank_reads_its_own_samples_only(communicator: Communicator) -> None:
    read: list[int] = []

    def remember(x: Any) -> Any:
        read.append(int(x))
        return x

    datasets = [Dataset.range(20).map(remember), Dataset.range(20, 40).map(remember)]
    iterator = iter(DistributedDataset(Dataset.sample_from_datasets(datasets).batch(8), communicator))
    iterator.load_state({**iterator.state(), "batch": 2})
    mine = list(itertools.chain(*iterator))
    assert sorted(read) == sorted(mine)
    assert len({*itertools.chain(*communicator.all_gather_object(read))}) == 24


def test_a_generator_that_breaks_its_signature_on_one_rank_is_an_error_on_every_rank(
    communicator: Communicator
) -> None:
    last = communicator.size - 1

    def examples() -> Any:
        yield 1
        yield 2.5 if communicator.rank == last else 2

    iterator = iter(DistributedDataset(Dataset.from_generator(examples, np.int32).batch(1), communicator))
    next(iterator)
    with pytest.raises(TypeError, match=r"numbers that the dtype int32 can hold, got 2\.5"):
        next(iterator)


@pytest.mark.parametrize("name", ["OFF", "FILE", "HINT"])
def test_scans_of_a_ranks_own_data_have_a_state_of_their_own(
    communicator: Communicator, mpi_tmp_path: Any, name: str
) -> None:
    n = communicator.size
    if communicator.rank == 0:
        for k in range(n):
            np.save(mpi_tmp_path / f"{k}.npy", np.full(4, k + 1))
    communicator.barrier()
    if name == "FILE":
        dataset, mine = Dataset.from_files(str(mpi_tmp_path / "*.npy"), np.load), [communicator.rank + 1] * 4
    else:
        dataset, mine = Dataset.range(4 * n), list(range(4 * n))
        if name == "HINT":
            dataset, mine = dataset.shard(-1, -1), mine[communicator.rank :: n]
    summed = dataset.scan(np.int64(0), lambda s, x: (s + x, s + x)).batch(2 * n).with_options(policy(name))
    distributed = DistributedDataset(summed, communicator)
    batches = [batch.tolist() for batch in distributed]
    assert list(itertools.chain(*batches)) == np.cumsum(mine).tolist()
    iterator = iter(distributed)
    next(iterator)
    resumed = iter(distributed)
    resumed.load_state(iterator.state())
    assert [batch.tolist() for batch in resumed] == batches[1:]


def sums(dataset: Dataset) -> Dataset:
    return dataset.scan(np.int64(0), lambda total, x: (total + x, total + x))


OWN_DATA: dict[str, Build] = {
    "flat_map": lambda d: d.flat_map(lambda x: Dataset.range(x, x + x % 3).shuffle(3)).shuffle(8).batch(6),
    "take_while": lambda d: d.shuffle(8, seed=1).take_while(lambda x: x % 100 not in (12, 37)).batch(6).repeat(2),
    "scan": lambda d: sums(d.shuffle(8)).batch(6),
    "unique": lambda d: d.map(lambda x: x % 7).unique().batch(4).repeat(3),
    "enumerate": lambda d: d.shuffle(8).enumerate().map(lambda number, x: number * 1000 + x).batch(6),
    "zip": lambda d: Dataset.zip({"a": d, "b": d.map(lambda x: -x)}).shuffle(8).map(lambda both: both["a"]).batch(6),
    "window": lambda d: d.shuffle(8).window(3, 2).flat_map(lambda w: w.batch(3)).map(lambda x: x.sum()).batch(5),
    "samples": lambda d: Dataset.sample_from_datasets([d, d.map(lambda x: -x)], [1, 3]).batch(6),
    "rebatch": lambda d: d.shuffle(8).batch(5).rebatch([6, 3]),
}


@pytest.mark.parametrize("name", ["FILE", "HINT"])
@pytest.mark.parametrize("case", OWN_DATA)
def test_a_pass_over_own_data_is_finished_by_another_number_of_ranks(
    communicator: Communicator, mpi_tmp_path: Any, case: str, name: str
) -> None:
    if communicator.rank == 0:
        for k in range(2 * communicator.size + 1):
            np.save(mpi_tmp_path / f"{k:02}.npy", np.arange(8 + k) + 100 * k)
    communicator.barrier()

    def begin(ranks: Communicator, state: Any = None) -> Any:
        files = Dataset.list_files(str(mpi_tmp_path / "*.npy"), shuffle=False).flat_map(np.load)
        examples = files if name == "FILE" else Dataset.range(1, 40).shard(-1, -1)
        iterator = iter(DistributedDataset(OWN_DATA[case](examples).with_options(policy(name)), ranks))
        if state is not None:
            iterator.load_state(state)
        return iterator

    def rows(batches: list[Any]) -> list[Any]:
        return list(itertools.chain(*itertools.chain(*communicator.all_gather_object(plain(batches)))))

    first = begin(communicator)
    head = rows([next(first) for _ in range(2)])
    state = first.state()
    whole = rows(list(begin(communicator, {**state, "batch": 0})))
    alone = begin(SoloCommunicator(), state)
    middle = next(alone).tolist()
    last = rows(list(begin(communicator, alone.state())))
    assert sorted(head + middle + last) == sorted(whole)
    assert sorted(head + rows(list(first))) == sorted(whole)


@pytest.mark.parametrize("name", ["OFF", "FILE", "HINT"])
def test_what_hides_the_batch_size_is_an_error_where_ranks_have_own_batches(
    communicator: Communicator, mpi_tmp_path: Any, name: str
) -> None:
    if communicator.rank == 0:
        for k in range(communicator.size):
            np.save(mpi_tmp_path / f"{k}.npy", np.arange(4))
    communicator.barrier()
    files = Dataset.from_files(str(mpi_tmp_path / "*.npy"), np.load).shard(-1, -1)
    dataset = files.batch(2).enumerate().with_options(policy(name))
    with pytest.raises(ValueError, match=f"{name} needs to know the global batch size.*zip, enumerate"):
        DistributedDataset(dataset, communicator)


@pytest.mark.parametrize("case", ["window of batches", "samples", "scan", "random", "from_generator", "enumerate"])
def test_a_checkpoint_keeps_their_position(communicator: Communicator, mpi_tmp_path: Any, case: str) -> None:
    def begin(strategy: Any) -> tuple[Any, Any]:
        with strategy.scope():
            step = mpidist.Variable(np.zeros(1))  # a checkpoint is collective over the ranks of its variables
        return iter(strategy.experimental_distribute_dataset(CASES[case](numbers(indexable=True)))), step

    strategy = mpidist.MultiWorkerMirroredStrategy()
    iterator, step = begin(strategy)
    for _ in range(2):
        next(iterator)
    path = mpidist.Checkpoint(iterator=iterator, step=step).save(str(mpi_tmp_path / "model"))
    communicator.barrier()
    expected = whole(communicator, list(iterator))
    alone, own_step = begin(mpidist.OneDeviceStrategy("cpu:0"))
    mpidist.Checkpoint(iterator=alone, step=own_step).restore(path)
    assert [plain(batch) for batch in alone] == expected
    again, step = begin(strategy)
    mpidist.Checkpoint(iterator=again, step=step).restore(path)
    assert whole(communicator, list(again)) == expected


def test_sizes_in_turn_are_those_of_global_batches_under_off(communicator: Communicator) -> None:
    n = communicator.size
    dataset = Dataset.range(60).batch(4).rebatch([n + 1, 3 * n, 2]).with_options(policy("OFF"))
    mine = [batch.tolist() for batch in DistributedDataset(dataset, communicator)]
    assert list(itertools.chain(*mine)) == list(range(60))
    sizes = [sum(step) for step in zip(*communicator.all_gather_object([len(batch) for batch in mine]), strict=False)]
    assert sizes[:-n] == ([n + 1, 3 * n, 2] * 60)[: len(sizes) - n]


def test_ranks_without_data_get_empty_enumerated_batches(communicator: Communicator) -> None:
    distributed = distribute_datasets_from_function(
        lambda place: Dataset.range(2 * place.input_pipeline_id + 2).batch(2).enumerate(), communicator
    )
    sizes = [(number.dtype, batch.shape) for number, batch in distributed]
    mine = communicator.rank + 1
    assert sizes == [(np.dtype("int64"), (2 * (step < mine),)) for step in range(communicator.size)]
