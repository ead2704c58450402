"""Checkpoints of distributed iterators: without any variable, they are those of the ranks that step together."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data.dataset import Dataset
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from mpidist.errors import CheckpointError, MismatchError
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import make_arena

pytestmark = pytest.mark.mpi

EXAMPLES, BATCH = 48, 12


def begin(communicator: Communicator) -> Any:
    dataset = Dataset.from_tensor_slices(np.arange(EXAMPLES)).shuffle(EXAMPLES).batch(BATCH)
    return iter(DistributedDataset(dataset, communicator))


def take(iterator: Any, communicator: Communicator) -> list[int]:
    """The examples of all ranks in the rest of the pass."""
    mine = [int(example) for batch in iterator for example in batch]
    return sorted(example for part in communicator.all_gather_object(mine) for example in part)


def test_its_ranks_save_and_restore_one_checkpoint(communicator: Communicator, mpi_tmp_path: Path) -> None:
    iterator = begin(communicator)
    checkpoint = Checkpoint(iterator=iterator)
    assert checkpoint.find_objects().group().size == communicator.size
    seen = communicator.all_gather_object([int(example) for example in next(iterator)])
    with CheckpointManager(checkpoint, mpi_tmp_path, 1) as manager:
        path = manager.save()
    communicator.barrier()
    assert path == str(mpi_tmp_path / "ckpt-1.h5")
    assert sorted(os.listdir(mpi_tmp_path)) == ["checkpoint", "ckpt-1.h5"]
    with h5py.File(path) as file:
        assert file["iterator/batch"][()] == 1
    rest = take(iterator, communicator)
    assert sorted([example for part in seen for example in part] + rest) == list(range(EXAMPLES))
    again = begin(communicator)
    assert CheckpointManager(Checkpoint(iterator=again), mpi_tmp_path, 1).restore_or_initialize() == path
    assert take(again, communicator) == rest


def test_on_another_number_of_ranks(communicator: Communicator, mpi_tmp_path: Path) -> None:
    iterator = begin(communicator)
    next(iterator)
    path = Checkpoint(iterator=iterator).write(mpi_tmp_path / "c")
    rest = take(iterator, communicator)
    for readers in range(1, communicator.size):
        group = communicator.split(int(communicator.rank >= readers))
        fresh = begin(group)
        Checkpoint(iterator=fresh).read(path).assert_consumed()
        assert take(fresh, group) == rest


@pytest.mark.mpi(min_size=2)
def test_a_failure_is_one_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    iterator = begin(communicator)
    Checkpoint(iterator=iterator).write(mpi_tmp_path / "c")
    Checkpoint(iterator=iterator).read(mpi_tmp_path / "c").assert_consumed()
    if communicator.size > 1:
        with pytest.raises(MismatchError, match="the path of a checkpoint must be the same on all ranks"):
            Checkpoint(iterator=iterator).read(mpi_tmp_path / ("c" if communicator.rank == 0 else "nowhere"))
    if communicator.rank == 0:
        (mpi_tmp_path / "c.h5").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="no HDF5 file"):
        Checkpoint(iterator=iterator).read(mpi_tmp_path / "c")


@pytest.mark.mpi(min_size=2)
def test_what_else_it_holds_is_the_same_on_all_its_ranks(communicator: Communicator, mpi_tmp_path: Path) -> None:
    iterator = begin(communicator)
    step = create_variable(make_arena(SoloCommunicator()), 3)
    path = Checkpoint(iterator=iterator, step=step).write(mpi_tmp_path / "c")
    step.assign(0)
    Checkpoint(iterator=iterator, step=step).read(path).assert_consumed()
    assert step.numpy() == 3
    step.assign(communicator.rank)
    with pytest.raises(MismatchError, match="'step' of shape"):
        Checkpoint(iterator=iterator, step=step).write(mpi_tmp_path / "d")
    with pytest.raises(ValueError, match=r"'a' over .* and 'b' over .* one checkpoint per strategy"):
        Checkpoint(a=iterator, b=begin(communicator.split(0))).write(mpi_tmp_path / "d")


def test_one_that_comes_late_goes_on_where_it_was(communicator: Communicator, mpi_tmp_path: Path) -> None:
    iterator = begin(communicator)
    next(iterator)
    path = Checkpoint(data=SimpleNamespace(iterator=iterator)).write(mpi_tmp_path / "c")
    rest = take(iterator, communicator)
    checkpoint: Any = Checkpoint()
    status = checkpoint.read(path)
    checkpoint.data = SimpleNamespace(iterator=begin(communicator))
    assert take(checkpoint.data.iterator, communicator) == rest
    status.assert_consumed()
