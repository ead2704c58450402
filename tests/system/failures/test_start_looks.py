"""What the ranks of a host look at while they wait for one that has not come: one of them looks for all.

The ranks are processes of this test's, without MPI: their launcher is the test itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mpidist.failures.startup import names, ranks
from tests.helpers import marks
from tests.helpers.amounts import amount
from tests.helpers.launching import ROOT, launch_environment
from tests.helpers.limits import limit
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout_seconds(120)

RANK = """
import json, os, sys
from mpidist.comm.group import pages
from mpidist.failures import search
from mpidist.failures.deaths import this_process
from mpidist.failures.startup import looker
from mpidist.failures.watchdog import WATCHDOG
from tests.helpers import marks
from tests.helpers.waiting import until

folder, rank, size, looks = sys.argv[1], *map(int, sys.argv[2:])
counts = {"files": 0, "bytes": 0, "looks": 0}

def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        counts["files"] += 1

def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])

def readlink(path, readlink=os.readlink):
    counts["files"] += 1
    return readlink(path)

class Looks:
    def look(self, now):
        counts["looks"] += 1

marks.put(f"{folder}/ready {rank}")
marks.read(f"{folder}/go")
begin = bytes_read() if os.path.exists("/proc/self/io") else 0
counted = Looks()
calls = pages.begin(this_process("here"), rank, size)
WATCHDOG.look_also(counted.look)
os.readlink = readlink
sys.addaudithook(hook)
with calls.during("starting MPI"):
    # Its watchdog looks meanwhile.
    until(lambda: counts["looks"] > looks, "it has looked")
    files = counts["files"]
    counts["bytes"] = bytes_read() - begin if begin else 0
    marks.put(f"{folder}/counts {rank}", json.dumps({**counts, "files": files}))
    marks.read(f"{folder}/end")
"""
LATE = "from tests.helpers import marks\nimport sys\nmarks.read(sys.argv[1] + '/end')\n"


class Job(NamedTuple):
    """Processes that take this one for their launcher.

    Attributes:
        folder: For marks.
        size: The number of ranks; the last one does not come.
        ranks: Those that come.
    """

    folder: Path
    size: int
    ranks: list[subprocess.Popen[str]]

    def counts(self, what: str) -> int:
        """The sum of what all ranks have counted."""
        return sum(json.loads(marks.read(self.folder / f"counts {rank}"))[what] for rank in range(self.size - 1))


def start(folder: Path, size: int, looks: int) -> Job:
    environment = {
        **launch_environment(), "PYTHONPATH": str(ROOT), "MPIDIST_WARN_SECONDS": "1", "PMI_SIZE": str(size),
        "MPIDIST_TIMEOUT": str(limit(60)),
    }
    program, late = folder / "rank.py", folder / "late.py"
    program.write_text(RANK)
    late.write_text(LATE)
    processes = []
    with (folder / "said").open("w") as said:
        for rank in range(size):
            script = program if rank < size - 1 else late
            processes.append(subprocess.Popen(
                [sys.executable, str(script), str(folder), str(rank), str(size), str(looks)], stderr=said, text=True,
                env={**environment, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)},
            ))
    job = Job(folder, size, processes)
    for rank in range(size - 1):
        marks.read(folder / f"ready {rank}")
    marks.put(folder / "go")
    return job


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    marks.put(tmp_path / "end")
    for job in started:
        for process in job.ranks:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def said(job: Job) -> str:
    return (job.folder / "said").read_text()


@pytest.mark.parametrize("size", [8, 32, *[128] * amount(0, 1)])
def test_the_files_that_a_host_opens_grow_with_its_ranks_and_not_with_their_square(
    tmp_path: Path, jobs: list[Job], size: int
) -> None:
    # Ticks are half a second: reports are due after one second and after three.
    job = start(tmp_path, size, looks=10)
    jobs.append(job)
    files, read = job.counts("files"), job.counts("bytes")
    here = len([name for name in os.listdir("/proc") if name.isdecimal()])
    print(f"{size} ranks: {files} files, {read} bytes, {here} processes of this host")
    assert re.search(rf"rank 0 of {size} on here has waited \d+ s for all ranks", said(job)), said(job)
    assert re.search(rf"rank {size - 1} \(process \d+\) has not reached mpidist yet: \S+ \S*late.py", said(job))
    # One rank looks at all processes, some times; each other one finds that rank, and reads its page.
    assert files < 8 * (here + 15 * size) + 20 * size
    assert read < 8 * (400 * here + 6000 * size)


def _looker_of(job: Job) -> int:
    started = ranks._status(os.getpid()).started
    return names.holder(f"\0mpidist-start-{os.getuid()}-{os.getpid()}-{started}-{job.size}-0")


def test_another_rank_looks_where_the_first_one_is_stopped(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(tmp_path, 4, looks=3)
    jobs.append(job)
    until(lambda: _looker_of(job), "a rank looks for all")
    stopped = _looker_of(job)
    os.kill(stopped, signal.SIGSTOP)
    until(
        lambda: re.search(rf"has waited (?s:.*)rank \d \(process {stopped}\) is stopped", said(job)),
        "the report names the rank that looked",
    )
