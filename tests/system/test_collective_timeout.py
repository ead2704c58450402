"""Collective calls under `timeout_seconds`: who does not come is named, everywhere, and nobody waits for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_code
from tests.limits import limit

pytestmark = pytest.mark.timeout_seconds(150)

HEAD = """
import json, sys, time
from pathlib import Path
import numpy as np
import mpidist
from mpidist.comm.choice import selection
from mpidist.comm.communicator import open_communicator
from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps
from mpidist.errors import CollectiveTimeoutError, MismatchError
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy
from tests.limits import limit
from tests.waiting import let_pass, until_exists, until_waits_in

world = open_communicator()
rank = world.rank
# Ranks that come may be late by so much, where other programs run.
LIMIT = limit(0.5)
OPTIONS = CommunicationOptions(timeout_seconds=LIMIT)

def attempt(call):
    begin = time.perf_counter()
    try:
        call()
        kind, text = "none", ""
    except (CollectiveTimeoutError, MismatchError) as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.perf_counter() - begin

def mark(name):
    (Path(sys.argv[1]) / f"{name} {rank}").touch()

def until_others(name, ranks):
    until_exists(*(Path(sys.argv[1]) / f"{name} {one}" for one in ranks))

def report(*attempts):
    everyone = world.all_gather_object(attempts)
    if rank == 0:
        print("REPORT " + json.dumps(everyone), flush=True)
"""


def run(folder: Path, code: str, **environment: Any) -> list[list[tuple[str, str, float]]]:
    """For each rank its attempts: kind and text of the error, and seconds."""
    result, _ = run_code(folder, HEAD + code, folder, **environment)
    reports = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(reports) == 1, result.stdout + result.stderr
    everyone: Any = json.loads(reports[0].removeprefix("REPORT "))
    return [[(kind, text, seconds) for kind, text, seconds in attempts] for attempts in everyone]


@pytest.mark.parametrize("late", [0, 1])
def test_the_late_rank_is_named_everywhere(tmp_path: Path, late: int) -> None:
    everyone = run(tmp_path, f"""
class Ops(CrossDeviceOps):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return self.collective.all_reduce(per_replica_value, reduce_op)

ring = CommunicationOptions(timeout_seconds=LIMIT, implementation="RING")
collectives = [selection.choose(world, OPTIONS), selection.choose(world, ring), Ops().bind(world, OPTIONS)]
good = [attempt(lambda: collective.all_reduce(np.ones(3))) for _ in range(30) for collective in collectives]
others = {{0, 1, 2}} - {{{late}}}
if rank == {late}:
    until_others("firsts", others)
firsts = [attempt(lambda: collective.all_reduce(np.ones(5))) for collective in collectives]
mark("firsts")
until_others("firsts", [{late}])
seconds = [attempt(lambda: collective.all_reduce(np.ones(5))) for collective in collectives]
report(*good[-3:], *firsts, *seconds, *[attempt(collective.barrier) for collective in collectives])
""")
    for rank, attempts in enumerate(everyone):
        for good, first, second, barrier in zip(*(attempts[n : n + 3] for n in (0, 3, 6, 9)), strict=True):
            assert good[0] == "none", good
            assert first[0] == "CollectiveTimeoutError", first
            assert f"all_reduce: rank {late} (host " in first[1]
            assert f"did not arrive within {limit(0.5):g} s" in first[1]
            assert "call 31 of this collective" in first[1]
            if rank != late:
                # It waits for as long as it was told; a rank 0 that is asked first costs some more.
                assert first[2] > 0.9 * limit(0.5), first
            for again in (second, barrier):
                assert again[0] == "CollectiveTimeoutError", again
                assert "no longer meet" in again[1]


def test_other_calls_are_named_everywhere(tmp_path: Path) -> None:
    everyone = run(tmp_path, """
collective = selection.choose(world, OPTIONS)
first = attempt(lambda: collective.broadcast(np.ones(5)) if rank == 2 else collective.all_reduce(np.ones(5)))
report(first, attempt(lambda: collective.all_reduce(np.ones(5))))
""")
    for first, second in everyone:
        assert first[0] == "MismatchError", first
        assert "all_reduce on ranks 0-1; broadcast from rank on rank 2" in first[1]
        assert second[0] == "CollectiveTimeoutError", second
        assert "no longer meet" in second[1], second


def test_a_step_of_an_optimizer_is_timed_too(tmp_path: Path) -> None:
    everyone = run(tmp_path, """
strategy = Strategy(world, options=OPTIONS)
with strategy.scope():
    variable = mpidist.Variable(np.zeros(3, "float32"))
    optimizer = mpidist.optimizers.SGD(1.0)
def step():
    optimizer.apply_gradients([(np.ones(3, "float32"), variable)])
good = [attempt(lambda: strategy.run(step)) for _ in range(3)]
if rank == 1:
    until_others("late", [0, 2])
late = attempt(lambda: strategy.run(step))
mark("late")
until_others("late", [1])
report(good[-1], late)
""")
    for good, late in everyone:
        assert good[0] == "none", good
        assert late[0] == "CollectiveTimeoutError", late
        assert "rank 1 (host " in late[1]


def test_one_call_alone_may_have_a_time_limit(tmp_path: Path) -> None:
    everyone = run(tmp_path, """
strategy = Strategy(world)
limited = lambda: strategy.extended.reduce_to("SUM", np.ones(2), "cpu:0", options=OPTIONS)
good = attempt(limited)
if rank == 2:
    until_waits_in(0, "all_reduce")
    let_pass(LIMIT)
unlimited = attempt(lambda: strategy.reduce("SUM", np.ones(2), axis=None))
if rank == 2:
    until_others("late", [0, 1])
late = attempt(limited)
mark("late")
report(good, unlimited, late)
""")
    for good, unlimited, late in everyone:
        assert good[0] == unlimited[0] == "none", (good, unlimited)
        assert late[0] == "CollectiveTimeoutError", late
        assert "rank 2 (host " in late[1]
