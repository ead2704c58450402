"""A group is stopped, killed or ends first: the other groups go on, and nothing is lost or counted twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import run_program
from tests.helpers.leftovers import files_left_behind
from tests.helpers.waiting import until_exists

pytestmark = pytest.mark.timeout_seconds(180)

# Gradients do not depend on the parameters: what all groups come to does not depend on who is stopped when.
PROGRAM = """
import atexit, os, sys
from pathlib import Path
import numpy as np
import mpidist
from mpidist.comm.group.opening import open_communicator
from tests.helpers.waiting import until, until_exists

folder, groups, count = Path(sys.argv[1]), eval(sys.argv[2]), int(sys.argv[3])
world = open_communicator()
rank = world.rank

def sent():
    return getattr(strategy.home.exchange, "sent_bytes", 0)

def look(parent=os.getpid()):
    # It was registered first, and comes last. A child that was forked tells nobody that its group leaves.
    if os.getpid() != parent and sent() != before:
        os._exit(3)

atexit.register(look)
strategy = mpidist.HybridStrategy(groups, every=4, outer=mpidist.optimizers.SGD(1.0))
group, n = strategy.group_index, len(strategy.groups)
# Another one that is closed changes nothing, and neither does the end of a child.
mpidist.HybridStrategy(groups).close()
before = sent()
if os.fork() == 0:
    sys.exit(0)
assert os.wait()[1] == 0
with strategy.scope():
    variable = mpidist.Variable(np.zeros(count))
    optimizer = mpidist.optimizers.SGD(0.5)

def train(steps):
    share = np.full(count, (group + 1) / strategy.num_replicas_in_sync)
    for _ in range(steps):
        strategy.run(lambda: optimizer.apply_gradients([(share, variable)]))

def way(steps, of=group):
    return -0.5 * (of + 1) * steps / n

def mark(name):
    (folder / f"{name}.tmp").write_text(str(os.getpid()))
    os.rename(folder / f"{name}.tmp", folder / name)

def say(text):
    os.write(1, (text + "\\n").encode())

train(8)
# The increments of all groups have come everywhere.
strategy.finish()
np.testing.assert_allclose(variable.numpy(), sum(way(8, one) for one in range(n)))
mark(f"ready.{rank}")
"""

STOPPED = """
many = int(sys.argv[4])

def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

if rank == 0:
    until_exists(folder / "stopped")
    train(40)
    before = memory()
    train(many)
    grown = memory() - before
    assert grown < variable.numpy().nbytes, grown
    mark("went on")
    until_exists(folder / "continued")
else:
    until_exists(folder / "stopped")
    train(4)
exchange = strategy.home.exchange
before = exchange.received_count
strategy.finish()
np.testing.assert_allclose(variable.numpy(), way(48 + many, 0) + way(12, 1))
if rank == 1:
    # One increment under way when it stopped, and one that is the sum of all others; a third at a bad moment.
    assert exchange.received_count - before <= 3, exchange.received_count - before
say(f"rank {rank} has all")
"""


@pytest.mark.parametrize("way", ["RMA", "SOCKETS"])
def test_a_group_that_is_stopped_delays_no_other(tmp_path: Path, way: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + STOPPED)

    def stop(job: subprocess.Popen[str]) -> None:
        until_exists(tmp_path / "ready.0", tmp_path / "ready.1", job=job)
        process = int((tmp_path / "ready.1").read_text())
        os.kill(process, signal.SIGSTOP)
        try:
            (tmp_path / "stopped").touch()
            until_exists(tmp_path / "went on", job=job)
        finally:
            os.kill(process, signal.SIGCONT)
        (tmp_path / "continued").touch()

    # The array is more than what kernels and MPI keep of a message that nobody takes; each fourth step sends one.
    steps = amount(100, 400)
    result = run_program(
        2, program, tmp_path, "2", 1 << 20, steps, meanwhile=stop, timeout_seconds=90, MPIDIST_WINDOW=way
    )
    out = result.stdout + result.stderr
    assert result.returncode == 0, out
    assert out.count("has all") == 2, out


KILLED = """
from mpidist.failures.deaths import WATCH

if group == 1:
    # Until it is killed, or its mate was.
    while True:
        train(1)
until(lambda: (train(1), WATCH.dead)[1], "a death is known")
train(8)
exchange = strategy.home.exchange
until(lambda: (train(1), exchange.groups == [0])[1], "the other group has ended")
strategy.finish()
held = variable.numpy()
checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
path = checkpoint.save(folder / "ckpt")
variable.assign(np.zeros(count))
checkpoint.restore(path).assert_consumed()
train(1)
strategy.finish()
# It is a group alone now, whose increments count in full.
np.testing.assert_allclose(variable.numpy(), held - 0.5, rtol=1e-12)
say("group 0 went on")
"""


def test_a_death_ends_its_group_and_no_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + KILLED)

    def kill(job: subprocess.Popen[str]) -> None:
        until_exists(*(tmp_path / f"ready.{rank}" for rank in range(3)), job=job)
        os.kill(int((tmp_path / "ready.2").read_text()), signal.SIGKILL)

    result = run_program(3, program, tmp_path, "[[0],[1,2]]", 1000, kills=True, meanwhile=kill, timeout_seconds=90)
    out = result.stdout + result.stderr
    assert "group 0 went on" in out, out
    # The mate ends, and says why; the survivors say that they go on.
    assert re.search(r"rank 1 of 3 on \S+ cannot continue: rank \d of \d \(process \d+ on \S+\) terminated", out), out
    assert re.search(r"group 1 \(its first rank is process \d+ on \S+\) has ended; group 0 continues", out), out
    assert files_left_behind() == []


ENDS_FIRST = """
if group == 1:
    sys.exit(0)
exchange = strategy.home.exchange
until(lambda: (train(1), exchange.groups == [0])[1], "the other group has left")
strategy.finish()
before = variable.numpy()
train(8)
strategy.finish()
np.testing.assert_allclose(variable.numpy(), before - 4.0)
say("group 0 went on")
"""


def test_a_group_that_ends_first_keeps_no_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + ENDS_FIRST)
    result = run_program(2, program, tmp_path, "2", 1000, timeout_seconds=60)
    out = result.stdout + result.stderr
    assert result.returncode == 0, out
    assert "group 0 went on" in out, out
    assert "cannot continue" not in out


LEAVES = """
import signal
from mpidist.errors import InterruptedCallError

class Left(Exception):
    pass

def leave(*_):
    raise Left

if group == 1:
    train(1)
    signal.signal(signal.SIGALRM, leave)
    calls = [strategy.finish, strategy.finish, lambda: mpidist.Checkpoint(v=variable).save(folder / "ckpt"),
             lambda: train(1)]
    for number, call in enumerate(calls):
        # The other group does not come: the first call waits, and so would one that is not refused.
        signal.setitimer(signal.ITIMER_REAL, 20 if number else 0.3)
        try:
            call()
        except Left:
            say("left")
            if number:
                break
        except InterruptedCallError as error:
            assert "finish was left in the middle by Left" in str(error), error
            say("refused")
    sys.exit(0)
exchange = strategy.home.exchange
until(lambda: (train(1), exchange.groups == [0])[1], "the other group has ended")
strategy.finish()
say("group 0 went on")
"""


def test_an_exception_that_leaves_a_meeting_refuses_what_follows(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + LEAVES)
    result = run_program(2, program, tmp_path, "2", 1000, timeout_seconds=60)
    out = result.stdout + result.stderr
    assert out.count("left\n") == 1, out
    assert out.count("refused") == 3, out
    assert "group 0 went on" in out, out
