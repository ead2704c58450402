"""Children that a program forks while a handler takes signals: what reaches them, and when they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import ROOT, end, finish, launch_environment

SECONDS = 60.0
# A program in a session of its own, so that a signal to its group is nobody else's.
HEAD = """
import multiprocessing, os, select, signal, sys, threading
import numpy as np
import mpidist
from mpidist.experimental import PreemptionCheckpointHandler
folder = sys.argv[1]
variable = mpidist.Variable(np.zeros(3))
handler = PreemptionCheckpointHandler(None, mpidist.Checkpoint(variable=variable), folder)

def child(function, *, in_thread=False):
    # Forks; the child ends after its function.
    numbers = []
    def fork():
        number = os.fork()
        if number == 0:
            try:
                function()
            finally:
                os._exit(0)
        numbers.append(number)
    if in_thread:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    else:
        fork()
    return numbers[0]
"""


def start(folder: Path, code: str, *arguments: object) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(HEAD + code)
    return subprocess.Popen(
        [sys.executable, program, folder / "checkpoints", *map(str, arguments)], start_new_session=True, text=True,
        env={**launch_environment(), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )


POOL = """
def square(number):
    return number ** 2

# Where each worker ends after a task, a thread of the pool forks the next one.
pool = multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1 if sys.argv[3] == "thread" else None)
# With the size of the chunks: else CPython divides by the number of workers, which is 0 where all have just ended.
assert pool.map(square, range(4), 1) == [0, 1, 4, 9]
os.killpg(0, getattr(signal, sys.argv[2]))
for step in range(9):
    def train():
        assert sum(pool.map(square, range(4), 1)) == 14
    handler.run(train)
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
@pytest.mark.parametrize("forks", ["main", "thread"])
def test_a_signal_to_the_group_leaves_the_workers_of_a_pool(tmp_path: Path, name: str, forks: str) -> None:
    result = finish(start(tmp_path, POOL, name, forks), "a pool", SECONDS)
    assert result.returncode == 42, result.stdout + result.stderr
    assert f"the job is about to end ({name}): saved" in result.stderr, result.stderr
    # Nor was a pool that hangs, as its worker is gone, given up for that.
    assert "has failed" not in result.stderr, result.stderr


ALL = """
# Slurm sends it to each process by its number.
pool = multiprocessing.get_context("fork").Pool(2)
for process in pool._pool:
    os.kill(process.pid, signal.SIGUSR1)
assert pool.map(abs, range(4)) == [0, 1, 2, 3]
"""


def test_the_signal_itself_leaves_them_too(tmp_path: Path) -> None:
    result = finish(start(tmp_path, ALL), "a pool", SECONDS)
    assert result.returncode == 0, result.stdout + result.stderr


FAMILY = """
theirs, ours = os.pipe()
answers, answer = os.pipe()

def serve():
    os.close(ours)
    os.write(answer, b"r")
    while os.read(theirs, 1):
        os.write(answer, b"a")
    threading.Event().wait()

number = child(serve, in_thread=sys.argv[2] == "thread")
os.close(theirs)
assert os.read(answers, 1) == b"r"
# It does not end with the thread that has forked it.
os.write(ours, b"?")
assert os.read(answers, 1) == b"a"
print(number, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("forks", ["main", "thread"])
def test_a_child_ends_with_the_program_and_not_before(tmp_path: Path, forks: str) -> None:
    program = start(tmp_path, FAMILY, forks)
    assert program.stdout is not None
    descriptor = -1
    try:
        number = int(program.stdout.readline())
        descriptor = os.pidfd_open(number)
        program.kill()
        # Both hold this stream.
        assert program.stdout.read() == ""
    finally:
        if descriptor != -1:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        end(program)


INTERRUPTED = """
answers, answer = os.pipe()

def serve():
    try:
        os.write(answer, b"r")
        threading.Event().wait()
    except KeyboardInterrupt:
        os.write(answer, b"i")


number = child(serve)
assert os.read(answers, 1) == b"r"
assert os.getpgid(number) == number
if sys.argv[2] == "own":
    signal.signal(signal.SIGINT, lambda *_: None)
try:
    # As a terminal does: to the group of the program.
    os.killpg(0, signal.SIGINT)
    assert os.read(answers, 1) == b"i"
    if sys.argv[2] != "own":
        threading.Event().wait()
except KeyboardInterrupt:
    pass
os.waitpid(number, 0)
print("both", flush=True)
"""


@pytest.mark.parametrize("handler", ["default", "own"])
def test_an_interrupt_reaches_children_whoever_handles_it(tmp_path: Path, handler: str) -> None:
    result = finish(start(tmp_path, INTERRUPTED, handler), "a program that is interrupted", SECONDS)
    assert result.stdout == "both\n", result.stdout + result.stderr


ALONE = """
interrupts, interrupt = os.pipe()
signal.signal(signal.SIGINT, lambda *_: os.write(interrupt, os.getpid().to_bytes(8, "little")))
first = child(lambda: [signal.pause() for _ in iter(int, 1)])
handler.close()
answers, answer = os.pipe()

def take():
    signal.signal(signal.SIGINT, lambda *_: os.write(answer, b"i"))
    os.kill(os.getpid(), signal.SIGINT)

# Forked when no handler listens any more; what wakes the parent would interrupt the first child, and so on.
os.waitpid(child(take), 0)
assert os.read(answers, 1) == b"i"
# The parent's own is handed on, once.
os.kill(os.getpid(), signal.SIGINT)
heard = {int.from_bytes(os.read(interrupts, 8), "little") for _ in range(2)}
os.kill(first, signal.SIGTERM)
print(os.waitpid(first, 0)[1] == signal.SIGTERM, heard == {first, os.getpid()})
os.close(interrupt)
print(os.read(interrupts, 800))
"""


def test_an_interrupt_of_a_child_is_its_own(tmp_path: Path) -> None:
    result = finish(start(tmp_path, ALONE), "a program whose child is interrupted", SECONDS)
    assert result.stdout == "True True\nb''\n", result.stdout + result.stderr


WITHOUT = """
handler.close()
read, write = os.pipe()

def tell():
    is_default = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    os.write(write, f"{os.getpgid(0) == os.getpgid(os.getppid())} {is_default}".encode())

os.waitpid(child(tell), 0)
print(os.read(read, 100).decode())
"""


def test_where_no_handler_listens_a_child_is_as_any_other(tmp_path: Path) -> None:
    result = finish(start(tmp_path, WITHOUT), "a program without a handler", SECONDS)
    assert result.stdout == "True True\n", result.stdout + result.stderr
