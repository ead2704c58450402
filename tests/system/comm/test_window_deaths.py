"""A rank dies while all others read, write and ring: they go on, and nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import end, find_mpirun, is_open_mpi, run_program
from tests.helpers.leftovers import files_left_behind
from tests.helpers.waiting import let_pass, until_exists
from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(180)

RANKS = 4
# Rank 0 serves. Others write ones into their slots, ring, wait for the answer, and look at the sum.
PROGRAM = """
import os, sys, time
import numpy as np
from mpidist.failures import ending
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.windows.window import open_window
from mpidist.options import WindowOptions

count, folder, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
communicator = open_communicator()
ending.tolerate_deaths()
rank, size = communicator.rank, communicator.size
nbytes = 8 * count
window = open_window(communicator, nbytes * size if rank == 0 else 0, WindowOptions(way=way, silence_seconds=3600))
if rank == 0:
    memory = window.memory.view("int64").reshape(size, count)
    memory[:] = 0
communicator.barrier()
with open(os.path.join(folder, f"{rank}.tmp"), "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, os.path.join(folder, f"{rank}.pid"))

def say(text):
    os.write(1, (text + "\\n").encode())

if rank == 0:
    seen, after, lost_at = [0] * size, [0] * size, None
    while not (lost_at and min(after[1:-1]) >= 20):
        found = window.poll(0.1)
        if lost_at is None and window.lost():
            lost_at = time.monotonic()
            assert window.lost() == {size - 1}, window.lost()
            window.forget(size - 1)
        if found is None:
            continue
        sender, message = found
        number = int.from_bytes(message, "little")
        assert number == seen[sender] + 1, (sender, number, seen)
        seen[sender] = number
        memory[0] += memory[sender]
        after[sender] += lost_at is not None
        if min(seen[1:]) >= 5:
            open(os.path.join(folder, "served"), "w").close()
        window.ring(sender, message)
    right = (memory[0] == sum(seen)).all()
    for other in range(1, size - 1):
        window.ring(other, b"stop")
    say(f"served {seen} after {after} right {right}")
    end = time.monotonic() + 1
    while time.monotonic() < end:
        window.poll(0.05)
else:
    ones, total = np.ones(count, "int64"), np.empty(count, "int64")
    number, answer = 0, None
    while answer != b"stop":
        number += 1
        window.put(0, rank * nbytes, ones)
        window.flush(0)
        window.ring(0, number.to_bytes(4, "little"))
        while (found := window.poll(1.0)) is None:
            assert 0 not in window.lost()
        answer = found[1]
        if answer != b"stop":
            assert answer == number.to_bytes(4, "little"), (answer, number)
            window.get(0, 0, total)
            window.flush(0)
            assert total.min() >= number
    say(f"stopped {rank}")
    # Hydra with a proxy for each rank may die of SIGPIPE when two ranks end, and then ends all that are left: the rank
    # whose word counts goes first.
    while 0 not in window.lost():
        window.poll(0.1)
os._exit(0)
"""


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
@pytest.mark.parametrize("count", [5, 500_000], ids=["40 B", "4 MB"])
@pytest.mark.parametrize("seed", range(amount(2, 50)))
def test_the_others_go_on(tmp_path: Path, way: str, count: int, seed: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    seconds = random.Random(f"{way} {count} {seed}").uniform(0.0, 0.5)

    def kill(job: subprocess.Popen[str]) -> None:
        until_exists(tmp_path / "served", job=job)
        let_pass(seconds)
        os.kill(int((tmp_path / f"{RANKS - 1}.pid").read_text()), signal.SIGKILL)

    result = run_program(
        RANKS, program, count, tmp_path, way, timeout_seconds=90, kills=True, meanwhile=kill
    )
    code, out = result.returncode, result.stdout + result.stderr
    served = re.search(r"served \[0, (.*)\] after \[0, (\d+), (\d+), (\d+)\] right True", out)
    assert served is not None, (code, out)
    assert min(int(served[2]), int(served[3])) >= 20, out
    assert out.count("stopped") == RANKS - 2, out
    assert files_left_behind() == []


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
def test_the_others_go_on_on_their_hosts(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, way: str
) -> None:
    """Each rank has a host of its own, and its death is known without silence."""
    open_mpi = is_open_mpi(find_mpirun())
    if open_mpi and way == "RMA":
        pytest.skip("one-sided calls of Open MPI between hosts may end the server when a rank dies: not promised")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    hosts = virtual_hosts(RANKS)
    hosts.survivors_live = True

    def kill(job: subprocess.Popen[str]) -> None:
        until_exists(tmp_path / "served", job=job)
        hosts.kill(RANKS - 1)

    way = "AUTO" if open_mpi else way
    # Silence would never give it up.
    result = hosts.run([1] * RANKS, program, 500, tmp_path, way, timeout_seconds=90, meanwhile=kill)
    out = result.stdout + result.stderr
    served = re.search(r"served \[0, (.*)\] after \[0, (\d+), (\d+), (\d+)\] right True", out)
    assert served is not None, out
    assert out.count("stopped") == RANKS - 2, out


SILENCE = """
import ctypes, os, sys, time
from mpidist.failures import ending
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.windows.window import open_window
from mpidist.options import WindowOptions
from tests.helpers.limits import limit

communicator = open_communicator()
ending.tolerate_deaths()
window = open_window(communicator, 0, WindowOptions(way=sys.argv[1], silence_seconds=2))
if communicator.rank == 1:
    window.ring(0, b"here")
    assert window.poll(limit(60)) == (0, b"sleep")
    # In C, with the interpreter's lock held, for three times as long as a host may be silent.
    ctypes.PyDLL(None).poll(None, 0, 6000)
    window.ring(0, b"awake")
    while True:
        window.poll(1.0)
assert window.poll(limit(60)) == (1, b"here")
window.ring(1, b"sleep")
# More than the kernels of both hosts hold: it is not read for three times as long, either.
window.ring(1, bytes(1 << 26))
while (found := window.poll(0.1)) is None:
    assert not window.lost(), "a rank that holds the interpreter counts as dead"
assert found == (1, b"awake")
open(sys.argv[2], "w").close()
begin = time.monotonic()
while not window.lost() and time.monotonic() - begin < limit(40):
    window.poll(0.1)
    window.ring(1, b"is anybody there?")
with open(f"{sys.argv[3]}.tmp", "w") as file:
    file.write(f"lost {sorted(window.lost())}")
os.rename(file.name, sys.argv[3])
os._exit(0)
"""


@pytest.mark.parametrize("way", ["RMA", "SOCKETS"])
def test_a_host_that_says_nothing_is_lost_and_a_busy_rank_is_not(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, way: str
) -> None:
    program, awake, lost = (tmp_path / name for name in ("program.py", "awake", "lost"))
    program.write_text(SILENCE)
    hosts = virtual_hosts(2)
    hosts.survivors_live = True
    job = hosts.start([1, 1], program, way, awake, lost)
    try:
        until_exists(awake, job=job)
        hosts.cut("n2")
        until_exists(lost, job=job, seconds=80)
    finally:
        # The launcher waits for the host that is gone.
        hosts.close()
        out, errors = end(job)
    assert lost.exists(), out + errors
    assert lost.read_text() == "lost [1]"
