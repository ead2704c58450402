"""Rank 0 of a group prints and writes for it, wherever in the job it is."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist import first_rank, launch, summary
from mpidist.comm.group.communicator import Communicator
from mpidist.observe import Progress
from tests.helpers.strategies import ArenaStrategy

pytestmark = pytest.mark.mpi


def shows_progress() -> bool:
    stream = io.StringIO()
    with Progress(1, stream=stream) as progress:
        progress.update()
    return stream.getvalue() != ""


def writes_summaries(folder: Path) -> bool:
    with summary.create_file_writer(folder).as_default():
        summary.scalar("x", 1.0, step=0)
    return folder.is_dir()


def save(folder: Path, strategy: mpidist.Strategy) -> Path:
    with strategy.scope():
        variable = mpidist.Variable(np.ones(3))
    return Path(mpidist.Checkpoint(v=variable).save(folder / "c"))


def test_a_group_of_one_rank_saves(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator.split(communicator.rank))
    path = save(mpi_tmp_path / str(communicator.rank), strategy)
    assert path.is_file()
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(metric=mpidist.metrics.Mean())
    with mpidist.CheckpointManager(checkpoint, mpi_tmp_path / f"m{communicator.rank}", 1) as manager:
        assert Path(str(manager.save())).is_file()


def test_the_first_rank_of_a_group_need_not_be_that_of_the_job(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator.split(0, -communicator.rank))
    assert save(mpi_tmp_path, strategy).is_file()
    is_last = communicator.rank == communicator.size - 1
    with strategy.scope():
        assert shows_progress() == is_last
        assert ("does not write" in repr(summary.create_file_writer(mpi_tmp_path / "s"))) != is_last
    assert shows_progress() == (communicator.rank == 0)


def test_of_programs_side_by_side_one_writes(communicator: Communicator, mpi_tmp_path: Path) -> None:
    own = mpi_tmp_path / str(communicator.rank)
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    is_first = launch.world_rank() == 0
    with strategy.scope():
        assert shows_progress() == is_first
        assert writes_summaries(own / "s") == is_first
    assert save(own, strategy).is_file() == is_first


@pytest.mark.mpi(min_size=2)
def test_an_evaluator_prints_and_writes_for_itself(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = communicator.size - 1
    cluster = {"worker": [f"host:{n}" for n in range(workers)], "evaluator": ["host:99"]}
    is_evaluator = communicator.rank == 0
    task = {"type": "evaluator", "index": 0} if is_evaluator else {"type": "worker", "index": communicator.rank - 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    strategy = mpidist.MultiWorkerMirroredStrategy()
    job, is_chief = ("evaluator", True) if is_evaluator else ("worker", communicator.rank == 1)
    assert strategy.num_replicas_in_sync == (1 if is_evaluator else workers)
    for current in (None, strategy):
        with strategy.scope() if current else nullcontext():
            assert first_rank.is_chief() == is_chief
            assert shows_progress() == is_chief
            assert writes_summaries(mpi_tmp_path / f"{job}-{communicator.rank}-{current is None}") == is_chief
    assert save(mpi_tmp_path / job, strategy).is_file()
    # What no strategy has made belongs to this process; the chief of its group saves it.
    path = Path(mpidist.Checkpoint(v=mpidist.Variable(1.0)).save(mpi_tmp_path / f"own-{communicator.rank}" / "c"))
    assert path.is_file() == is_chief
