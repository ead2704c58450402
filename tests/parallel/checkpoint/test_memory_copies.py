"""Copies in memory over several ranks and nodes: what each one holds, and what restores from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.memory import writing
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import Adam
from mpidist.options import VariableAggregation, VariableSynchronization
from tests.helpers.started import enter_start
from tests.parallel.layouts import lay_out, make_strategy

pytestmark = pytest.mark.mpi

# More than a page, so that the ranks of a node share its copying.
SIZE = 3001


class Job:
    """Collective. A training over some nodes, of which each has a directory for its memory."""

    def __init__(
        self, communicator: Communicator, layout: str, folder: Path, patch: pytest.MonkeyPatch, start: int = 0, *,
        shard: bool = False, memory: bool = True,
    ) -> None:
        group = lay_out(communicator, layout)
        self.node = group.node_index
        communicator.barrier()
        self.strategy = make_strategy(communicator, layout, shard_optimizer=shard)
        enter_start(patch, folder, f"memory-{self.node}", start)
        rank, self.size = group.rank, group.size
        with self.strategy.scope():
            self.weight = mpidist.Variable(np.arange(SIZE, dtype="float32"))
            self.own = mpidist.Variable(
                np.zeros(3, "int64"), synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.NONE,
            )
            self.optimizer = Adam(0.1)
        self.optimizer.build([self.weight])
        self.generator = np.random.default_rng(5)
        checkpoint = Checkpoint(
            weight=self.weight, own=self.own, optimizer=self.optimizer, generator=self.generator
        )
        self.manager = CheckpointManager(checkpoint, folder / "disk", 1, memory=2 if memory else False)
        self.rank = rank

    def step(self) -> None:
        gradient = self.generator.normal(size=SIZE).astype("float32") * (self.rank + 1)

        def update() -> None:
            self.own.assign_add(np.full(3, self.rank + 1))
            self.optimizer.apply_gradients([(gradient, self.weight)])

        self.strategy.run(update)

    def train(self, steps: int) -> int:
        """Make steps, and return the number of copies."""
        count = 0
        for _ in range(steps):
            self.step()
            count += self.manager.copy()
        return count

    def values(self) -> list[AnyArray]:
        def component() -> AnyArray:
            return np.array(self.own.value())

        state = [one.numpy() for one in self.optimizer.variables]
        return [self.weight.numpy(), *state, self.strategy.run(component)]

    def close(self) -> None:
        self.manager.close()
        self.strategy.close()


def same(first: Job, second: Job) -> None:
    for one, other in zip(first.values(), second.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("layout", "shard"), [("node", False), ("pairs", True), ("each", False), ("uneven", True)])
def test_a_restart_has_the_bits_of_the_copied_step(
    communicator: Communicator, mpi_tmp_path: Path, layout: str, shard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(communicator, layout, mpi_tmp_path, monkeypatch, shard=shard)
    # Calls 3, 5 and 7 copy.
    assert job.train(7) == 3
    communicator.barrier()
    again = Job(communicator, layout, mpi_tmp_path, monkeypatch, 1, shard=shard)
    assert again.manager.restore_or_initialize() is not None
    same(job, again)
    for one in (job, again):
        one.step()
    same(job, again)
    for one in (job, again):
        one.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("layout", "harm"), [("each", "damaged"), ("uneven", "lost")])
def test_a_node_that_is_new_gets_its_values_from_the_next_one(
    communicator: Communicator, mpi_tmp_path: Path, layout: str, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(communicator, layout, mpi_tmp_path, monkeypatch)
    job.train(7)
    communicator.barrier()
    if communicator.rank == communicator.size - 1:
        for path in (mpi_tmp_path / f"memory-{job.node}").glob("mpidist-copies-*/*/*/*"):
            if harm == "lost":
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[-4096 * 4] ^= 1
                path.write_bytes(data)
    communicator.barrier()
    again = Job(communicator, layout, mpi_tmp_path, monkeypatch, 1)
    found = again.manager.restore_or_initialize()
    nodes = lay_out(communicator, layout).node_sizes
    assert (found is not None) == (len(nodes) > 1)
    if found is not None:
        same(job, again)
        assert again.train(3) == 1
    for one in (job, again):
        one.close()


@pytest.mark.mpi(min_size=3)
def test_parts_that_are_nowhere_leave_the_disk(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(communicator, "each", mpi_tmp_path, monkeypatch)
    job.train(3)
    path = job.manager.save()
    job.train(4)
    communicator.barrier()
    if communicator.rank > 0:
        for home in (mpi_tmp_path / f"memory-{job.node}").iterdir():
            shutil.rmtree(home)
    communicator.barrier()
    again = Job(communicator, "each", mpi_tmp_path, monkeypatch, 1)
    assert again.manager.restore_or_initialize() == path
    assert ("do not have every part" in caplog.text) == (communicator.rank == 0)
    for one in (job, again):
        one.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("before", "after"), [("each", "node"), ("node", "each")])
def test_other_nodes_read_the_same_copies(
    communicator: Communicator, mpi_tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node of either has the copies of the first node; the others are new where they were another's."""
    job = Job(communicator, before, mpi_tmp_path, monkeypatch)
    job.train(7)
    communicator.barrier()
    again = Job(communicator, after, mpi_tmp_path, monkeypatch, 1)
    found = again.manager.restore_or_initialize()
    # One node of several does not have every part.
    if found is not None:
        same(job, again)
    assert found is not None or (before, communicator.size > 2) == ("each", True)
    for one in (job, again):
        one.close()


@pytest.mark.mpi(min_size=2)
def test_fewer_ranks_read_the_same_copies(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(communicator, "node", mpi_tmp_path, monkeypatch)
    job.train(7)
    expected = job.values()
    part = communicator.split(int(communicator.rank == communicator.size - 1))
    if communicator.rank < communicator.size - 1:
        again = Job(part, "private" if part.size == 1 else "node", mpi_tmp_path, monkeypatch, 1)
        assert again.manager.restore_or_initialize() is not None
        for one, other in zip(expected, again.values(), strict=True):
            np.testing.assert_array_equal(one, other)
        again.close()
    communicator.barrier()
    job.close()
    part.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_copy_turns_copies_off_on_all(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(communicator, "node", mpi_tmp_path, monkeypatch)
    if communicator.rank == 1:
        def fail(*_: object) -> int:
            raise OSError("no more")

        monkeypatch.setattr(writing, "_write", fail)
    assert job.train(5) == 0
    assert not job.manager.copies_memory
    assert ("rank 1: OSError: no more" in caplog.text) == (communicator.rank == 0)
    assert job.manager.save() is not None
    job.close()
