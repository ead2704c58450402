"""Summaries over ranks: the calls stand on every rank, one rank writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpidist import summary
from mpidist.comm.group.communicator import Communicator
from mpidist.metrics import Mean
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.strategy.default import Variable
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import make_strategy
from tests.unit.summary.test_summary import read_values

pytestmark = pytest.mark.mpi


def train(strategy: ArenaStrategy, writer: summary.SummaryWriter) -> None:
    """A loop as users write it: each replica has its own loss, summaries show that of all."""
    with strategy.scope():
        loss = Mean()
        seen = Variable(
            0.0, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
        )
    rank = strategy.communicator.rank

    def step_on_replica() -> None:
        loss.update_state(float(rank))
        seen.assign_add(1.0)

    with writer.as_default():
        for step in range(3):
            strategy.run(step_on_replica)
            assert summary.scalar("loss", loss.result(), step=step)
            with strategy.scope():
                # Read by all: the sum over replicas.
                assert summary.scalar("seen", seen, step=step)
            assert strategy.run(summary.histogram, args=("own", np.full(4, rank)), kwargs={"step": step})
    writer.close()


@pytest.mark.parametrize("is_in_scope", [False, True])
def test_one_rank_writes(communicator: Communicator, mpi_tmp_path: Path, is_in_scope: bool) -> None:
    strategy = make_strategy(communicator, "node")
    if is_in_scope:
        with strategy.scope():
            writer = summary.create_file_writer(mpi_tmp_path / "logs")
    else:
        writer = summary.create_file_writer(mpi_tmp_path / "logs")
    assert ("does not write" in repr(writer)) == (communicator.rank > 0)
    train(strategy, writer)
    communicator.barrier()
    assert len(sorted((mpi_tmp_path / "logs").iterdir())) == 1
    values = read_values(mpi_tmp_path / "logs")
    size = communicator.size
    assert [(step, v.simple_value) for step, v in values if v.tag == "loss"] == [(n, (size - 1) / 2) for n in range(3)]
    assert [(step, v.simple_value) for step, v in values if v.tag == "seen"] == [(n, (n + 1) * size) for n in range(3)]
    assert [step for step, v in values if v.tag == "own"] == [0, 1, 2]


def test_inside_run_the_first_replica_writes(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = make_strategy(communicator, "private")

    def log() -> None:
        with summary.create_file_writer(mpi_tmp_path).as_default(step=1):
            summary.scalar("rank", float(communicator.rank))

    strategy.run(log)
    communicator.barrier()
    assert [v.simple_value for _, v in read_values(mpi_tmp_path)] == [0.0]


def test_each_of_several_strategies_has_its_chief(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator.split(communicator.rank % 2))
    with strategy.scope():
        writer = summary.create_file_writer(mpi_tmp_path / str(communicator.rank % 2))
    train(strategy, writer)
    communicator.barrier()
    for color in range(min(2, communicator.size)):
        assert len(read_values(mpi_tmp_path / str(color))) == 9


def test_what_is_wrong_is_wrong_on_every_rank(communicator: Communicator, mpi_tmp_path: Path) -> None:
    writer = summary.create_file_writer(mpi_tmp_path)
    with writer.as_default():
        with pytest.raises(ValueError, match="expected one real number"):
            summary.scalar("loss", [1.0, 2.0], step=0)
        with pytest.raises(ValueError, match="a summary needs a step"):
            summary.text("note", "hello")
    writer.close()
    with pytest.raises(RuntimeError, match="is closed"):
        writer.set_as_default()
