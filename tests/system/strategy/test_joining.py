"""Workers join a running job in the place of lost ones: `mpidist worker --join`, also where joiners are killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from mpidist.comm.windows.sockets.join_file import NAME
from tests.helpers.joining import join, refusal
from tests.helpers.launching import finish, run_program, start_command, start_program
from tests.helpers.leftovers import files_left_behind
from tests.helpers.waiting import until_exists

pytestmark = pytest.mark.timeout_seconds(150)


def begin(servers: int, silence_seconds: float = 30.0) -> str:
    """The beginning of a program that workers may join; its first argument is a folder."""
    return f"""
import json, os, signal, sys
from pathlib import Path
import numpy as np
import mpidist
from tests.helpers import marks
from tests.helpers.waiting import until

folder = Path(sys.argv[1])
strategy = mpidist.ParameterServerStrategy(
    mpidist.cluster_resolver.MPIClusterResolver(num_ps={servers}), join_directory=folder / "job",
    options=mpidist.ServerOptions(heap_bytes=1 << 22, window=mpidist.WindowOptions(silence_seconds={silence_seconds})),
)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
"""


PATIENT = """
from mpidist.comm.windows.sockets import newcomers as desk
from mpidist.comm.windows.sockets import listener as door
from mpidist.comm.windows.sockets import handshake

for module in desk, door, handshake:
    module.LIMIT_SECONDS = 3600.0
handshake.admit.__defaults__ = (3600.0,)
"""

# The moments at which a joiner is killed: it has ...
STEPS = (
    "read",  # ... read the file
    "connected",  # ... a connection to the chief
    "greeted",  # ... said half of its handshake
    "authenticated",  # ... proved itself, and not said who it is
    "asked",  # ... asked for a place, and has not read the answer
    "welcomed",  # ... a rank, and no connection to a server
    "met",  # ... all connections, and has not told that it joins
    "joined",  # ... told it
    "Define",  # ... been sent its first function
    "Do",  # ... been sent its first closure
    "put",  # ... pushed a part of it
    "Push",  # ... said so to a server
    "Finished",  # ... said so to the chief
)

# A nursery of joiners: each is a child that stays at a step until others have run functions, and then kills itself.
JOINERS = """
import os, signal, sys
from mpidist.comm.windows.sockets import joined_window as window_module
from mpidist.parameter_server.protocol import endpoint as station
from mpidist.strategy.parameter_server import joined_worker as joined
from tests.helpers import marks

directory, steps = sys.argv[1], sys.argv[2].split(",")

def die():
    with marks.while_work_goes_on(os.path.dirname(directory) + "/count"):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

def before(module, name):
    call = getattr(module, name)
    setattr(module, name, lambda *arguments, **named: die())

def after(module, name):
    call = getattr(module, name)
    def act(*arguments, **named):
        call(*arguments, **named)
        die()
    setattr(module, name, act)

def taken(kind):
    take = joined.Worker.take
    def act(self, sender, message):
        if type(message).__name__ == kind:
            die()
        return take(self, sender, message)
    joined.Worker.take = act

def sent(kind):
    send = station.Station.send
    def act(self, one):
        send(self, one)
        if type(one.message).__name__ == kind:
            die()
    station.Station.send = act

PLANS = {
    "read": lambda: before(joined, "connect"),
    "connected": lambda: before(joined, "greet"),
    "greeted": lambda: after(sys.modules["mpidist.comm.windows.sockets.handshake"], "send"),
    "authenticated": lambda: before(joined, "ask"),
    "asked": lambda: after(sys.modules["mpidist.comm.windows.sockets.newcomers"], "send"),
    "welcomed": lambda: before(joined.JoinedWindow, "meet"),
    "met": lambda: after(joined.JoinedWindow, "meet"),
    "joined": lambda: after(joined, "JoinedStrategy"),
    "Define": lambda: taken("Define"),
    "Do": lambda: taken("Do"),
    "put": lambda: after(joined.JoinedWindow, "put"),
    "Push": lambda: sent("Push"),
    "Finished": lambda: sent("Finished"),
}
for step in steps:
    child = os.fork()
    if not child:
        PLANS[step]()
        joined.work(directory)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        sys.exit(f"the joiner at {step!r} ended with {status}")
