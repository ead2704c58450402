"""Shuffles without a seed inside what `interleave` opens: the same order on all ranks and after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data import SHARD_HINT, AutoShardPolicy, Dataset, Options, read_npy
from mpidist.data.distribution.distributed_dataset import DistributedDataset

pytestmark = pytest.mark.mpi

ROWS, FILES = 6, 4


def shuffled(number: Any) -> Dataset:
    return Dataset.range(ROWS).map(lambda x: ROWS * number + x).shuffle(ROWS)


def nested(number: Any) -> Dataset:
    def half(which: Any) -> Dataset:
        return Dataset.range(ROWS // 2).map(lambda x: ROWS * number + ROWS // 2 * which + x).shuffle(ROWS)

    return Dataset.range(2).interleave(half, cycle_length=2).shuffle(2)


def kept(number: Any) -> Dataset:
    return shuffled(number).batch(2).cache().unbatch()


def iterated(number: Any) -> Dataset:
    return Dataset.from_iterable([ROWS * number + x for x in range(ROWS)]).shuffle(ROWS)


def build(opened: Callable[[Any], Dataset], folder: Path, name: str, cycle: int) -> Dataset:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    if name in ("FILE", "AUTO"):
        dataset = Dataset.from_files(
            str(folder / "*.npy"), lambda file: opened(int(read_npy(file)[0])), cycle_length=cycle
        )
    else:
        numbers = Dataset.range(FILES)
        dataset = (numbers.shard(SHARD_HINT, SHARD_HINT) if name == "HINT" else numbers).interleave(opened, cycle)
    return dataset.batch(4).with_options(options)


def rows_of(communicator: Communicator, batches: list[Any]) -> list[int]:
    gathered = communicator.all_gather_object([batch.tolist() for batch in batches])
    return [row for step in zip(*gathered, strict=True) for row in itertools.chain(*step)]


@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize("name", ["DATA", "AUTO", "FILE", "HINT"])
@pytest.mark.parametrize("opened", [shuffled, nested, kept, iterated])
def test_every_example_comes_once_also_after_a_resume_on_other_ranks(
    communicator: Communicator, mpi_tmp_path: Path, opened: Callable[[Any], Dataset], name: str, cycle: int
) -> None:
    if communicator.rank == 0:
        for number in range(FILES):
            np.save(mpi_tmp_path / f"{number}.npy", [number])
    communicator.barrier()
    everything = list(range(ROWS * FILES))
    distributed = DistributedDataset(build(opened, mpi_tmp_path, name, cycle), communicator)
    passes = [rows_of(communicator, list(distributed)) for _ in range(2)]
    assert [sorted(rows) for rows in passes] == [everything] * 2
    # A cache keeps the order of its first pass.
    assert (passes[0] == passes[1]) == (opened is kept)
    iterator = iter(distributed)
    seen = rows_of(communicator, [next(iterator), next(iterator)])
    state = iterator.state()
    rest = rows_of(communicator, list(iterator))
    assert sorted(seen + rest) == everything
    # One rank goes on, then all of them, with datasets made anew.
    alone = iter(DistributedDataset(build(opened, mpi_tmp_path, name, cycle), SoloCommunicator()))
    alone.load_state(state)
    seen += next(alone).tolist()
    again = iter(DistributedDataset(build(opened, mpi_tmp_path, name, cycle), communicator))
    again.load_state(alone.state())
    seen += rows_of(communicator, list(again))
    assert sorted(seen) == everything


def test_a_dataset_that_all_elements_open_is_shuffled_alike(communicator: Communicator) -> None:
    # Made once, outside the function; each rank has drawn another seed.
    inner = Dataset.range(8).shuffle(8)
    dataset = Dataset.range(3).interleave(lambda _: inner, cycle_length=3).batch(4)
    distributed = DistributedDataset(dataset, communicator)
    assert sorted(rows_of(communicator, list(distributed))) == sorted([*range(8)] * 3)
