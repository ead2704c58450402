"""Functions that end their workers, and workers that seem late because others were stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import run_code

pytestmark = pytest.mark.timeout_seconds(180)

FATAL = """
import os, signal
import mpidist
from mpidist.errors import DeadRankError, FatalFunctionError

strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy, max_deaths=9)
with strategy.scope():
    count = mpidist.Variable(0, dtype="int64")

def fatal(number, rate=1.0):
    count.assign_add(100)
    os.kill(os.getpid(), signal.SIGKILL)

def add():
    count.assign_add(1)

def told(call, *arguments, **options):
    try:
        print("no error:", call(*arguments, **options), flush=True)
    except (DeadRankError, FatalFunctionError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)

value = coordinator.schedule(fatal, (7,), {"rate": 0.5}, on_error="keep", max_deaths=2)
for _ in range(20):
    coordinator.schedule(add)
coordinator.join()
told(value.fetch)
print("count", int(count), repr(coordinator), flush=True)
# No worker is left in the end, and another function waits.
value = coordinator.schedule(fatal, (8,), on_error="keep")
other = coordinator.schedule(abs, (value,))
for call in (value.fetch, coordinator.join, coordinator.done, other.fetch):
    told(call)
told(coordinator.schedule, add)
print("and then", int(count), flush=True)
"""
WORKER = r"worker \d \(rank \d, process \d+ on [^)]+\)(: signal 9 \(SIGKILL\))?"


def test_a_function_that_ends_its_workers_fails_and_others_go_on(tmp_path: Path) -> None:
    """And where none is left, every call says so, and which function that was."""
    _, text = run_code(tmp_path, FATAL, ranks=6, kills=True, timeout_seconds=120, MPIDIST_WINDOW="SOCKETS")
    assert re.search(
        r"^FatalFunctionError: function fatal\(7, rate=0\.5\), closure 1, was given up: workers were lost 2 times "
        rf"while they ran it, and `max_deaths` is 2\. Lost: {WORKER}; {WORKER}\. Look in their output",
        text, re.MULTILINE,
    ), text
    assert "count 20 <mpidist.coordinator.ClusterCoordinator of 2 workers>" in text, text
    none_left = (
        r"^DeadRankError: all workers are lost: restart the job, and let it restore the last checkpoint\. Workers "
        rf"were lost while they ran function fatal\(8\), closure 22, Lost: {WORKER}; {WORKER}$"
    )
    assert len(re.findall(none_left, text, re.MULTILINE)) == 5, text
    assert "and then 20" in text, text


STOPS = """
import os, signal, subprocess, sys, threading, time
import mpidist
from tests.helpers.limits import limit
from mpidist.comm.group.opening import open_communicator

group = open_communicator()
processes = group.all_gather_object(os.getpid())
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1))
timeout = limit(1.0)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy, closure_timeout=timeout)
with strategy.scope():
    count = mpidist.Variable(0, dtype="int64")

def add():
    time.sleep(0.1)  # simulates work: before and after a read
    before = int(count.numpy())
    time.sleep(0.1)  # simulates work: a stop comes at any of these
    count.assign_add(1)

class SlowToLoad:
    def __getstate__(self):
        return {"seconds": 1.5 * timeout}
    def __setstate__(self, state):
        time.sleep(state["seconds"])  # simulates work: a model that is read from a slow disk

slow = SlowToLoad()
def use():
    slow
    count.assign_add(1)

chief, server = processes[0], processes[-1]
stops = "".join(f"sleep {timeout / 4:.2f}; kill -STOP {one}; sleep {1.7 * timeout:.2f}; kill -CONT {one};"
                for one in (server, chief))
for _ in range(8):
    coordinator.schedule(add)
coordinator.join()
with subprocess.Popen(["sh", "-c", stops]) as stopping:
    done = 0
    while stopping.poll() is None:
        for _ in range(4):
            coordinator.schedule(add)
        coordinator.join()
        done += 4
    assert stopping.returncode == 0
for worker in range(2):
    coordinator.schedule(use, worker=worker)
coordinator.join()
assert int(count) == 8 + done + 2, (int(count), done)
print("all right", repr(coordinator), flush=True)
"""


def test_who_waits_for_a_stopped_server_or_a_stopped_chief_is_not_late(tmp_path: Path) -> None:
    """Nor who loads for long what a function has captured."""
    result, text = run_code(tmp_path, STOPS, ranks=4, timeout_seconds=150)
    assert "all right <mpidist.coordinator.ClusterCoordinator of 2 workers>" in text, text
    assert result.returncode == 0, text
