"""The table of policies, cell by cell; files, hints; and a pass that other ranks finish."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data import SHARD_HINT, UNKNOWN, AutoShardPolicy, Dataset, Options, hdf5_reader, read_npy, read_npz
from mpidist.data.distribution.distributed_dataset import DistributedDataset, distribute_datasets_from_function
from mpidist.data.distribution.distributed_iterator import DistributedIterator
from mpidist.data.input_context import InputContext
from mpidist.data.items.sharding import even_slice
from mpidist.errors import MismatchError

pytestmark = pytest.mark.mpi


def policy(name: str) -> Options:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return options


def by_rank(communicator: Communicator, batches: list[Any]) -> list[list[Any]]:
    """Step by step, each rank's rows."""
    gathered = communicator.all_gather_object([batch.tolist() for batch in batches])
    return [list(step) for step in zip(*gathered, strict=True)]


def seen_by_all(communicator: Communicator, batches: list[Any]) -> list[Any]:
    return [row for step in by_rank(communicator, batches) for part in step for row in part]


def write_files(communicator: Communicator, folder: Path, count: int, rows: int = 5) -> list[str]:
    """File k has the numbers 100 k to 100 k + rows + k - 1."""
    names = [str(folder / f"part-{k:02}.npy") for k in range(count)]
    if communicator.rank == 0:
        for k, name in enumerate(names):
            np.save(name, np.arange(rows + k) + 100 * k)
    communicator.barrier()
    return names


def everything(count: int, rows: int = 5) -> list[int]:
    return [100 * k + i for k in range(count) for i in range(rows + k)]


def save_files(communicator: Communicator, names: list[str], count: Callable[[int], int]) -> None:
    """File k has `count(k)` numbers."""
    communicator.barrier()
    if communicator.rank == 0:
        for k, name in enumerate(names):
            np.save(name, np.arange(count(k)) + 1000 * k)
    communicator.barrier()


class OwnReader:
    """A reader that counts, but whose files are read as iterables."""

    def __call__(self, path: str) -> Iterator[Any]:
        return read_slowly(path)

    def count_examples(self, path: str) -> int:
        return len(np.load(path, mmap_mode="r"))


def read_slowly(path: str) -> Iterator[Any]:
    yield from np.load(path)


# What a rank sees of 16 examples in global batches of 8: (policy, hinted, by files) -> rank, size -> its examples.
Rule = Callable[[int, int], list[int]]


def contiguous(rank: int, size: int) -> list[int]:
    return [row for begin in (0, 8) for row in list(range(begin, begin + 8))[even_slice(8, size, rank)]]


def all_of_them(rank: int, size: int) -> list[int]:
    return list(range(16))


def every_nth(rank: int, size: int) -> list[int]:
    return list(range(16))[rank::size]


def own_files(rank: int, size: int) -> list[int]:
    return [row for file in range(4) for row in range(4 * file, 4 * file + 4) if file % size == rank]


