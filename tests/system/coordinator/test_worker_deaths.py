"""Workers are killed, or stopped and given up and woken, at each step of the protocol: every update counts once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.carrier import EVERY_MOMENT, wait_for_end
from tests.helpers.launching import find_mpirun, is_open_mpi, run_program
from tests.helpers.leftovers import files_left_behind
from tests.helpers.waiting import let_pass, until, until_state

pytestmark = pytest.mark.timeout_seconds(180)

# The moments at which a worker is stopped, and those at which it is killed: two deaths at once end Hydra.
STOPPED_AT = [1, 3, 5, 6, 7, 8, 10, 11, 13]
KILLED_AT = list(range(len(EVERY_MOMENT) - 1))

# Each closure adds another power of 4, so that the digits of a sum say how often each one was applied.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpidist
from mpidist.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server import strategy as parameter_server
from tests.helpers.carrier import EVERY_MOMENT, Carrier, wait_for_end
from tests.helpers.limits import limit

folder, number = Path(sys.argv[1]), int(sys.argv[2])
moments = [EVERY_MOMENT[int(index)] for index in sys.argv[3].split(",")]
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=2)
open_window = parameter_server.open_window

def open_carrier(group, *arguments):
    end = os._exit
    os._exit = lambda code: (folder / f"{group.rank}.code").write_text(str(code)) and end(code)
    (folder / f"{group.rank}.pid").write_text(f"{os.getpid()} {os.getppid()}")
    window = open_window(group, *arguments)
    first = group.size - 2
    name_of = lambda rank: "chief" if rank == 0 else f"worker {rank - 1}" if rank < first else f"ps {rank - first}"
    return Carrier(window, name_of, moments, folder, number)

parameter_server.open_window = open_carrier
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22))
with strategy.scope():
    sums = [mpidist.Variable(np.zeros(5, "int64")) for _ in range(2)]
# One closure may be there at each death.
coordinator = ClusterCoordinator(
    strategy, closure_timeout=limit(1.4) if number == signal.SIGSTOP else None, max_deaths=len(moments) + 1
)

def update(closure):
    seen = [one.numpy() for one in sums]
    for one in sums:
        one.assign_add(np.full(5, 4**closure))
    return closure, seen[0].shape

stops = number == signal.SIGSTOP
# By the first thing that the file names: the process; the second is the launcher's that looks after it.
processes = [[int(pid) for pid in (folder / f"{worker + 1}.pid").read_text().split()] for worker in range(len(moments))]

values = []
for closure in range(len(moments)):
    values.append(coordinator.schedule(update, (closure,), worker=closure))
    if not stops:
        values[-1].fetch()
        wait_for_end(*processes[closure])
if stops:
    # A worker that was stopped after it has finished is found to hang with its next one.
    for worker in range(len(moments)):
        values.append(coordinator.schedule(update, (len(moments) + worker,), worker=worker))
first = coordinator.fetch(values)
# The last one sleeps on, and is ended with the program.
for process, starter in processes[:-1] if stops else ():
    os.kill(process, signal.SIGCONT)
    wait_for_end(process, starter)
values += [coordinator.schedule(update, (len(values) + one,)) for one in range(30 - len(values))]
coordinator.join()
expected = [(closure, (5,)) for closure in range(len(values))]
right = coordinator.fetch(values) == expected and first == expected[:len(first)]
for one in sums:
    digits = [int(one.numpy()[0]) // 4**closure % 4 for closure in range(len(values))]
    right = right and digits == [1] * len(values) and len(set(one.numpy().tolist())) == 1
    print("applied", digits)
print("all right" if right else f"wrong {coordinator.fetch(values)}", repr(coordinator), flush=True)
mpidist.Checkpoint(sums=sums).save(folder / "saved" / "ckpt")
sys.exit(3)
"""


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
@pytest.mark.parametrize(("number", "moments"), [
    (signal.SIGKILL, KILLED_AT), (signal.SIGSTOP, STOPPED_AT),
], ids=["killed", "stopped"])
def test_at_each_step_of_the_protocol(tmp_path: Path, way: str, number: int, moments: list[int]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # Chief, two servers and two workers are left.
    result = run_program(
        len(moments) + 5, program, tmp_path, int(number), ",".join(map(str, moments)), timeout_seconds=120, kills=True,
        MPIDIST_WINDOW=way,
    )
    text = result.stdout + result.stderr
    assert "all right <mpidist.coordinator.ClusterCoordinator of 2 workers>" in text, text
    if number == signal.SIGSTOP:
        assert text.count("lost (`closure_timeout` exceeded, or its connection lost)") == len(moments) - 1, text
    assert (tmp_path / "saved" / "exit-code").read_text() == "3\n"
    last = len(moments) + 4
    survivors = (0, *range(last - 3, last + 1))
    for rank in survivors:
        # The launcher may end before the last rank has.
        until_state(int((tmp_path / f"{rank}.pid").read_text().split()[0]), "X")
    codes = {rank: path.read_text() for rank in survivors if (path := tmp_path / f"{rank}.code").exists()}
    assert codes.pop(0) == "3", text
    assert set(codes.values()) == {"3"}, text
    # Open MPI's launcher counts some dead ranks twice, and then takes the job for ended while the last ranks are about
    # to end (PRRTE 3.0, `prte_state_base_track_procs`).
    assert is_open_mpi(find_mpirun()) or len(codes) == 4, text
    assert files_left_behind() == []


KILLED = """
import os, sys, time
from pathlib import Path
import numpy as np
import mpidist
from mpidist.comm.group.opening import open_communicator
from tests.helpers.limits import limit

folder, count = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"{open_communicator().rank}.pid").write_text(f"{os.getpid()} {os.getppid()}")
options = mpidist.ServerOptions(heap_bytes=96 << 20, slot_bytes=8 * count + (1 << 13))
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=2), options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy, closure_timeout=limit(2.0))
with strategy.scope():
    sums = [mpidist.Variable(np.zeros(count, "int64")) for _ in range(2)]

def update(number):
    for one in sums:
        one.assign_add(np.ones(count, "int64"))
    return number

done, begin = 0, time.monotonic()
# A test that was killed says nothing any more.
while not (folder / "stop").exists() and time.monotonic() < begin + limit(170):
    values = [coordinator.schedule(update, (done + number,)) for number in range(10)]
    try:
        coordinator.join()
    except mpidist.errors.DeadRankError:
        # One worker was not harmed. What keeps it waiting is looked at while it still does (`stuck.examine`).
        while not (folder / "stop").exists() and time.monotonic() < begin + limit(170):
            time.sleep(0.1)
        raise
    assert coordinator.fetch(values) == list(range(done, done + 10))
    done += 10
    (folder / "new").write_text(f"{done} {coordinator!r}")
    os.replace(folder / "new", folder / "done")
right = all((one.numpy() == done).all() for one in sums)
print("right" if right else "wrong", done, flush=True)
"""


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
@pytest.mark.parametrize("count", [5, 500_000], ids=["40 B", "4 MB"])
@pytest.mark.parametrize("seed", range(amount(1, 10)))
def test_at_random_moments(tmp_path: Path, way: str, count: int, seed: int) -> None:
    """Of six workers one is stopped and woken when it was given up, four are killed, and one is left."""
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    chance = random.Random(f"{way} {count} {seed}")

    def progress() -> tuple[int, int]:
        """The closures that are done, and the workers that are left."""
        text = (tmp_path / "done").read_text() if (tmp_path / "done").exists() else "0 of 6 workers"
        return int(text.split()[0]), int(text.split()[-2])

    def harm(job: subprocess.Popen[str]) -> None:
        def wait_for_progress(closures: int, workers: int) -> None:
            goal = progress()[0] + closures
            until(
                lambda: progress()[0] >= goal and progress()[1] <= workers,
                f"{closures} closures are done, and {workers} workers are left", job=job,
            )

        wait_for_progress(10, 6)
        processes = [tuple(map(int, (tmp_path / f"{worker}.pid").read_text().split())) for worker in range(1, 7)]
        zombie, *killed, _ = chance.sample(processes, 6)
        let_pass(chance.uniform(0, 0.3))
        os.kill(zombie[0], signal.SIGSTOP)
        for number, process in enumerate(killed):
            let_pass(chance.uniform(0, 0.3))
            os.kill(process[0], signal.SIGKILL)
            wait_for_end(*process)
            # At least two batches begin after the death; the second one needs the stopped worker to be given up.
            wait_for_progress(30, 4 - number)
        os.kill(zombie[0], signal.SIGCONT)
        wait_for_end(*zombie)
        wait_for_progress(30, 1)
        (tmp_path / "stop").touch()

    result = run_program(9, program, tmp_path, count, kills=True, meanwhile=harm, MPIDIST_WINDOW=way)
    text = result.stdout + result.stderr
    assert "right" in text, text
    assert text.count("lost (`closure_timeout` exceeded, or its connection lost)") == 1, text
    assert files_left_behind() == []
