"""Preemption on several ranks: whoever is told, all save at the same step, and agree on what comes then."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint import transfer
from mpidist.checkpoint.background import copying
from mpidist.checkpoint.background.save import BackgroundSave
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import LauncherError, RankError, mark_shared
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
from tests.helpers.clocks import SetClock
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out
from tests.parallel.preempting import train_until_preempted

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other rank, and no job of Slurm's, decides when these end."""
    for name in list(os.environ):
        if name.startswith("SLURM_JOB"):
            monkeypatch.delenv(name)
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


def train(
    strategy: ArenaStrategy, folder: str, told: dict[int, int], steps: int = 12, *, clock: SetClock | None = None,
    step_seconds: float = 1.0, **settings: Any,
) -> dict[str, Any]:
    """Train for some steps; `told` has the step at which a rank gets SIGTERM.

    Args:
        strategy: Of the ranks.
        folder: For the checkpoints.
        told: By rank.
        steps: So many at most.
        clock: Of this rank; default: the real one.
        step_seconds: The time of a step by that clock.
        **settings: Of the handler.
    """
    with strategy.scope():
        variable: Any = mpidist.Variable(np.zeros(500, np.float32))
        optimizer = mpidist.optimizers.SGD(1.0)
    optimizer.build([variable])
    ended: list[int] = []
    checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
    config = TerminationConfig(**{"exit_fn": lambda: ended.append(int(optimizer.iterations)), **settings})
    handler = PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, folder, config, clock=clock or time.monotonic
    )
    rank = strategy.communicator.rank
    with handler:
        restored = handler.total_run_calls
        for number in range(steps):
            if told.get(rank) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            handler.run(lambda: optimizer.apply_gradients([(np.ones(500, np.float32), variable)]))
            if clock is not None:
                clock.forward(step_seconds)
            if ended:
                break
    latest = mpidist.latest_checkpoint(folder)
    return {"ended": ended, "restored": restored, "latest": latest, "value": float(variable.numpy()[0])}


@pytest.mark.parametrize(("layout", "who"), [("node", "first"), ("pairs", "all"), ("each", "last")])
def test_all_ranks_save_at_the_same_step(
    communicator: Communicator, mpi_tmp_path: Path, layout: str, who: str
) -> None:
    size = communicator.size
    told = {0: 4} if who == "first" else {size - 1: 4} if who == "last" else {rank: 4 + rank for rank in range(size)}
    strategy = ArenaStrategy(lay_out(communicator, layout))
    result = train(strategy, str(mpi_tmp_path), told)
    # Step 4, counted from 0, is the one that still runs; then the exit function returns, and one step more is made.
    assert result["ended"] == [5]
    assert communicator.all_gather_object(result) == [result] * size
    again = train(strategy, str(mpi_tmp_path), {}, steps=3)
    assert again["restored"] == 5
    assert again["value"] == -8.0 * size


@pytest.mark.parametrize("who", ["all", "last"])
def test_a_save_in_the_background_is_completed_before_the_end(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The signals come while a rank's disk is slow: it is, until the rank waits for its thread."""
    waits, real, wait = threading.Event(), transfer.write_pieces, BackgroundSave.wait_until_written

    def write(*arguments: Any) -> None:
        assert waits.wait(60)
        real(*arguments)

    def wait_until_written(save: BackgroundSave) -> Exception | None:
        waits.set()
        return wait(save)

    if communicator.rank == communicator.size - 1:
        monkeypatch.setattr(copying, "write_pieces", write)
        monkeypatch.setattr(BackgroundSave, "wait_until_written", wait_until_written)
    strategy = ArenaStrategy(communicator)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(900_000))
    ended: list[tuple[str | None, float]] = []
    config = TerminationConfig(
        exit_fn=lambda: ended.append((mpidist.latest_checkpoint(mpi_tmp_path), float(variable.numpy()[0])))
    )
    manager = mpidist.CheckpointManager(mpidist.Checkpoint(v=variable), mpi_tmp_path, 2, background=True)
    with PreemptionCheckpointHandler(strategy.cluster_resolver, manager, termination_config=config) as handler:
        first = handler.run(manager.save)
        assert not os.path.exists(str(first))
        if who == "all" or communicator.rank == communicator.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while not ended:
            handler.run(lambda: variable.assign_add(np.ones(900_000)))
    manager.close()
    (second, value), = ended
    assert second == str(mpi_tmp_path / "ckpt-2.h5")
    assert value > 0
    assert [np.unique(mpidist.load_variable(str(path), "v")).tolist() for path in (first, second)] == [[0.0], [value]]


