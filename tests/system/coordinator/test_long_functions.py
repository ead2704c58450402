"""Functions that run for long on workers: they are not lost, and who waits for them says where they are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launching import finish, read_until, run_program, start_program
from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(180)

HEAD = """
import ctypes, os, sys
import mpidist

options = mpidist.ServerOptions(heap_bytes=1 << 22, window=mpidist.WindowOptions(silence_seconds=SILENCE))
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count, others = mpidist.Variable(0), mpidist.Variable(0)
# A limit of the chief's waits, and not of the start.
os.environ.update({name[6:]: os.environ[name] for name in os.environ if name.startswith("LATER_")})
"""
# Until the test opens the pipe, or makes the file beside it.
STUCK = {
    "waits in C": "open(path).close()",
    "spins": "while not os.path.exists(path + '.end'): pass",
    "holds the interpreter": "ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)",
}
PROGRAM = HEAD + """
def stuck(path):
    count.assign_add(1)
    LINE

coordinator.schedule(others.assign_add, (1,), worker=0)
coordinator.schedule(stuck, (sys.argv[1],), worker=1)
coordinator.join()
print("applied", int(count), int(others), repr(coordinator))
"""
LINE_NUMBER = PROGRAM[: PROGRAM.index("LINE")].count("\n") + 1
WAITS = r"mpidist: rank 0 of 4 on \S+ has waited \d+ s for functions of workers"
CLOSURE = "closure 2 of stuck, attempt 1"
ADVICE = "MPIDIST_TIMEOUT=SECONDS ends the job"
# The end of a report with its line; an earlier one may have come before the worker, on a busy machine.
STACK = rf'line {LINE_NUMBER},? in stuck(?s:.*){ADVICE}'


def write(folder: Path, how: str) -> tuple[Path, Path]:
    """The program, and its pipe."""
    program, pipe = folder / "program.py", folder / "pipe"
    program.write_text(PROGRAM.replace("LINE", STUCK[how]).replace("SILENCE", "3"))
    os.mkfifo(pipe)
    return program, pipe


def release(pipe: Path) -> None:
    """Let the function go on."""
    Path(f"{pipe}.end").touch()
    # It has a reader, or needs none.
    os.close(os.open(pipe, os.O_RDWR))


@pytest.mark.parametrize("how", STUCK)
def test_who_waits_says_where_a_function_is(tmp_path: Path, how: str) -> None:
    program, pipe = write(tmp_path, how)
    job = start_program(4, program, pipe, MPIDIST_WARN_SECONDS="2")
    text = read_until(job, STACK)
    release(pipe)
    result = finish(job, program.name, 60)
    assert re.search(WAITS + "$", text, re.MULTILINE), text
    assert re.search(rf"worker 1 has run {CLOSURE} for \d+ s:$", text, re.MULTILINE), text
    assert "worker 0 has run" not in text, text
    if how == "holds the interpreter":
        held = r"rank 2 of 4 \(process \d+ on \S+\) holds the interpreter lock \(GIL\), or gets no core"
        assert re.search(held, text), text
    else:
        assert re.search(rf"rank 2 of 4 \(process \d+ on \S+\) runs {CLOSURE}, .+:\d+ in ", text), text
    assert re.search(rf'File "{re.escape(str(program))}", line {LINE_NUMBER},? in stuck', text), text
    # A report ends nothing.
    assert "applied 1 1 <mpidist.coordinator.ClusterCoordinator of 2 workers>" in result.stdout, text + result.stderr
    assert result.returncode == 0, result.stderr


def test_a_time_limit_ends_the_job(tmp_path: Path) -> None:
    """Also where the launcher lets ranks live after others."""
    program, pipe = write(tmp_path, "waits in C")
    result = run_program(4, program, pipe, timeout_seconds=90, kills=True, LATER_MPIDIST_TIMEOUT="3")
    out, errors = result.stdout, result.stderr
    assert result.returncode != 0, out + errors
    assert len(re.findall(WAITS + ", the limit is 3 s, the job ends$", errors, re.MULTILINE)) == 1, out + errors
    assert re.search(rf"worker 1 has run {CLOSURE} for \d+ s:$", errors, re.MULTILINE), errors
    assert re.search(rf"runs {CLOSURE}, \S+program.py:{LINE_NUMBER} in stuck$", errors, re.MULTILINE), errors
    assert "applied" not in out


@pytest.mark.parametrize("sees", [True, False], ids=["job directory", "nothing"])
def test_where_a_function_of_another_host_is(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, sees: bool
) -> None:
    program, pipe = write(tmp_path, "waits in C")
    (tmp_path / "jobs").mkdir()
    job = virtual_hosts(2).start(
        [2, 2], program, pipe, MPIDIST_WARN_SECONDS="3", MPIDIST_JOB_DIR=str(tmp_path / "jobs") if sees else ""
    )
    text = read_until(job, STACK if sees else ADVICE)
    release(pipe)
    result = finish(job, program.name, 90)
    assert re.search(rf"worker 1 has run {CLOSURE} for \d+ s:$", text, re.MULTILINE), text
    seen = rf"rank 2 of 4 .* on n2\) runs {CLOSURE}, \S+program.py:{LINE_NUMBER} in stuck$"
    wanted = seen if sees else "its host shows nothing of it here: MPIDIST_JOB_DIR=DIRECTORY"
    assert re.search(wanted, text, re.MULTILINE), text
    assert "applied 1 1" in result.stdout, text + result.stderr


# Chief and a worker are on the first host, a worker and the server on the second one.
HOLD = HEAD + """
def hold(path):
    with open(path, "a") as file:
        file.write("begun\\n")
    # In C, with the interpreter's lock held.
    ctypes.PyDLL(None).poll(None, 0, 1000 * SECONDS)
    count.assign_add(1)

value = coordinator.schedule(hold, (sys.argv[1],), worker=1)
for _ in range(20):
    coordinator.schedule(others.assign_add, (1,), worker=0)
coordinator.join()
value.fetch()
print("applied", int(count), int(others), repr(coordinator))
"""


# More than twice as long as a host may be silent; and what the library promises by default.
@pytest.mark.parametrize(("seconds", "silence"), [(7, 3), pytest.param(20, 30, marks=pytest.mark.long)])
def test_a_worker_that_holds_the_interpreter_is_not_lost(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, seconds: int, silence: int
) -> None:
    program, begun = tmp_path / "program.py", tmp_path / "begun"
    program.write_text(HOLD.replace("SECONDS", str(seconds)).replace("SILENCE", str(silence)))
    hosts = virtual_hosts(2)
    hosts.survivors_live = True
    result = hosts.run([2, 2], program, begun, timeout_seconds=120)
    text = result.stdout + result.stderr
    assert "applied 1 20 <mpidist.coordinator.ClusterCoordinator of 2 workers>" in text, text
    assert begun.read_text() == "begun\n", text
    assert result.returncode == 0, text
