"""Windows of whole programs: where shared memory is small, between hosts, and what the log says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launching import find_mpirun, finish, is_open_mpi, launch_environment, mpirun_command
from tests.hosts.virtual_hosts import VirtualHosts, why_unavailable

pytestmark = pytest.mark.timeout_seconds(120)

SMALL = """
import os
import numpy as np
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.windows.window import open_window
from mpidist.options import WindowOptions

communicator = open_communicator()
first = communicator.rank == 0

def attempt(way, megabytes):
    try:
        window = open_window(communicator, megabytes << 20, WindowOptions(way=way))
    except OSError as error:
        return str(error)
    # Every page: a page that is not there ends the process.
    window.memory[::1024] = 1
    sums = communicator.all_gather_object(int(window.memory[::1024].sum()))
    window.close()
    return f"ones {sums}"

said = [attempt(*one) for one in (("RMA", 50), ("RMA", 40 if first else 0), ("SOCKETS", 50))]
os.write(1, ("|".join([f"rank {communicator.rank}", *said]) + "\\n").encode())
"""


def test_heaps_that_do_not_fit_into_shared_memory_are_an_error(tmp_path: Path) -> None:
    """64 MB is what a container has unless its --shm-size says more. The program goes on, with smaller heaps."""
    if why_unavailable():
        pytest.skip(str(why_unavailable()))
    program = tmp_path / "program.py"
    program.write_text(SMALL)
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    process = subprocess.Popen(
        ["unshare", *user, "--mount", "sh", "-c", inside, "sh", *mpirun_command(2, find_mpirun()), sys.executable,
         str(program)],
        env={**launch_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )
    result = finish(process, program.name, 60)
    for rank in range(2):
        line = re.search(rf"^rank {rank}\|(.*)\|(.*)\|(.*)$", result.stdout, re.MULTILINE)
        assert line is not None, result.stdout + result.stderr
        assert re.search(
            rf"the 2 heaps of its ranks have {100 << 20} bytes together, and \d+ bytes are free\. Give servers smaller",
            line[1],
        ), line[1]
        assert line[2] == f"ones [{40 << 10}, 0]"
        assert line[3] == f"ones [{50 << 10}, {50 << 10}]"


BETWEEN = """
import logging, os, sys
import numpy as np
logging.basicConfig(level=logging.INFO, format="%(message)s")
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.windows.window import open_window
from mpidist.options import WindowOptions

communicator = open_communicator()
rank, size = communicator.rank, communicator.size
window = open_window(communicator, 1 << 22, WindowOptions(way=sys.argv[1], ports=(47000, 47020)))
window.memory[:] = 0
communicator.barrier()
given, back = np.random.default_rng(rank).integers(0, 256, 1 << 20, np.uint8), np.empty(1 << 20, np.uint8)
for other in range(size):
    window.put(other, rank << 20, given)
    window.flush(other)
    window.get(other, rank << 20, back)
    window.flush(other)
    assert (back == given).all()
    window.ring(other, bytes([rank]))
came = []
while len(came) < size:
    found = window.poll(30.0)
    assert found is not None
    came.append(found[0])
for other in range(size):
    expected = np.random.default_rng(other).integers(0, 256, 1 << 20, np.uint8)
    assert (window.memory[other << 20 : (other + 1) << 20] == expected).all()
window.close()
os.write(1, f"right on {rank}\\n".encode())
"""


@pytest.mark.parametrize("way", ["AUTO", "RMA", "SOCKETS"])
def test_ranks_of_several_hosts_share_a_window(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, way: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BETWEEN)
    result = virtual_hosts(2).run([2, 2], program, way, timeout_seconds=90)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert text.count("right on") == 4, text
    taken = re.findall(r"window (\w+): (.*); 4 ranks on 2 hosts", text)
    sockets = "one-sided calls of Open MPI between hosts may end the target when a rank dies"
    automatic = ("SOCKETS", sockets) if is_open_mpi(find_mpirun()) else ("RMA", "the default of this MPI")
    assert taken == [automatic if way == "AUTO" else (way, "asked for")], text
    ports = re.findall(r"window: rank (\d) waits for ranks on other hosts at port (\d+) of ([\d./]+)", text)
    assert sorted(rank for rank, _, _ in ports) == ["0", "1", "2", "3"], text
    assert all(47000 <= int(port) <= 47020 for _, port, _ in ports)
