"""The end of a whole host, and a cable that is cut, in a job of equals: the job ends everywhere, and says why.

Nothing here takes the exit code of `mpirun` for success: Open MPI's may be 0 after a host is gone.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import marks
from tests.helpers.launching import end, find_mpirun, finish, is_open_mpi
from tests.helpers.waiting import until_exists
from tests.hosts.virtual_hosts import VirtualHosts
from tests.hosts.waits import until_no_rank_is_left

pytestmark = pytest.mark.timeout_seconds(120)

Open = Callable[[int], VirtualHosts]

LIMIT_SECONDS = 4
PROGRAM = f"""
import itertools, os, sys, threading
import numpy as np
import mpidist
from tests.helpers import marks

folder, wait = sys.argv[1], sys.argv[2]
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
# What a host says behind a cut cable does not come to the launcher.
sys.stderr = open(f"{{folder}}/{{rank}}.log", "w", buffering=1)
os.dup2(sys.stderr.fileno(), 2)

def have_a_limit():
    # Not before the cut: on a busy machine the start, and a step, may take longer.
    marks.read(f"{{folder}}/cut")
    os.environ["MPIDIST_TIMEOUT"] = "{LIMIT_SECONDS}"

with strategy.scope():
    weight = mpidist.Variable(np.zeros(300_000, np.float32))
    optimizer = mpidist.optimizers.SGD(1.0)
gradient = np.ones(300_000, np.float32)
for step in itertools.count():
    if step < 20 or wait == "train":
        strategy.run(optimizer.apply_gradients, ([(gradient, weight)],))   # the line
    if step == 20:
        strategy.communicator.barrier()
        threading.Thread(target=have_a_limit, daemon=True).start()
        marks.put(f"{{folder}}/{{rank}}.trains", os.getpid())
"""


def start(
    hosts: VirtualHosts, ranks: tuple[int, ...], folder: Path, wait: str, **environment: str
) -> subprocess.Popen[str]:
    """Start a job; returns when all its ranks train."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    job = hosts.start(ranks, program, folder, wait, **environment)
    until_exists(*(folder / f"{rank}.trains" for rank in range(sum(ranks))), job=job)
    return job


def said(folder: Path) -> dict[str, str]:
    """What the ranks have said."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*.log"))}


@pytest.mark.parametrize(("what", "wait"), [("ranks", "train"), ("ranks", "compute"), ("host", "train")])
def test_the_end_of_a_host_ends_the_job_everywhere(
    virtual_hosts: Open, tmp_path: Path, what: str, wait: str
) -> None:
    """With the launcher's process there, or without. Without it Open MPI leaves ranks that compute on its own host."""
    hosts = virtual_hosts(3)
    job = start(hosts, (1, 1, 2), tmp_path, wait)
    # -1: all processes of the host, but for its first one and the shell itself. Each host numbers its own.
    numbers = ["-1"] if what == "host" else [(tmp_path / f"{rank}.trains").read_text() for rank in (2, 3)]
    finish(hosts.execute("n3", f"kill -9 {' '.join(numbers)}"), "kill", 60)
    # Those that train, or compute, would do so for ever.
    until_no_rank_is_left(hosts)
    # Its code says nothing: Open MPI's is 0 where a host is gone.
    finish(job, "the job", 60)


def test_a_cut_cable_is_reported_and_ends_the_job(virtual_hosts: Open, tmp_path: Path) -> None:
    hosts = virtual_hosts(3)
    job = start(hosts, (1, 1, 1), tmp_path, "train")
    hosts.cut("n3")
    marks.put(tmp_path / "cut")
    try:
        # Each by itself.
        until_no_rank_is_left(hosts)
        if not is_open_mpi(find_mpirun()):
            finish(job, "the job", 60)
    finally:
        # Open MPI's launcher waits for the host that is gone.
        hosts.close()
        end(job)
    logs = said(tmp_path)
    assert "has waited" in logs["2.log"]
    line = 1 + next(number for number, line in enumerate(PROGRAM.split("\n")) if "# the line" in line)
    told = [
        text for rank, text in enumerate(logs.values())
        if re.search(rf"rank {rank} of 3 on n{rank + 1} has waited .* though all ranks that it sees have arrived", text)
        and re.search(rf"  rank {rank} of 3 on n{rank + 1} waits in .*program.py:{line}", text)
        and "cut off from the network" in text
    ]
    # Behind the cut, and at least one on this side: it may end the others before they speak.
    assert len(told) >= 2, logs


def test_a_launcher_that_looks_after_its_connections_ends_behind_a_cut(virtual_hosts: Open, tmp_path: Path) -> None:
    if not is_open_mpi(find_mpirun()):
        pytest.skip("Hydra ends with the ranks that it reaches")
    hosts = virtual_hosts(3)
    # The host is silent for two seconds, then for two questions.
    for name, value in {"time": 2, "intvl": 1, "probes": 2}.items():
        hosts.launcher_options += ["--prtemca", f"oob_tcp_keepalive_{name}", str(value)]
    job = start(hosts, (1, 1, 1), tmp_path, "train")
    hosts.cut("n3")
    # The connection itself would be given up after a quarter of an hour.
    result = finish(job, "the job", 60)
    text = result.stdout + result.stderr
    assert "lost communication with a remote daemon" in text, text
    until_no_rank_is_left(hosts)
