"""Children that a worker's function, or the program on the chief, has forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(120)

# In a process that has imported little: a child of one with other libraries' threads may wait for these for ever.
PROGRAM = """
import os
import mpidist

options = mpidist.ServerOptions(heap_bytes=1 << 20, slot_bytes=1 << 16)
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = mpidist.Variable(0)

def step():
    ours, childs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            count.assign_add(100)
        except RuntimeError as error:
            os.write(childs, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(childs)
    count.assign_add(1)
    with open(ours) as said:
        return said.read()

print("a worker's:", coordinator.schedule(step).fetch(), int(count), flush=True)
# One of the chief's, with the thread in the background that takes messages.
for _ in range(20):
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (count.numpy, lambda: count.assign(7), lambda: coordinator.schedule(step).fetch()):
            try:
                use()
            except RuntimeError as error:
                refused += "this process was forked" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print("the chief's:", int(count), flush=True)
"""


# They come out of the function as if they were the worker.
LEAVING = """
import os, sys
import mpidist

options = mpidist.ServerOptions(heap_bytes=1 << 20, slot_bytes=1 << 16)
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)

def fork(way):
    child = os.fork()
    if child == 0:
        if way == "raises":
            raise ValueError("the child's")
        if way == "exits":
            sys.exit(3)
        return "a child's"
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([coordinator.schedule(fork, (way,)).fetch() for way in ("returns", "raises", "exits")], flush=True)
values = coordinator.create_per_worker_value(fork, ("exits",))
print(coordinator.schedule(lambda value: value, (values,)).fetch(), flush=True)
"""


def test_they_end_with_the_function_that_has_forked_them(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEAVING)
    result = run_program(3, program)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert "[0, 1, 3]\n3\n" in result.stdout, text
    assert "ValueError: the child's" in result.stderr, text


def test_they_take_part_in_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_program(3, program)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    _, _, said = result.stdout.partition("a worker's: ")
    assert "this process was forked from a rank of a job" in said, text
    assert said.partition("\n")[0].endswith(" 1"), text
    assert "the chief's: 1\n" in said, text
