"""The timeline of a job."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.observe.trace import TIMELINE, join
from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = """
import subprocess, sys
import numpy as np
import mpidist
from tests.helpers.waiting import let_pass, until_waits_in
strategy = mpidist.MultiWorkerMirroredStrategy()
ranks = strategy.communicator
with strategy.scope():
    variable = mpidist.Variable(np.zeros(3, "float32"))
ranks.barrier()
if ranks.rank == 1:
    until_waits_in(0, "barrier")
    until_waits_in(2, "barrier")
    let_pass(1)
ranks.barrier()
mpidist.Checkpoint(v=variable).save(sys.argv[1])
# A child process inherits the variable, and has no part in the timeline.
subprocess.run([sys.executable, "-c", "import mpidist.comm.cross_device.asynchronous"], check=True)
if ranks.rank == 0 and len(sys.argv) > 2:
    raise ValueError("the end")
ranks.barrier()
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    result = run_program(3, program, folder / "saved", *arguments, MPIDIST_TRACE=str(folder / "trace"))
    return result.returncode, result.stdout + result.stderr


def test_a_timeline_has_all_ranks_and_says_who_waited(tmp_path: Path) -> None:
    code, text = run(tmp_path)
    assert code == 0, text
    events = json.loads((tmp_path / "trace" / TIMELINE).read_text())["traceEvents"]
    assert [one["args"]["name"] for one in events if one["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]
    for rank in range(3):
        mine = [one for one in events if one["ph"] == "X" and one["pid"] == rank]
        saves = [one for one in mine if one["name"] == "save"]
        assert len(saves) == 1, text
        numbers = [(one["ts"], one["name"]) for one in mine]
        assert len(numbers) == len(set(numbers))
        assert re.search(r"program.py:16 \(save\)", saves[0]["args"]["where"])
        # What a save consists of lies inside it.
        begin, end = saves[0]["ts"], saves[0]["ts"] + saves[0]["dur"]
        assert any(begin <= one["ts"] <= one["ts"] + one["dur"] <= end for one in mine if one is not saves[0])
    assert text.count("the timeline is") == 1
    for rank in (0, 2):
        waited = re.search(rf"rank {rank} waited .*?([\d.]+) s for rank 1", text)
        assert waited is not None, text
        assert float(waited[1]) > 0.9
    # The late rank itself waited for nobody meanwhile.
    barriers = sorted((one["ts"], one["dur"]) for one in events if (one.get("pid"), one["name"]) == (1, "barrier"))
    assert max(after - begin - lasted for (begin, lasted), (after, _) in itertools.pairwise(barriers)) > 0.9e6, text


SERVED = """
import mpidist
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = mpidist.Variable(0)

def add(amount):
    if amount > 1:
        raise ValueError("too much")
    count.assign_add(amount)

for amount in (1, 1, 2):
    coordinator.schedule(add, (amount,), worker=0, retries=amount - 1, on_error="keep")
coordinator.join()
"""


def test_a_timeline_has_the_closures_of_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVED)
    result = run_program(3, program, MPIDIST_TRACE=str(tmp_path / "trace"))
    assert result.returncode == 0, result.stderr
    events = json.loads((tmp_path / "trace" / TIMELINE).read_text())["traceEvents"]
    added = [one for one in events if one["name"] == "add"]
    assert {one["pid"] for one in added} == {1}, events
    assert [(one["args"]["number"], one["args"]["attempt"]) for one in added] == [(1, 1), (2, 1), (3, 1), (3, 2)]
    for first, second in itertools.pairwise(added):
        assert 0 < first["ts"] <= first["ts"] + first["dur"] <= second["ts"]


def test_who_ran_a_closure_again_has_waited_for_nobody(tmp_path: Path) -> None:
    for rank in range(2):
        line = {
            "rank": rank, "name": "add", "bytes": 0, "begin": rank * 10**9, "end": 4 * 10**9, "where": "", "thread": 1,
            "depth": 0, "communicator": 0, "number": 1, "attempt": 1 + rank,
        }
        (tmp_path / f"rank-{rank}.jsonl").write_text(json.dumps(line) + "\n")
    assert "no rank waited for another one" in join(tmp_path)


def test_a_job_that_ended_badly_has_a_timeline_on_request(tmp_path: Path) -> None:
    code, text = run(tmp_path, "fails")
    assert code != 0, text
    assert "timeline" not in text
    # What was noted before.
    assert len((tmp_path / "trace" / "rank-0.jsonl").read_text().splitlines()) > 1
    for rank in range(3):
        line = {
            "rank": rank, "name": "save", "bytes": 0, "begin": rank * 10**9, "end": 4 * 10**9, "where": "",
            "thread": 1, "depth": 0, "communicator": 5, "number": 1,
        }
        (tmp_path / "trace" / f"rank-{rank}.jsonl").write_text(json.dumps(line) + '\n{"rank": 0, "na')
    command = [sys.executable, "-m", "mpidist.observe.trace", str(tmp_path / "trace")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "rank 0 waited 2.000 s for rank 2" in told
    assert "rank 1 waited 1.000 s for rank 2" in told