"""

# Worker 1 is killed. The functions of worker 0 are counted while joiners come and die. Who waited for a joiner would
# wait for ever.
PROGRAM = PATIENT + begin(2, silence_seconds=3600.0) + """with strategy.scope():
    sums = [mpidist.Variable(np.zeros(5, "int64")) for _ in range(2)]
names = coordinator.create_per_worker_value(lambda: f"value of {os.getpid()}")

def add(name):
    seen = sums[0].numpy()
    for one in sums:
        one.assign_add(np.ones(5, "int64"))
    (folder / f"{os.getpid()}.ran").touch()
    return os.getpid(), mpidist.coordinator.experimental_get_current_worker_index(), name

victim = coordinator.schedule(os.getpid, worker=1).fetch()
os.kill(victim, signal.SIGKILL)
count, rest = 0, []
for _ in marks.until_put(folder / "stop"):
    mine = coordinator.schedule(add, (names,), worker=0)
    if (folder / "begin").exists():
        rest.append(coordinator.schedule(add, (names,), worker=1))
    mine.fetch()
    count += 1
    marks.put(folder / "count", count)
coordinator.join()
ends = coordinator.fetch(rest)
(folder / "seen").write_text(json.dumps(ends))
right = all((one.numpy() == count + len(rest)).all() for one in sums)
right = right and all(name == f"value of {pid}" for pid, _, name in ends)
print("right" if right else f"wrong {[one.numpy() for one in sums]} {ends}", count, len(rest))
print(repr(coordinator), flush=True)
sys.exit(5)
"""


def test_a_killed_worker_is_replaced_though_joiners_die_at_each_step(tmp_path: Path) -> None:
    program, joiners, directory = tmp_path / "program.py", tmp_path / "joiners.py", tmp_path / "job"
    program.write_text(PROGRAM)
    joiners.write_text(JOINERS)
    job = start_program(5, program, tmp_path, kills=True)
    try:
        until_exists(directory / NAME, job=job)
        assert (directory / NAME).stat().st_mode & 0o777 == 0o600
        early = STEPS.index("Do")
        for steps in STEPS[:early], STEPS[early:]:
            if steps[0] == "Do":
                # From now on functions wait for the place that is free.
                (tmp_path / "begin").touch()
            nursery = start_command([sys.executable, str(joiners), str(directory), ",".join(steps)])
            result = finish(nursery, "the nursery", 100)
            assert result.returncode == 0, result.stdout + result.stderr
        # One lives: it has the place, and does the work.
        joiner = join(directory)
        until_exists(tmp_path / f"{joiner.pid}.ran", job=job)
        (tmp_path / "stop").touch()
        result = finish(job, program.name, 60)
        text = result.stdout + result.stderr
        assert "right" in result.stdout, text
        seen = json.loads((tmp_path / "seen").read_text())
        assert [joiner.pid, 1, f"value of {joiner.pid}"] in seen, (joiner.pid, seen)
        ended = finish(joiner, "the joiner", 30)
        assert ended.returncode == 5, ended.stderr
        assert ended.stderr == ""
        assert not (directory / NAME).exists()
    finally:
        (tmp_path / "stop").touch()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert files_left_behind() == []


# All workers live, until the program goes on.
LIVING = begin(1) + """coordinator.schedule(abs, (-1,)).fetch()
(folder / "begun").touch()
marks.read(folder / "stop")
print("value", coordinator.schedule(abs, (-2,)).fetch())
"""


def test_who_is_refused_is_told_why_in_one_line(tmp_path: Path) -> None:
    program, directory = tmp_path / "program.py", tmp_path / "job"
    program.write_text(LIVING)
    assert "no job waits for workers in" in refusal(join(tmp_path))
    job = start_program(3, program, tmp_path)
    try:
        until_exists(tmp_path / "begun", job=job)
        path = directory / NAME
        written = json.loads(path.read_text())
        assert "no place is free: all 1 workers of the job are running" in refusal(join(directory))
        old = join(
            directory, "from mpidist.strategy.parameter_server import joined_worker; joined_worker.PYTHON = '2.7'"
        )
        assert "and Python 2.7: functions are sent as Python's own code" in refusal(old)
        for change, text in (
            ({"secret": "00" * 32}, "it does not know the secret of the window"),
            ({"version": "0.0.1"}, "runs mpidist 0.0.1, and this worker is mpidist"),
        ):
            other = tmp_path / "other" / NAME
            other.parent.mkdir(exist_ok=True)
            other.touch(mode=0o600)
            other.write_text(json.dumps({**written, **change}))
            assert text in refusal(join(other.parent))
    finally:
        (tmp_path / "stop").touch()
        result = finish(job, program.name, 60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "value 2" in result.stdout
    assert not path.exists()
    # Another one is left behind, as of a job that was killed.
    path.touch(mode=0o600)
    path.write_text(json.dumps(written))
    assert f"has ended; its chief was process {written['process']} on" in refusal(join(directory))


def test_a_directory_of_a_job_that_goes_on_or_of_others_is_everybodys_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import sys
import mpidist

resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
def make(text, **options):
    try:
        mpidist.ParameterServerStrategy(
            resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22, **options), join_directory=sys.argv[1],
            serve=False,
        )
    except (OSError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError("no error")

make("in which nobody else may write")
make("needs the way SOCKETS, got WindowOptions(way='RMA')", window=mpidist.WindowOptions(way="RMA"))
print("all right", flush=True)
""")
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    result = run_program(3, program, directory)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("all right") == 3, result.stdout


