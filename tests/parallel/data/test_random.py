"""Random pipelines: a pass that some ranks begin, others finish, and each element comes as in one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data import SHARD_HINT, Dataset, Options, read_npy
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from tests.helpers.amounts import amount

pytestmark = pytest.mark.mpi

Step = Callable[[Dataset], Dataset]
FILES = 6


def source(choose: random.Random, names: list[str], *, is_of_files: bool) -> Dataset:
    count = choose.choice([0, 1, 7, 20])
    cycle = choose.randint(1, 3)
    files = [
        Dataset.from_files(names, read_npy, cycle_length=cycle),
        Dataset.from_files(names, lambda name: iter(np.load(name)), cycle_length=cycle),
        Dataset.list_files(names).interleave(lambda name: Dataset.from_iterable(np.load(str(name))).shuffle(3), cycle),
    ]
    others = [Dataset.range(count), Dataset.from_iterable([np.int64(k) for k in range(count)])]
    return choose.choice(files if is_of_files else files + others)


def step(choose: random.Random, depth: int) -> Step:
    count = choose.choice([0, 1, 2, 5, 30])
    seed = choose.choice([None, 1])
    steps: list[Step] = [
        lambda d: d.map(lambda x: x),
        lambda d: d.filter(lambda x: x % 3 != count % 3),
        lambda d: d.shuffle(count + 1, seed),
        lambda d: d.shuffle(count + 1, seed, reshuffle_each_iteration=False),
        lambda d: d.take(3 * count),
        lambda d: d.skip(count),
        lambda d: d.shard(2, count % 2),
        lambda d: d.repeat(count % 3),
        lambda d: d.cache(),
        lambda d: d.batch(count + 1).unbatch(),
        lambda d: d.batch(count + 1).map(lambda x: x).unbatch(),
        lambda d: Dataset.zip(d, Dataset.range(15).shuffle(4)).map(lambda x, _: x),
        lambda d: d.concatenate(Dataset.from_iterable([np.int64(1000)] * count)),
        lambda d: d.take_while(lambda x: x != count + 9),
    ]
    if depth == 0:
        inner = [step(choose, 1) for _ in range(choose.randint(0, 2))]
        cycle = choose.randint(1, 3)

        def opened(x: Any) -> Dataset:
            return _applied(Dataset.range(3), inner).map(lambda y: 10 * x + y)

        steps += [lambda d: d.interleave(opened, cycle)] * 3
    return choose.choice(steps)


def _applied(dataset: Dataset, steps: list[Step]) -> Dataset:
    for one in steps:
        dataset = one(dataset)
    return dataset


def build(seed: int, name: str, names: list[str]) -> Dataset:
    choose = random.Random(seed)
    dataset = source(choose, names, is_of_files=name == "FILE")
    if name == "HINT":
        dataset = dataset.shard(SHARD_HINT, SHARD_HINT)
    dataset = _applied(dataset, [step(choose, 0) for _ in range(choose.randint(0, 3))])
    dataset = dataset.batch(choose.choice([1, 2, 3, 6]))
    after: list[Step] = [lambda d: d, lambda d: d.repeat(2), lambda d: d.map(lambda x: x), lambda d: d.prefetch(2)]
    options = Options()
    options.experimental_distribute.auto_shard_policy = name
    return choose.choice(after)(dataset).with_options(options)


def rows(communicator: Communicator, batches: list[Any]) -> list[int]:
    gathered = communicator.all_gather_object([batch.tolist() for batch in batches])
    return [row for step in zip(*gathered, strict=True) for row in itertools.chain(*step)]


@pytest.mark.parametrize("name", ["DATA", "AUTO", "FILE", "HINT"])
def test_a_pass_goes_on_with_other_ranks(communicator: Communicator, mpi_tmp_path: Path, name: str) -> None:
    names = [str(mpi_tmp_path / f"{number}.npy") for number in range(FILES)]
    if communicator.rank == 0:
        for number, path in enumerate(names):
            np.save(path, np.arange(number % 4 + 1) + 100 * number)
    communicator.barrier()
    half = communicator.split(communicator.rank % 2)
    for seed in range(amount(15, 150)):
        distributed = DistributedDataset(build(seed, name, names), communicator)
        for _ in range(seed % 2):
            list(distributed)
        iterator = iter(distributed)
        taken = rows(communicator, list(itertools.islice(iterator, seed % 5)))
        state = iterator.state()
        rest = rows(communicator, list(iterator))
        for group in (half, SoloCommunicator(), communicator):
            other = iter(DistributedDataset(build(seed, name, names), group))
            other.load_state(state)
            found = rows(group, list(other))
            assert sorted(found) == sorted(rest), seed
            assert name != "DATA" or found == rest, seed
        if name == "DATA":
            plain = iter(build(seed, name, names))
            plain.load_state({key: 0 if key == "batch" else value for key, value in state.items() if key != "readers"})
            assert [row for batch in plain for row in batch.tolist()] == taken + rest, seed
