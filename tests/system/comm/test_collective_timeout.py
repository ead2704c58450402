"""Collective calls under `timeout_seconds`: who does not come is named, everywhere, and nobody waits for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(150)

HEAD = """
import json, sys, time
import numpy as np
import mpidist
from mpidist.comm.front import arrival
from mpidist.comm.choice import selection
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps
from mpidist.errors import CollectiveTimeoutError, MismatchError
from mpidist.options import CommunicationOptions
from tests.helpers import marks
from tests.helpers.strategies import ArenaStrategy
from tests.helpers.waiting import let_pass, until_waits_in

world = open_communicator()
rank = world.rank
OPTIONS = CommunicationOptions(timeout_seconds=1)
folder = sys.argv[1]

class Clock:
    # What the time limit goes by. While it stands it shows that a moment has passed and no more: however long a busy
    # machine lets a rank wait for one that is on its way, it is not late.
    def __init__(self):
        self.before, self.since, self.stands, self.starts = 0.0, time.perf_counter(), True, False

    def perf_counter(self):
        passed = time.perf_counter() - self.since
        return self.before + (min(passed, 0.1) if self.stands else passed)

    def go(self, stands):
        self.before, self.since, self.stands = self.perf_counter(), time.perf_counter(), stands

    sleep = staticmethod(time.sleep)

clock = arrival.time = Clock()
next_message = arrival.Arrival._next_message

def note_message(self):
    # Those who wait for the late one have met: rank 0 knows of the other one, and that one of rank 0.
    message = next_message(self)
    if clock.starts and message is not None and message[1] in (arrival._HERE, arrival._WAITING):
        clock.starts = False
        clock.go(stands=False)
    return message

arrival.Arrival._next_message = note_message

def attempt(call, waits_for=None):
    # `waits_for` does not come: the clock goes as soon as the two others wait.
    clock.go(stands=waits_for != 0)
    clock.starts = waits_for not in (None, 0)
    begin = time.perf_counter()
    try:
        call()
        kind, text = "none", ""
    except (CollectiveTimeoutError, MismatchError) as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.perf_counter() - begin
    clock.starts = False
    clock.go(stands=True)
    return kind, text, seconds

def when_others_have_given_up(late, make):
    # What a rank makes that is late, or what the others make while it is not there; then all go on.
    if rank == late:
        clock.go(stands=False)
        for other in {0, 1, 2} - {late}:
            marks.read(f"{folder}/{other} has given up")
        return make(None)
    found = make(late)
    marks.put(f"{folder}/{rank} has given up")
    return found

def alone(make):
    # One rank after another: who waited for others here would wait for ever.
    if rank:
        marks.read(f"{folder}/{rank - 1} was alone")
    found = make()
    marks.put(f"{folder}/{rank} was alone")
    return found

def report(*attempts):
    everyone = world.all_gather_object(attempts)
    if rank == 0:
        print("REPORT " + json.dumps(everyone), flush=True)
"""


def run(folder: Path, code: str) -> list[list[tuple[str, str, float]]]:
    """For each rank its attempts: kind and text of the error, and seconds."""
    program = folder / "program.py"
    program.write_text(HEAD + code)
    result = run_program(3, program, folder)
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

ring = CommunicationOptions(timeout_seconds=1, implementation="RING")
collectives = [selection.choose(world, OPTIONS), selection.choose(world, ring), Ops().bind(world, OPTIONS)]
good = [attempt(lambda: collective.all_reduce(np.ones(3))) for _ in range(30) for collective in collectives]
firsts = when_others_have_given_up({late}, lambda waits_for: [
    attempt(lambda: collective.all_reduce(np.ones(5)), waits_for) for collective in collectives
])
afterwards = alone(lambda: [
    *(attempt(lambda: collective.all_reduce(np.ones(5))) for collective in collectives),
    *(attempt(collective.barrier) for collective in collectives),
])
report(*good[-3:], *firsts, *afterwards)
""")
    for rank, attempts in enumerate(everyone):
        for good, first, second, barrier in zip(*(attempts[n : n + 3] for n in (0, 3, 6, 9)), strict=True):
            assert good[0] == "none", good
            assert first[0] == "CollectiveTimeoutError", first
            assert f"all_reduce: rank {late} (host " in first[1]
            assert "did not arrive within 1 s" in first[1]
            assert "call 31 of this collective" in first[1]
            if rank != late:
                # It waits for as long as it was told.
                assert first[2] > 0.9, first
            for again in (second, barrier):
                assert again[0] == "CollectiveTimeoutError", again
                assert "out of step" in again[1]


def test_other_calls_are_named_everywhere(tmp_path: Path) -> None:
    everyone = run(tmp_path, """
collective = selection.choose(world, OPTIONS)
first = attempt(lambda: collective.broadcast(np.ones(5)) if rank == 2 else collective.all_reduce(np.ones(5)))
report(first, alone(lambda: attempt(lambda: collective.all_reduce(np.ones(5)))))
""")
    for first, second in everyone:
        assert first[0] == "MismatchError", first
        assert "all_reduce on ranks 0-1; broadcast from rank on rank 2" in first[1]
        assert second[0] == "CollectiveTimeoutError", second
        assert "out of step" in second[1]


def test_a_step_of_an_optimizer_is_timed_too(tmp_path: Path) -> None:
    everyone = run(tmp_path, """
strategy = ArenaStrategy(world, options=OPTIONS)
with strategy.scope():
    variable = mpidist.Variable(np.zeros(3, "float32"))
    optimizer = mpidist.optimizers.SGD(1.0)
def step():
    optimizer.apply_gradients([(np.ones(3, "float32"), variable)])
good = [attempt(lambda: strategy.run(step)) for _ in range(3)]
late = when_others_have_given_up(1, lambda waits_for: attempt(lambda: strategy.run(step), waits_for))
report(good[-1], late)
""")
    for good, late in everyone:
        assert good[0] == "none", good
        assert late[0] == "CollectiveTimeoutError", late
        assert "rank 1 (host " in late[1]


def test_one_call_alone_may_have_a_time_limit(tmp_path: Path) -> None:
    everyone = run(tmp_path, """
strategy = ArenaStrategy(world)
limited = lambda: strategy.extended.reduce_to("SUM", np.ones(2), "cpu:0", options=OPTIONS)
good = attempt(limited)
if rank == 2:
    # For longer than the limit of the other calls.
    until_waits_in(0, "all_reduce")
    until_waits_in(1, "all_reduce")
    let_pass(1.5)
unlimited = attempt(lambda: strategy.reduce("SUM", np.ones(2), axis=None), 2 if rank != 2 else None)
late = when_others_have_given_up(2, lambda waits_for: attempt(limited, waits_for))
report(good, unlimited, late)
""")
    for good, unlimited, late in everyone:
        assert good[0] == unlimited[0] == "none", (good, unlimited)
        assert late[0] == "CollectiveTimeoutError", late
        assert "rank 2 (host " in late[1]
