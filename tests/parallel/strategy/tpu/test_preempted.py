"""Preemption where replicas have several ranks: all logical devices save at the same step, and no tile is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.group.communicator import Communicator
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
from mpidist.strategy.tpu.context import LogicalReplicaContext
from tests.helpers.amounts import turns
from tests.parallel.preempting import train_until_preempted
from tests.parallel.strategy.tpu.making import make_tpu

pytestmark = pytest.mark.mpi(min_size=2)


def context() -> LogicalReplicaContext:
    """The context of the step that runs."""
    own = mpidist.get_replica_context()
    assert isinstance(own, LogicalReplicaContext)
    return own


def model(strategy: mpidist.TPUStrategy) -> tuple[Any, Any, Any]:
    """A split variable, a replicated one, and their optimizer."""
    devices = strategy.logical_devices.count
    with strategy.scope():
        split = mpidist.Variable(np.zeros((5, 12)), partition_dimensions=[1, devices])
        whole = mpidist.Variable(np.zeros(500, np.float32))
        optimizer = mpidist.optimizers.SGD(1.0, momentum=0.5)
    optimizer.build([split, whole])
    return split, whole, optimizer


@pytest.mark.parametrize(("layout", "devices"), turns((("node", 2), ("pairs", 0), ("each", 2)), 1))
def test_all_logical_devices_save_at_the_same_step(
    communicator: Communicator, mpi_tmp_path: Path, layout: str, devices: int
) -> None:
    size = communicator.size
    count = devices if devices and size % devices == 0 else size
    ended: list[int] = []
    for told in (0, size - 1):
        folder = mpi_tmp_path / str(told)
        with make_tpu(communicator, layout, count) as strategy:
            split, whole, optimizer = model(strategy)
            checkpoint = mpidist.Checkpoint(split=split, whole=whole, optimizer=optimizer)
            config = TerminationConfig(exit_fn=lambda: ended.append(handler.total_run_calls))

            def step(s: Any = split, w: Any = whole, o: Any = optimizer) -> None:
                total = context().logical_all_reduce("SUM", np.ones(3))
                o.apply_gradients([(np.full(s.value().shape, total[0]), s), (np.ones(500, np.float32), w)])

            ended.clear()
            with PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, folder, config) as handler:
                while not ended:
                    if handler.total_run_calls == 3 and communicator.rank == told:
                        os.kill(os.getpid(), signal.SIGTERM)
                    handler.run(strategy.run, step)
            assert ended == [4]
            assert communicator.all_gather_object(ended) == [ended] * size
        # What was saved at the fourth step is there on other logical devices; the fifth one is not.
        with make_tpu(communicator, layout, 1) as strategy:
            split, whole, optimizer = model(strategy)
            mpidist.Checkpoint(split=split, whole=whole, optimizer=optimizer).restore(
                mpidist.latest_checkpoint(folder)
            ).assert_existing_objects_matched()
            replicas = size // count
            # Steps with momentum 0.5: 1, 1.5, 1.75, 1.875 gradients.
            assert whole.numpy().tolist() == [-6.125 * replicas] * 500
            assert split.numpy().tolist() == [[-6.125 * replicas * count] * 12] * 5


# Between nodes a rank that waits for other logical devices waits in MPI.
@pytest.mark.parametrize(
    ("layout", "place"), turns([
        ("node", "between"), ("node", "before"), ("node", "inside"), ("node", "behind"), ("each", "between"),
        ("each", "inside"), ("each", "behind"),
    ], 2, always=[("node", "before")]),
)
def test_a_logical_device_that_fails_loses_nothing(
    communicator: Communicator, mpi_tmp_path: Path, layout: str, place: str
) -> None:
    with make_tpu(communicator, layout) as strategy:
        split, whole, optimizer = model(strategy)
        checkpoint = mpidist.Checkpoint(split=split, whole=whole, optimizer=optimizer)
        handler = PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, mpi_tmp_path)
        is_last = communicator.rank == communicator.size - 1

        # So large that they are not given to MPI, in which a rank would stay.
        array = np.ones(1 << 16)

        def combine() -> None:
            context().logical_all_reduce("SUM", array)
            # Where a replica is not all ranks, others wait in a call of another replica.
            context().all_reduce("SUM", array)

        # In the first calls ranks wait in MPI, where they compare them.
        for _ in range(USUAL.first):
            strategy.run(combine)

        def fail(number: int, here: str) -> None:
            if number == 4 and is_last and place == here:
                raise OSError("a worker has died")

        def step(number: int) -> None:
            if number == 4 and place != "between":
                os.kill(os.getpid(), signal.SIGTERM)
            fail(number, "before")
            combine()
            fail(number, "inside")
            optimizer.apply_gradients([
                (np.ones(split.value().shape), split), (np.ones(500, np.float32), whole),
            ])
            fail(number, "behind")

        def train() -> None:
            for number in range(12):
                if number == 4 and place == "between":
                    os.kill(os.getpid(), signal.SIGTERM)
                if number == 5:
                    fail(4, "between")
                handler.run(strategy.run, step, (number,))

        steps = 4 if place in ("before", "inside") else 5
        train_until_preempted(handler, train, steps)
        expected = sum((2 - 0.5 ** number) for number in range(steps)) * strategy.num_replicas_in_sync
        checkpoint.restore(mpidist.latest_checkpoint(mpi_tmp_path))
        assert whole.numpy().tolist() == [-expected] * 500
        assert split.numpy().tolist() == [[-expected] * 12] * 5
