"""Workers join from other hosts, also from one that does not reach a server, and one without the program's modules."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.joining import COMMAND
from tests.helpers.launching import end, find_mpirun, finish, is_open_mpi
from tests.helpers.waiting import until_exists
from tests.hosts.virtual_hosts import ROOT, VirtualHosts

pytestmark = pytest.mark.timeout_seconds(150)

Open = Callable[[int], VirtualHosts]

# Worker 1 is killed. Functions go on while joiners come; they are counted.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy as np
import mpidist
import helper
from mpidist.comm.windows.sockets import newcomers as desk
from tests.helpers import marks
from tests.helpers.waiting import until

# Who asks for a place is called once, also at an address that nobody has: for as long as that takes work goes on.
call = desk.call

def call_while_work_goes_on(*arguments):
    with marks.while_work_goes_on(folder / "count"):
        return call(*arguments)

desk.call = call_while_work_goes_on

folder = Path(sys.argv[1])
strategy = mpidist.ParameterServerStrategy(
    mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), join_directory=folder / "job",
    options=mpidist.ServerOptions(heap_bytes=1 << 22, window=mpidist.WindowOptions(silence_seconds=3600)),
)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = mpidist.Variable(np.zeros(30_000, "int64"))

def add():
    before = total.numpy()
    total.assign_add(np.full(30_000, helper.ONE))
    (folder / os.uname().nodename).touch()
    return bool((before == before[0]).all())

def living():
    coordinator.done()
    return int(repr(coordinator).split("of ")[1].split()[0])

def die():
    if mpidist.coordinator.experimental_get_current_worker_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

coordinator.schedule(die, worker=1).fetch()
until(lambda: living() == 1)
values = []
for number in marks.until_put(folder / "stop"):
    marks.put(folder / "count", number)
    values.append(coordinator.schedule(add, worker=0))
    values[-1].fetch()
    if living() > 1:
        values.append(coordinator.schedule(add, worker=1))
coordinator.join()
right = all(coordinator.fetch(values)) and set(total.numpy().tolist()) == {len(values)}
print("right" if right else f"wrong {total.numpy()[:5]} {len(values)}", flush=True)
"""


def start(hosts: VirtualHosts, folder: Path) -> subprocess.Popen[str]:
    """Start a job of chief, two workers and a server, the last one on a host of its own."""
    program = folder / "program" / "program.py"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    (program.parent / "helper.py").write_text("ONE = 1\n")
    hosts.survivors_live = True
    # Hydra ends all ranks of a host with one of them.
    ranks = [3, 1] if is_open_mpi(find_mpirun()) else [1, 1, 1, 1]
    job = hosts.start(ranks, program, folder)
    until_exists(folder / "count", job=job)
    return job


# The others call this worker, and are not there for it; they do not wait for that.
MEETS = """
from mpidist.comm.windows.sockets.joined_window import JoinedWindow
from mpidist.strategy.parameter_server import joined_worker as joined
from tests.helpers import marks
# It gives them up soon, and they have much patience.
read = joined.read
joined.read = lambda place: read(place)._replace(silence_seconds=3.0)
meet = JoinedWindow.meet
def meet_while_work_goes_on(self):
    with marks.while_work_goes_on("{folder}/count"):
        return meet(self)
JoinedWindow.meet = meet_while_work_goes_on
"""
# Nobody has this address.
WALLED = """
from mpidist.strategy.parameter_server import joined_worker as joined
listen = joined.listen
def listen_elsewhere(*arguments):
    listeners, mine = listen(*arguments)
    return listeners, mine._replace(interfaces=("10.213.0.99/24",))
joined.listen = listen_elsewhere
"""


def join(hosts: VirtualHosts, host: str, directory: Path, before: str = "") -> subprocess.Popen[str]:
    """Start a worker on a host, without a launcher. It runs some Python before."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    words = ["env", f"PYTHONPATH={path}", "OMP_NUM_THREADS=1", hosts.python, "-c", before + COMMAND, "worker", "--join"]
    return hosts.execute(host, shlex.join([*words, str(directory)]))


def test_workers_join_from_another_host(virtual_hosts: Open, tmp_path: Path) -> None:
    hosts = virtual_hosts(5)
    job = start(hosts, tmp_path)
    try:
        server = "n2" if is_open_mpi(find_mpirun()) else "n4"
        number = server[1:]
        # The way to the server is cut, and not the one to the chief.
        finish(hosts.execute("n5", f"ip route add blackhole 10.213.0.{number}/32"), "ip", 30)
        refused = finish(join(hosts, "n5", tmp_path / "job", MEETS.format(folder=tmp_path)), "the joiner", 60)
        assert refused.returncode == 1, refused
        assert "this worker cannot reach ps 0 (rank 3, process" in refused.stderr, refused.stderr
        assert "The job continues without it" in refused.stderr, refused.stderr
        finish(hosts.execute("n5", f"ip route del blackhole 10.213.0.{number}/32"), "ip", 30)
        # It reaches all others, and they do not reach it.
        walled = finish(join(hosts, "n5", tmp_path / "job", WALLED), "the joiner", 60)
        assert walled.returncode == 1, walled
        assert "the chief cannot reach process" in walled.stderr, walled.stderr
        # The modules of the program are not there: a function of the first one that gets work cannot run.
        program = tmp_path / "program"
        finish(hosts.execute("n5", f"mount -t tmpfs tmpfs {program}"), "mount", 30)
        lacking = finish(join(hosts, "n5", tmp_path / "job"), "the joiner", 60)
        assert lacking.returncode == 1, lacking
        assert "cannot import here what it needs: No module named 'helper'" in lacking.stderr, lacking.stderr
        finish(hosts.execute("n5", f"umount {program}"), "umount", 30)
        joiner = join(hosts, "n5", tmp_path / "job")
        until_exists(tmp_path / "n5", job=job)
        (tmp_path / "stop").touch()
        result = finish(job, "the job", 60)
        text = result.stdout + result.stderr
        assert "right" in result.stdout, text
        ended = finish(joiner, "the joiner", 30)
        assert (ended.returncode, ended.stderr) == (0, ""), ended
    finally:
        (tmp_path / "stop").touch()
        hosts.close()
        end(job)