# Worker 1 is killed in the middle of its data, when a function has read an element: that function is run again on
# another worker, with an element of that one, and its own is read again by who joins. Each counts what it has read.
READING = begin(1) + """with strategy.scope():
    counts = mpidist.Variable(np.zeros(40, "int64"))

def data(context):
    elements = mpidist.data.Dataset.from_tensor_slices(np.arange(40))
    return elements.shard(context.num_input_pipelines, context.input_pipeline_id)

def count(batches):
    element = int(next(batches))
    counts.assign_add(np.eye(40, dtype="int64")[element])
    return element

def dies_once(batches):
    element = count(batches)
    if not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return element

batches = iter(coordinator.create_per_worker_dataset(data))
read = coordinator.fetch([coordinator.schedule(count, (batches,), worker=1) for _ in range(5)])
again = coordinator.schedule(dies_once, (batches,), worker=1)
for many in (1, 2):
    until(lambda: [coordinator.done()] and repr(coordinator).endswith(f"of {many} workers>"))
assert again.fetch() == 0
read += coordinator.fetch([coordinator.schedule(count, (batches,), worker=1) for _ in range(5)])
left = sorted(map(tuple, batches.state()["parts"].tolist()))
while not batches.is_at_end:
    for _ in range(20):
        coordinator.schedule(count, (batches,))
    coordinator.join()
print("read", read, "left", left, "counts", counts.numpy().tolist(), flush=True)
"""


def test_a_joiner_reads_on_where_the_worker_before_has_stopped(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(READING)
    job = start_program(4, program, tmp_path, kills=True)
    try:
        until_exists(tmp_path / "killed", job=job)
        joiner = join(tmp_path / "job")
        result = finish(job, program.name, 60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    ended = finish(joiner, "the joiner", 30)
    assert (ended.returncode, ended.stderr) == (0, "")
    text = result.stdout + result.stderr
    assert f"read {list(range(1, 20, 2))} left" in result.stdout, text
    assert f"counts {[1] * 40}" in result.stdout, text
