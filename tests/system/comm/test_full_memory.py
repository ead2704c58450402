"""Shared memory that is full: an error of the coordinator, and nothing is lost; no process dies of SIGBUS."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import find_mpirun, finish, launch_environment, mpirun_command
from tests.hosts.virtual_hosts import why_unavailable

pytestmark = pytest.mark.timeout_seconds(120)


def run_in(megabytes: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that finds so much shared memory."""
    if why_unavailable():
        pytest.skip(str(why_unavailable()))
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = f'mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && exec "$@"'
    process = subprocess.Popen(
        ["unshare", *user, "--mount", "sh", "-c", inside, "sh", *command],
        env={**launch_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )
    return finish(process, "the program", 90)


# Another program takes the memory that the heap has not used yet, but for a megabyte.
PROGRAM = """
import os
import numpy as np
import mpidist

MEGABYTE = 1 << 20
options = mpidist.ServerOptions(heap_bytes=40 * MEGABYTE, slot_bytes=4 * MEGABYTE)
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count, large = mpidist.Variable(0), mpidist.Variable(np.zeros(3 * MEGABYTE, "uint8"))

def grow():
    count.assign_add(1)

def grow_both():
    count.assign_add(1)
    large.assign_add(np.ones(large.shape, "uint8"))

def make():
    with strategy.scope():
        return mpidist.Variable(np.full(2 * MEGABYTE, 7, "uint8"))

def attempt(what, function):
    try:
        return function()
    except MemoryError as error:
        print(f"{what}: {type(error).__name__}: {error}", flush=True)

coordinator.schedule(grow).fetch()
filler = os.open("/dev/shm/filler", os.O_RDWR | os.O_CREAT)
space = os.statvfs("/dev/shm")
os.posix_fallocate(filler, 0, space.f_bavail * space.f_frsize - MEGABYTE)
attempt("variable", make)
attempt("push", lambda: coordinator.schedule(grow_both, on_error="keep").fetch())
attempt("write", lambda: large.assign(np.ones(large.shape, "uint8")))
coordinator.schedule(grow).fetch()
print("meanwhile", int(count), set(large.numpy().tolist()), flush=True)
os.ftruncate(filler, 0)
made = make()
coordinator.schedule(grow_both).fetch()
large.assign(2 * large.numpy())
print("then", int(count), set(large.numpy().tolist()), set(made.numpy().tolist()), flush=True)
"""


def test_memory_that_is_full_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    """64 MB is what a container has unless its --shm-size says more."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_in(64, [*mpirun_command(3, find_mpirun()), sys.executable, str(program)])
    text = result.stdout + result.stderr
    free = r"takes (\d+) bytes that the heap has not used before, and /dev/shm of \S+ has (\d+) bytes free"
    for what, wanted in (("variable", 4 << 20), ("push", 3 << 20), ("write", 3 << 20)):
        said = re.search(rf"^{what}: HeapFullError: .* {free}.*--shm-size", text, re.MULTILINE)
        assert said is not None, text
        # The pages of a slot that are there from the beginning do not count.
        assert wanted - (1 << 17) <= int(said[1]) <= wanted + (1 << 13), text
        # What was asked for in vain has taken nothing of it.
        assert 1 << 19 <= int(said[2]) <= 1 << 20, text
    assert "meanwhile 2 {0}\n" in text, text
    assert "then 3 {2} {7}\n" in text, text
    assert result.returncode == 0, text


# Pages that are taken between the look and the touch.
TAKEN = """
import mmap, os
import numpy as np
from mpidist.parameter_server.heap.layout import HeapFullError
from mpidist.parameter_server.heap.pages import HeapMemory

file = os.open("/dev/shm/heap", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 32 << 20)
memory = np.frombuffer(mmap.mmap(file, 32 << 20), np.uint8)
heap = HeapMemory(memory)
heap._is_shared = False
heap.reserve(100, 1 << 20, "a small part")
memory[100 : 1 << 20] = 5
try:
    heap.reserve(2 << 20, 16 << 20, "a large part")
except HeapFullError as error:
    print(error)
assert set(memory[100 : 1 << 20]) == {5}
"""


def test_the_kernel_says_no_where_touching_a_page_would_end_the_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TAKEN)
    result = run_in(8, [sys.executable, str(program)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"a large part takes {16 << 20} bytes that the heap has not used before"), result