def test_rank_0s_clock_decides(communicator: Communicator, mpi_tmp_path: Path) -> None:
    """By those of the others the job ends at once, or never."""
    seconds = {0: 1.0, 1: 100.0}.get(communicator.rank, 0.0)
    settings = {"time_limit": 20.5, "save_seconds": 0.01, "save_factor": 1.0}
    result = train(
        ArenaStrategy(communicator), str(mpi_tmp_path), {}, 100, clock=SetClock(), step_seconds=seconds, **settings
    )
    # Two steps are left at 18.5, of which all ranks know a step later.
    assert result["ended"] == [20]


def test_an_end_that_is_no_time_is_an_error_of_every_rank(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if communicator.rank == 0:
        monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    with pytest.raises(LauncherError, match="SLURM_JOB_END_TIME must be a number of seconds since 1970, got 'soon'"):
        train(ArenaStrategy(communicator), str(mpi_tmp_path), {}, 2)


def test_a_call_that_is_taken_back_at_once_ends_no_rank(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that called has seen that others save. Who has heard it, and looks again, joins them."""
    strategy = ArenaStrategy(communicator)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(5, np.float32))
    handler = PreemptionCheckpointHandler(
        strategy.cluster_resolver, mpidist.Checkpoint(variable=variable), str(mpi_tmp_path)
    )
    calling = handler._rescue._calling
    heard: list[int] = []

    def look() -> None:
        if not heard and communicator.rank == communicator.size - 1:
            heard.append(1)
            raise mark_shared(RankError("a call is abandoned: another rank has failed and will not make it"))

    monkeypatch.setattr(calling, "look", look)
    with handler:
        for _ in range(3):
            handler.run(lambda: variable.assign_add(np.ones(5, np.float32)))
    assert handler.total_run_calls == 3
    assert variable.numpy().tolist() == [3] * 5
    assert bool(heard) == (communicator.rank == communicator.size - 1)


@pytest.mark.parametrize("layout", ["node", "pairs", "each"])
@pytest.mark.parametrize("place", ["between", "inside", "behind", "alone"])
def test_a_rank_that_fails_loses_nothing(
    communicator: Communicator, mpi_tmp_path: Path, layout: str, place: str
) -> None:
    """Others look for it before the next step, come out of that, or save already where it alone had the notice."""
    strategy = ArenaStrategy(lay_out(communicator, layout))
    with strategy.scope():
        variable: Any = mpidist.Variable(np.zeros(500, np.float32))
        optimizer = mpidist.optimizers.SGD(1.0)
    optimizer.build([variable])
    checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
    handler = PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, str(mpi_tmp_path))

    is_last = communicator.rank == communicator.size - 1

    def step(number: int) -> None:
        if number == 4 and place in ("inside", "behind"):
            os.kill(os.getpid(), signal.SIGTERM)
        if number == 4 and place == "inside" and is_last:
            raise OSError("a worker has died")
        optimizer.apply_gradients([(np.ones(500, np.float32), variable)])
        if number == 4 and place in ("behind", "alone") and is_last:
            raise OSError("a worker has died")

    def train() -> None:
        for number in range(12):
            if number == 4 and (place == "between" or (place == "alone" and is_last)):
                os.kill(os.getpid(), signal.SIGTERM)
            if number == 5 and place == "between" and is_last:
                raise OSError("a worker has died")
            handler.run(step, number)

    steps = 4 if place == "inside" else 5
    train_until_preempted(handler, train, steps)
    value = float(variable.numpy()[0])
    checkpoint.restore(mpidist.latest_checkpoint(mpi_tmp_path))
    assert float(variable.numpy()[0]) == value == -float(steps * communicator.size)
