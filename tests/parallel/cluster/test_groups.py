"""Groups of ranks: what an evaluator, alone in its own, hears of the others."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import partial

import pytest

from mpidist import first_rank
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.roles import groups
from mpidist.cluster.roles.placement import place
from mpidist.comm.group.communicator import Communicator
from mpidist.failures.deaths import DeathWatch, Process

pytestmark = pytest.mark.mpi(min_size=2)


def test_an_evaluator_hears_of_the_end_and_of_the_dead(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of its own: whom this test takes for dead is alive for the next one.
    watch = DeathWatch()
    watch.start(lambda: None, lambda _: [])
    monkeypatch.setattr(groups, "WATCH", watch)
    at_end: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", lambda function, *given: at_end.append(partial(function, *given)))
    placement = place(communicator, MPIClusterResolver(communicator, num_evaluators=1))
    group = groups.enter_group(communicator, placement)
    assert not first_rank.training_has_ended()
    communicator.barrier()
    process = Process("elsewhere", 7, "pid:[1]")
    assert len(at_end) == (1 if communicator.rank == 0 else 0)
    for function in at_end:
        watch.note(process, "rank 1 of 9")
        function()
    if placement.task_type == "evaluator":
        while not first_rank.training_has_ended():
            time.sleep(0.01)
        assert watch.dead == {process: "rank 1 of 9"}
    # Once known, it stays so.
    assert first_rank.training_has_ended() == (placement.task_type == "evaluator")
    communicator.barrier()
    group.close()