CELLS = {
    ("OFF", "array"): all_of_them,
    ("OFF", "hint"): all_of_them,
    ("OFF", "files"): all_of_them,
    ("DATA", "array"): contiguous,
    ("DATA", "hint"): contiguous,
    ("DATA", "files"): contiguous,
    ("AUTO", "array"): contiguous,
    ("AUTO", "hint"): contiguous,
    ("AUTO", "files"): own_files,
    ("FILE", "files"): own_files,
    ("HINT", "hint"): every_nth,
    # Without a hint: as OFF.
    ("HINT", "array"): all_of_them,
    ("HINT", "files"): all_of_them,
}
STRATEGIES: dict[str, Callable[[], mpidist.Strategy]] = {
    "mirrored": mpidist.MirroredStrategy,
    "multi_worker": mpidist.MultiWorkerMirroredStrategy,
    "one_device": lambda: mpidist.OneDeviceStrategy("cpu:0"),
    "default": mpidist.get_strategy,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_what_each_rank_sees(
    communicator: Communicator, mpi_tmp_path: Path, strategy: str, name: str, kind: str
) -> None:
    chosen = STRATEGIES[strategy]()
    is_distributed = strategy in ("mirrored", "multi_worker")
    size, rank = (communicator.size, communicator.rank) if is_distributed else (1, 0)
    if kind == "files":
        names = [str(mpi_tmp_path / f"{k}.npy") for k in range(4)]
        if communicator.rank == 0:
            for k, file in enumerate(names):
                np.save(file, np.arange(4 * k, 4 * k + 4))
        communicator.barrier()
        dataset = Dataset.from_files(names, read_npy)
    elif kind == "hint":
        dataset = Dataset.range(16).shard(SHARD_HINT, SHARD_HINT)
    else:
        dataset = Dataset.range(16)
    distributed = chosen.experimental_distribute_dataset(dataset.batch(8).with_options(policy(name)))
    assert [row for batch in distributed for row in batch.tolist()] == CELLS[name, kind](rank, size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_an_input_function_is(communicator: Communicator, strategy: str) -> None:
    places: list[InputContext] = []

    def dataset_fn(place: InputContext) -> Dataset:
        places.append(place)
        size = place.get_per_replica_batch_size(12)
        return Dataset.range(24).shard(place.num_input_pipelines, place.input_pipeline_id).batch(size)

    chosen = STRATEGIES[strategy]()
    distributed = chosen.distribute_datasets_from_function(dataset_fn)
    n, rank = (communicator.size, communicator.rank) if strategy in ("mirrored", "multi_worker") else (1, 0)
    assert places == [InputContext(n, rank, n)]
    assert [row for batch in distributed for row in batch.tolist()] == list(range(24))[rank::n]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["array", "files", "hint"])
def test_a_policy_that_cannot_be_followed_is_an_error_on_every_rank(
    communicator: Communicator, mpi_tmp_path: Path, kind: str, strategy: str
) -> None:
    is_distributed = strategy in ("mirrored", "multi_worker")
    if kind == "files":
        names = write_files(communicator, mpi_tmp_path, communicator.size - 1)
        if not names or not is_distributed:
            return
        dataset = Dataset.from_files(names, read_npy)
    else:
        dataset = Dataset.range(16) if kind == "array" else Dataset.range(16).shard(SHARD_HINT, SHARD_HINT)
    chosen = STRATEGIES[strategy]()
    with pytest.raises(ValueError, match="auto_shard_policy FILE needs") as caught:
        chosen.experimental_distribute_dataset(dataset.batch(8).with_options(policy("FILE")))
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


def test_hint_without_a_hint_shuffles_and_resumes_as_off_does(communicator: Communicator) -> None:
    size = 4 * communicator.size
    hinted, off = (
        DistributedDataset(Dataset.range(24).shuffle(24, seed=2).batch(size).with_options(policy(name)), communicator)
        for name in ("HINT", "OFF")
    )
    iterator, other = iter(hinted), iter(off)
    assert [next(iterator).tolist(), next(iterator).tolist()] == [next(other).tolist(), next(other).tolist()]
    state = iterator.state()
    assert state == other.state()
    again = iter(hinted)
    again.load_state(state)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in other]


def test_batches_without_a_known_size_cannot_be_cut_smaller(communicator: Communicator, mpi_tmp_path: Path) -> None:
    names = write_files(communicator, mpi_tmp_path, communicator.size)
    loaded = Dataset.from_files(names, read_npy).batch(4)
    both = Dataset.zip(loaded, loaded)
    rows = seen_by_all(communicator, [a for a, _ in DistributedDataset(both, communicator)])
    assert rows == everything(communicator.size)
    with pytest.raises(ValueError, match="needs to know the global batch size"):
        DistributedDataset(both.with_options(policy("FILE")), communicator)


@pytest.mark.parametrize("reader", [read_npy, read_slowly])
def test_files_are_opened_by_one_rank_each_under_auto(
    communicator: Communicator, mpi_tmp_path: Path, reader: Callable[[str], Any]
) -> None:
    n = communicator.size
    names = write_files(communicator, mpi_tmp_path, 2 * n + 1)
    opened: list[str] = []

    def remember(name: str) -> Any:
        opened.append(name)
        return reader(name)

    listed = Dataset.list_files(str(mpi_tmp_path / "*.npy"), shuffle=False)
    dataset = listed.interleave(remember, cycle_length=2).batch(4)
    rows = seen_by_all(communicator, list(DistributedDataset(dataset, communicator)))
    assert sorted(rows) == sorted(everything(2 * n + 1))
    assert set(opened) == set(names[communicator.rank :: n])


def test_files_in_random_order_are_read_once_each(communicator: Communicator, mpi_tmp_path: Path) -> None:
    count = 2 * communicator.size + 1
    names = write_files(communicator, mpi_tmp_path, count)
    dataset = Dataset.list_files(names, shuffle=True).interleave(read_npy, 2).shuffle(9).batch(4)
    distributed = DistributedDataset(dataset, communicator)
    passes = [seen_by_all(communicator, list(distributed)) for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == everything(count)
    assert passes[0] != passes[1]


def test_listed_files_are_shuffled_alike_on_all_ranks_and_in_all_runs(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    names = [f"{k:02}" for k in range(20)]
    listed = Dataset.list_files(names)
    first, second = ([str(name) for name in listed] for _ in range(2))
    assert sorted(first) == sorted(second) == names
    assert names != first != second
    # Not even a list that a rank makes again differs: each may take a shard of its own.
    assert communicator.all_gather_object(first) == [first] * communicator.size
    assert [str(name) for name in Dataset.list_files(names, shuffle=True, seed=0)] == first
    assert [str(name) for name in Dataset.list_files(names, seed=1)] not in (first, names)
    assert [str(name) for name in Dataset.list_files(names, shuffle=False)] == names


@pytest.mark.parametrize("name", ["FILE", "DATA"])
@pytest.mark.parametrize("kind", ["npy", "hdf5", "own"])
def test_counted_files_are_iterated_without_communication(
    communicator: Communicator, mpi_tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 * communicator.size + 1
    names = write_files(communicator, mpi_tmp_path, count)
    reader: Callable[[str], Any] = OwnReader() if kind == "own" else read_npy
    if kind == "hdf5":
        reader = hdf5_reader("x")
        names = [name.replace(".npy", ".h5") for name in names]
        if communicator.rank == 0:
            for k, file_name in enumerate(names):
                with h5py.File(file_name, "w") as file:
                    file["x"] = np.arange(5 + k) + 100 * k
        communicator.barrier()
    dataset = Dataset.from_files(names, reader, cycle_length=2)
    assert dataset.cardinality() == len(everything(count))
    distributed = DistributedDataset(dataset.batch(4).with_options(policy(name)), communicator)
    steps = distributed.cardinality
    iterator = iter(distributed)
    mine = [next(iterator)]  # the first step of uneven lengths tells what an empty batch looks like

    def refuse(*values: object) -> Any:
        raise AssertionError("a step communicates")

    with monkeypatch.context() as patch:
        for method in ("all_reduce_max", "all_gather_object", "barrier", "broadcast_object"):
            patch.setattr(communicator, method, refuse)
        mine += list(iterator)
    assert len(mine) == steps > 0
    assert sorted(seen_by_all(communicator, mine)) == everything(count)


def test_a_file_that_one_rank_cannot_count_is_an_error_on_every_rank(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    names = write_files(communicator, mpi_tmp_path, communicator.size)
    if communicator.rank == 0:
        Path(names[-1]).write_bytes(b"not an array")
    communicator.barrier()
    dataset = Dataset.from_files(names, read_npy)
    assert dataset.cardinality() == UNKNOWN
    iterator = iter(DistributedDataset(dataset.batch(5 * communicator.size), communicator))
    with pytest.raises(ValueError, match=r"magic|pickle|allow_pickle"):
        list(iterator)


@pytest.mark.parametrize("name", ["DATA", "FILE"])
@pytest.mark.parametrize("change", [-5, 8])
@pytest.mark.parametrize("is_even", [True, False])
def test_files_that_change_after_they_were_counted_are_errors(
    communicator: Communicator, mpi_tmp_path: Path, name: str, change: int, is_even: bool
) -> None:
    n = communicator.size
    names = [str(mpi_tmp_path / f"{k:02}.npy") for k in range(2 * n)]
    save_files(communicator, names, lambda k: 6 if is_even else 6 + 2 * k)
    distributed = DistributedDataset(
        Dataset.from_files(names, read_npy).batch(4 * n).with_options(policy(name)), communicator
    )
    steps = len(list(distributed))
    assert steps == distributed.cardinality
    save_files(communicator, names, lambda k: change + (6 if is_even else 6 + 2 * k))
    got = "more" if change > 0 else r"only \d+"
    with pytest.raises(RuntimeError, match=rf"rank {communicator.rank}: the dataset has changed .* batches, got {got}"):
        list(distributed)
    # Each rank has had its error at a batch of its own, and ranks compare what they have taken.
    communicator.order.restart()


def test_too_few_files_are_shared_by_examples_and_each_rank_reads_only_its_rows(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    count = max(1, communicator.size - 1)
    names = [str(mpi_tmp_path / f"{k}.h5") for k in range(count)]
    if communicator.rank == 0:
        for k, name in enumerate(names):
            with h5py.File(name, "w") as file:
                file["x"], file["y"] = np.arange(7) + 10 * k, np.ones((7, 2))
    communicator.barrier()
    dataset = Dataset.from_files(names, hdf5_reader("x", "y")).batch(5)
    mine = list(DistributedDataset(dataset, communicator))
    assert all(y.shape == (len(x), 2) for x, y in mine)
    steps = by_rank(communicator, [x for x, _ in mine])
    assert [list(itertools.chain(*step)) for step in steps] == [x.tolist() for x, _ in dataset]


def test_one_of_two_lists_of_files_may_be_too_short_to_be_shared_out(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    """All ranks then share the examples, and none gets a file of the longer list alone."""
    size = communicator.size
    few = [str(mpi_tmp_path / "few.npy")]
    many = [str(mpi_tmp_path / f"many-{k}.npy") for k in range(size)]
    save_files(communicator, few, lambda _: 3 * size)
    save_files(communicator, many, lambda _: 3)
    pairs = Dataset.zip(Dataset.from_files(few, read_npy), Dataset.from_files(many, read_npy))
    steps = list(DistributedDataset(pairs.map(lambda a, b: a * 10_000 + b).batch(size), communicator))
    expected = [10_000 * (3 * k + i) + 1000 * k + i for k in range(size) for i in range(3)]
    assert seen_by_all(communicator, steps) == expected
    if size > 1:
        with pytest.raises(ValueError, match=f"at least as many files as ranks: expected {size}, got a dataset of 1"):
            DistributedDataset(pairs.batch(size).with_options(policy("FILE")), communicator)


@pytest.mark.parametrize("case", ["array", "numbers", "iterable", "concatenated", "sampled", "other files", "repeated"])
def test_auto_shares_out_no_files_that_other_rows_stand_beside(
    communicator: Communicator, mpi_tmp_path: Path, case: str
) -> None:
    """A rank with files of its own would begin with the first of the other rows, and each rank would have them all."""
    names = [str(mpi_tmp_path / f"{k}.npy") for k in range(2 * communicator.size)]
    save_files(communicator, names, lambda k: 3 + k)
    others = [str(mpi_tmp_path / f"other-{k}.npy") for k in range(2 * communicator.size)]
    save_files(communicator, others, lambda k: 3 + len(others) - k)
    files = Dataset.from_files(names, read_npy)
    build: dict[str, Callable[[], Dataset]] = {
        "array": lambda: Dataset.zip(files, Dataset.from_tensor_slices(np.arange(1000))),
        "numbers": lambda: files.shuffle(4, seed=1).enumerate(),
        "iterable": lambda: Dataset.zip(Dataset.from_iterable(range(1000)), files),
        "concatenated": lambda: files.concatenate(Dataset.range(5)).map(lambda x: (x, x)),
        "sampled": lambda: Dataset.sample_from_datasets([files, Dataset.range(5)], seed=1).map(lambda x: (x, x)),
        "other files": lambda: Dataset.zip(files, Dataset.from_files(others, read_npy)),
        "repeated": lambda: Dataset.zip(files, Dataset.range(1000)).shuffle(3, seed=2).repeat(2),
    }
    dataset = build[case]().batch(4)
    mine = [np.stack([a, b], axis=1) for a, b in DistributedDataset(dataset, communicator)]
    steps = by_rank(communicator, mine)
    assert [list(itertools.chain(*step)) for step in steps] == [np.stack(pair, axis=1).tolist() for pair in dataset]


def test_auto_shares_out_files_that_are_read_twice_in_step(communicator: Communicator, mpi_tmp_path: Path) -> None:
    names = [str(mpi_tmp_path / f"{k}.npy") for k in range(2 * communicator.size)]
    save_files(communicator, names, lambda k: 3 + k)
    files = Dataset.from_files(names, read_npy)
    listed = Dataset.zip(Dataset.list_files(names, shuffle=False), Dataset.range(len(names)))
    opened = listed.flat_map(lambda name, number: read_npy(str(name)))
    for dataset in (Dataset.zip(files, files.map(lambda x: -x)).map(lambda a, b: a - b - a), opened):
        mine = [row for batch in DistributedDataset(dataset.batch(4), communicator) for row in batch.tolist()]
        own = names[communicator.rank :: communicator.size]
        assert mine == [row for name in own for row in np.load(name).tolist()]


def test_empty_batches_have_the_dtype_of_the_first_file_with_examples(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    names = [str(mpi_tmp_path / f"{k}.npy") for k in range(2 * communicator.size)]
    if communicator.rank == 0:
        for k, name in enumerate(names):
            np.save(name, np.zeros(2 * (k >= communicator.size), np.float32))
    communicator.barrier()
    # One example in a step: other ranks get empty batches, made while their first file has shown nothing.
    dataset = Dataset.from_files(names, read_slowly).batch(1).with_options(policy("FILE"))
    mine = list(DistributedDataset(dataset, communicator))
    assert {batch.dtype for batch in mine} == {np.dtype(np.float32)}
    assert len(seen_by_all(communicator, mine)) == 2 * communicator.size


def test_npz_files(communicator: Communicator, mpi_tmp_path: Path) -> None:
    if communicator.rank == 0:
        for k in range(2):
            np.savez(mpi_tmp_path / f"{k}.npz", x=np.arange(3) + 3 * k, y=np.zeros(3))
    communicator.barrier()
    dataset = Dataset.from_files(mpi_tmp_path / "*.npz", read_npz).batch(6).with_options(policy("DATA"))
    batches = [batch["x"] for batch in DistributedDataset(dataset, communicator)]
    assert seen_by_all(communicator, batches) == list(range(6))


def test_other_files_on_another_rank_are_told(communicator: Communicator, mpi_tmp_path: Path) -> None:
    if communicator.size == 1:
        return
    names = write_files(communicator, mpi_tmp_path, communicator.size)
    if communicator.rank == 1:
        names = names[::-1]
    with pytest.raises(MismatchError, match="lists of files"):
        DistributedDataset(Dataset.from_files(names, read_npy).batch(2), communicator)


def test_a_file_that_is_not_there(communicator: Communicator, mpi_tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file matches"):
        Dataset.list_files(str(mpi_tmp_path / "*.nothing"))
    with pytest.raises(FileNotFoundError, match="empty"):
        Dataset.list_files([])


# Enough that three batches do not exhaust them.
ROWS = 12


def build(kind: str, name: str, folder: Path, seed: int | None, count: int) -> Dataset:
    if kind == "array":
        dataset = Dataset.from_tensor_slices(np.array(everything(count, ROWS)))
    elif kind == "hdf5":
        dataset = Dataset.from_tensor_slices(h5py.File(folder / "all.h5")["x"])
    else:
        reader = read_npy if kind == "files" else read_slowly
        dataset = Dataset.from_files(str(folder / "*.npy"), reader, cycle_length=2)
    if name == "HINT":
        dataset = dataset.shard(SHARD_HINT, SHARD_HINT)
    dataset = dataset.shuffle(8, seed).map(lambda x: x + 1).batch(6)
    return dataset.with_options(policy(name))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("array", "DATA"), ("array", "AUTO"), ("array", "HINT"), ("hdf5", "DATA"), ("hdf5", "AUTO"),
        ("files", "DATA"), ("files", "AUTO"), ("iterables", "DATA"), ("iterables", "AUTO"),
    ],
)
def test_a_pass_is_finished_by_another_number_of_ranks_without_loss_or_repetition(
    communicator: Communicator, mpi_tmp_path: Path, kind: str, name: str, count: int, seed: int | None
) -> None:
    write_files(communicator, mpi_tmp_path, count, ROWS)
    if communicator.rank == 0:
        with h5py.File(mpi_tmp_path / "all.h5", "w") as file:
            file["x"] = np.array(everything(count, ROWS))
    communicator.barrier()
    expected = sorted(x + 1 for x in everything(count, ROWS))

    def make() -> Dataset:
        return build(kind, name, mpi_tmp_path, seed, count)

    def begin(ranks: Communicator, state: dict[str, int] | None) -> DistributedIterator:
        iterator = iter(DistributedDataset(make(), ranks))
        if state is not None:
            iterator.load_state(state)
        return iterator

    # All ranks begin; one rank alone goes on; all finish.
    first = begin(communicator, None)
    seen = seen_by_all(communicator, [next(first) for _ in range(2)])
    alone = begin(SoloCommunicator(), first.state())
    seen += next(alone).tolist()
    last = begin(communicator, alone.state())
    rest = list(last)
    seen += seen_by_all(communicator, rest)
    assert sorted(seen) == expected
    # The other way round, and the next pass is a whole one again.
    one = begin(SoloCommunicator(), None)
    # Rank 0's: without a seed every lone rank draws its own.
    seen, state = communicator.broadcast_object((next(one).tolist(), one.state()))
    many = DistributedDataset(make(), communicator)
    iterator = iter(many)
    iterator.load_state(state)
    seen += seen_by_all(communicator, list(iterator))
    assert sorted(seen) == expected
    assert sorted(seen_by_all(communicator, list(many))) == expected


def test_a_position_of_no_readers_is_refused(communicator: Communicator, mpi_tmp_path: Path) -> None:
    write_files(communicator, mpi_tmp_path, 2 * communicator.size)
    iterator = iter(DistributedDataset(build("files", "AUTO", mpi_tmp_path, 1, 0), communicator))
    state = iterator.state()
    assert state["readers"] == communicator.size
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="does not fit"):
            iterator.load_state({**state, "readers": wrong})
    iterator.load_state(state)


@pytest.mark.parametrize("name", ["DATA", "AUTO"])
def test_a_checkpoint_keeps_the_position_for_any_number_of_ranks(
    communicator: Communicator, mpi_tmp_path: Path, name: str
) -> None:
    write_files(communicator, mpi_tmp_path, 5, ROWS)
    expected = sorted(x + 1 for x in everything(5, ROWS))
    strategy = mpidist.MultiWorkerMirroredStrategy()
    iterator = iter(strategy.experimental_distribute_dataset(build("files", name, mpi_tmp_path, None, 5)))
    seen = seen_by_all(communicator, [next(iterator) for _ in range(2)])
    # A checkpoint is collective over the ranks of its variables.
    with strategy.scope():
        step = mpidist.Variable(np.zeros(1))
    path = mpidist.Checkpoint(iterator=iterator, step=step).save(str(mpi_tmp_path / "model"))
    communicator.barrier()
    solo = mpidist.OneDeviceStrategy("cpu:0")
    with solo.scope():
        own_step = mpidist.Variable(np.zeros(1))
    alone = iter(solo.experimental_distribute_dataset(build("files", name, mpi_tmp_path, None, 5)))
    mpidist.Checkpoint(iterator=alone, step=own_step).restore(path)
    assert sorted(seen + [row for batch in alone for row in batch.tolist()]) == expected
    again = iter(strategy.experimental_distribute_dataset(build("files", name, mpi_tmp_path, None, 5)))
    mpidist.Checkpoint(iterator=again, step=step).restore(path)
    assert sorted(seen + seen_by_all(communicator, list(again))) == expected


def test_padding_is_that_of_the_global_batch(communicator: Communicator) -> None:
    dataset = Dataset.range(1, 10).map(lambda x: np.full(x, x)).padded_batch(4)
    mine = list(DistributedDataset(dataset, communicator))
    assert [batch.shape[1] for batch in mine] == [4, 8, 9]
    assert seen_by_all(communicator, mine) == [row for batch in dataset for row in batch.tolist()]


def test_transformations_read_a_ranks_own_rows_only(communicator: Communicator) -> None:
    read: list[int] = []

    def remember(x: Any) -> Any:
        read.append(int(x))
        return x

    dataset = Dataset.range(24).map(remember, num_parallel_calls=2).cache().enumerate().shuffle(24, seed=3).batch(8)
    distributed = DistributedDataset(dataset, communicator)
    mine = [row for _, batch in distributed for row in batch.tolist()]
    assert sorted(read) == sorted(mine)
    assert sorted(itertools.chain(*communicator.all_gather_object(mine))) == list(range(24))


def test_datasets_of_a_function_may_be_files(communicator: Communicator, mpi_tmp_path: Path) -> None:
    names = write_files(communicator, mpi_tmp_path, 5)

    def dataset_fn(place: InputContext) -> Dataset:
        mine = Dataset.list_files(names).shard(place.num_input_pipelines, place.input_pipeline_id)
        return mine.interleave(read_npy).batch(3)

    distributed = distribute_datasets_from_function(dataset_fn, communicator)
    assert sorted(seen_by_all(communicator, list(distributed))) == everything(5)
