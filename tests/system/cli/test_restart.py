"""`mpidist run`: a job that dies at any moment starts again, and ends with the bits of one that was not disturbed."""

from __future__ import annotations

import functools
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import NEW_VARIABLES, ROOT, finish, run_program, start_command
from tests.helpers.processes import with_variable
from tests.helpers.selection import seed
from tests.helpers.waiting import until, until_exists
from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(120)

# Each start of it takes the next row of the plan: the rank that something happens to, when, what, and after how long.
TRAINING = """
import ctypes, hashlib, json, os, signal, sys, threading, time
from pathlib import Path
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
plan = json.loads((folder / "plan").read_text())
start = int(os.environ.get("MPIDIST_RUN", "/999").rpartition("/")[2])
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", os.environ.get("SLURM_PROCID", "0"))))
chosen, phase, kind, delay = plan[start] if start < len(plan) else (-1, "", "", 0)

def strike():
    print(f"struck: {kind} in {phase}", file=sys.stderr, flush=True)
    if kind == "exit":
        os._exit(3)
    if kind == "fault":
        ctypes.string_at(0)
    if kind == "launcher":
        from mpidist import launch
        os.kill(launch.launcher_processes()[-1], signal.SIGKILL)
        return
    if kind == "all":
        for path in folder.glob("pid-*"):
            os.kill(int(path.read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

def come_to(name):
    if name == phase and kind == "stop":
        os.environ["MPIDIST_TIMEOUT"] = "1"
    if name == phase and rank in (chosen if isinstance(chosen, list) else [chosen]):
        timer = threading.Timer(delay, strike)
        timer.daemon = True
        timer.start() if delay else strike()

come_to("import")
import numpy as np
import mpidist
come_to("start")
strategy = mpidist.MultiWorkerMirroredStrategy()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
dataset = mpidist.data.Dataset.from_tensor_slices(x).shuffle(512, seed=3).batch(16).repeat()

class History:
    def __init__(self):
        self.losses = []
    def state(self):
        return {"losses": np.array(self.losses)}
    def load_state(self, saved):
        self.losses = saved["losses"].numpy().tolist()

with strategy.scope():
    weight = mpidist.Variable(np.random.default_rng(1).normal(size=(1000,)).astype("float32"))
    optimizer = mpidist.optimizers.Adam(1e-2)
optimizer.build([weight])
batches, history = iter(strategy.experimental_distribute_dataset(dataset)), History()
checkpoint = mpidist.Checkpoint(weight=weight, optimizer=optimizer, batches=batches, history=history)
manager = mpidist.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
come_to("restore")
manager.restore_or_initialize()

def step(batch):
    gradient, = optimizer.gradients([weight])
    gradient[:] = weight.value() * np.float32(batch.sum())
    optimizer.apply_gradients([(gradient, weight)])
    return np.abs(batch).mean()

first = optimizer.iterations
while optimizer.iterations < steps:
    loss = strategy.run(step, (next(batches),))
    history.losses.append(float(strategy.reduce("MEAN", loss, axis=None)))
    if optimizer.iterations == first + 4:
        come_to("step")
        if phase in ("step", "save") and start < len(plan):
            time.sleep(0.01)  # any moment: a strike comes here, or in a later step
    while phase in ("import", "start", "restore", "step", "save") and optimizer.iterations >= first + 12:
        # The end of a launcher is found out late, and a busy machine delays any strike: none may find all steps done.
        signal.pause()
    if optimizer.iterations == first + 6:
        come_to("save")
    if optimizer.iterations % 3 == 0:
        manager.save()
manager.close()
if rank == 0:
    arrays = [weight.numpy(), *(one.numpy() for one in optimizer.variables), np.array(history.losses)]
    digest = hashlib.sha256(b"".join(one.tobytes() for one in arrays)).hexdigest()
    (folder / "result").write_text(json.dumps([digest, int(optimizer.iterations), len(history.losses)]))
come_to("end")
if phase == "end" and kind != "stop":
    time.sleep(delay)  # any moment: a strike comes here, or in the end of MPI
"""
STEPS = 60
COMMAND = "import sys; from mpidist.cli.main import main; sys.argv[0] = 'mpidist'; main()"
PHASES = {"import": 0.05, "start": 0.3, "restore": 0.05, "step": 0.02, "save": 0.01, "end": 0.05}
KINDS = ("kill", "kill", "kill", "exit", "fault", "launcher", "all")


Row = tuple[int | list[int], str, str, float]


@functools.cache
def undisturbed(ranks: int) -> list[object]:
    """What the program ends with where nothing happens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = run_program(ranks, write(folder, []), folder, STEPS)
        assert result.returncode == 0, result.stderr
        return list(json.loads((folder / "result").read_text()))


def write(folder: Path, plan: list[Row], text: str = TRAINING) -> Path:
    """The program and its plan, in a folder."""
    program = folder / "train.py"
    program.write_text(text)
    (folder / "plan").write_text(json.dumps(plan))
    return program


def start_run(*words: object, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `mpidist run`; its files are in a folder of its own."""
    (folder / "jobs").mkdir(exist_ok=True)
    return start_command(
        [sys.executable, "-c", COMMAND, "run", *map(str, words)], MPIDIST_JOB_DIR=str(folder / "jobs"), **environment
    )


def run(*words: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end: then no process and no file of it is left."""
    result = finish(start_run(*words, folder=folder, **environment), "mpidist run", 100)
    assert with_variable(f"MPIDIST_JOB_DIR={folder / 'jobs'}") == []
    assert list((folder / "jobs").iterdir()) == []
    return result


def drawn(count: int, ranks: int, number: int) -> list[Row]:
    """Deaths at random, the last one at the end; every other one in the training, since saves must come in between."""
    chance = random.Random(f"{seed()} {number}")
    rows: list[Row] = []
    for row in range(count):
        phase = chance.choice([*PHASES][: 5 if row % 2 else 0] or ["step", "save"])
        phase = "end" if row == count - 1 else phase
        kind = chance.choice(KINDS)
        if phase in ("import", "start") and kind == "all":
            kind = "kill"
        rows.append((chance.randrange(ranks), phase, kind, chance.uniform(0, PHASES[phase])))
    return rows


@pytest.mark.parametrize("number", range(amount(1, 10)))
def test_deaths_at_random_moments_leave_no_trace(tmp_path: Path, number: int) -> None:
    plan = drawn(5, 2, number)
    result = run("-n", 2, "--max-restarts", 20, write(tmp_path, plan), tmp_path, STEPS, folder=tmp_path)
    assert result.returncode == 0, f"{plan}\n{result.stdout}{result.stderr}"
    assert json.loads((tmp_path / "result").read_text()) == undisturbed(2), plan
    restarts = re.findall(r"mpidist: restart (\d+) of at most 20: (.*); ", result.stderr)
    # A rank that dies after the end of all is no reason to start again.
    assert len(restarts) >= len(plan) - 1, f"{plan}\n{result.stderr}"


def test_a_hang_that_the_watchdog_ends_is_restarted(tmp_path: Path) -> None:
    program = write(tmp_path, [(1, "step", "stop", 0)])
    result = run("-n", 2, program, tmp_path, STEPS, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "result").read_text()) == undisturbed(2)
    assert re.search(
        r"restart 1 of at most 10: rank \d of 2 \(process \d+ on \S+\) has reported that the ranks wait without end; "
        rf"the job continues from {re.escape(str(tmp_path))}/checkpoints/ckpt-\d.h5, after", result.stderr
    ), result.stderr


FAILING = """
import os, sys
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
if strategy.communicator.rank == 1 and os.environ["MPIDIST_RUN"].endswith("/0"):
    raise ValueError("a mistake")
strategy.communicator.barrier()
print("went through", flush=True)
"""


@pytest.mark.parametrize("restarts", [False, True])
def test_an_exception_is_restarted_where_that_is_asked_for(tmp_path: Path, restarts: bool) -> None:
    option = ["--restart-errors"] if restarts else []
    result = run("-n", 2, *option, write(tmp_path, [], FAILING), folder=tmp_path)
    assert result.returncode == (0 if restarts else 1), result.stderr
    assert result.stderr.count("ValueError: a mistake") == (2 if restarts else 1), result.stderr
    assert ("went through" in result.stdout) == restarts


DYING = """
import os, signal, sys
import mpidist
print("started", flush=True)
strategy = mpidist.MultiWorkerMirroredStrategy()
if strategy.communicator.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
strategy.reduce("SUM", 1.0, axis=None)
"""


def test_a_program_that_never_saves_is_restarted_three_times(tmp_path: Path) -> None:
    result = run("-n", 2, write(tmp_path, [], DYING), folder=tmp_path)
    assert result.returncode == 1, result.stderr
    assert result.stdout.count("started") == 8, result.stdout
    assert re.search(
        r"the job ends: rank 1 of 2 \(process \d+ on \S+\) died of signal 9 \(SIGKILL\); it was restarted 3 times and "
        "never saved anything", result.stderr
    ), result.stderr


SIGNALS = """
import os, signal, sys, time
import numpy as np
import mpidist
from pathlib import Path
from mpidist.experimental import PreemptionCheckpointHandler
folder, handles = Path(sys.argv[1]), sys.argv[2] == "handles"
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
with strategy.scope():
    weight = mpidist.Variable(np.zeros(3, "float32"))
if handles:
    handler = PreemptionCheckpointHandler(None, mpidist.Checkpoint(weight=weight), folder / "checkpoints")

def step():
    weight.assign_add(np.ones(3, "float32"))

count = 0
try:
    while True:
        handler.run(strategy.run, step) if handles else strategy.run(step)
        (folder / f"runs-{rank}").touch()
except KeyboardInterrupt:
    print(f"rank {rank} was interrupted", flush=True)
"""


def test_signals_reach_the_ranks_and_the_programs_end_is_that_of_the_run(tmp_path: Path) -> None:
    """Ctrl-C comes to the ranks once, which end in good order; SIGTERM saves and ends with the code for a requeue."""
    program = write(tmp_path, [], SIGNALS)
    for handles, number, code in (("no", signal.SIGINT, 0), ("handles", signal.SIGTERM, 42)):
        folder = tmp_path / handles
        folder.mkdir()
        job = start_run("-n", 2, program, folder, handles, folder=folder)

        def act(job: subprocess.Popen[str], folder: Path = folder, number: int = number) -> None:
            until_exists(folder / "runs-0", job=job)
            until_exists(folder / "runs-1", job=job)
            job.send_signal(number)

        result = finish(job, "mpidist run", 60, act)
        assert result.returncode == code, result.stdout + result.stderr
        assert result.stdout.count("was interrupted") == (0 if code else 2), result.stdout
        assert "restart 1" not in result.stderr
        assert with_variable(f"MPIDIST_JOB_DIR={folder / 'jobs'}") == []


def test_a_run_that_is_killed_takes_its_job_along(tmp_path: Path) -> None:
    """The next run of the directory removes its files."""
    program = write(tmp_path, [], SIGNALS)
    job = start_run("-n", 2, program, tmp_path, "no", folder=tmp_path)

    def act(job: subprocess.Popen[str]) -> None:
        until_exists(tmp_path / "runs-0", job=job)
        job.kill()

    finish(job, "mpidist run", 60, act)
    until(lambda: not with_variable(f"MPIDIST_JOB_DIR={tmp_path / 'jobs'}"), "no process")
    assert len(list((tmp_path / "jobs").iterdir())) == 1
    run("-n", 2, "--restart-errors", write(tmp_path, [], FAILING), folder=tmp_path)


@pytest.mark.timeout_seconds(180)
def test_all_ranks_of_one_of_two_hosts_die(virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path) -> None:
    """The job starts again on both, and no process of it is left on either host."""
    hosts = virtual_hosts(2)
    for name in ("jobs", "alone"):
        (tmp_path / name).mkdir()
    alone = tmp_path / "alone"
    assert hosts.run((2, 2), write(alone, []), alone, STEPS).returncode == 0
    program = write(tmp_path, [([2, 3], "save", "kill", 0.01), (3, "step", "kill", 0)])
    variables = {
        **NEW_VARIABLES, "MPIDIST_JOB_DIR": str(tmp_path / "jobs"), "PYTHONPATH": str(ROOT),
        # How the launchers come to a host; Open MPI's passes no variables on.
        "HYDRA_LAUNCHER_EXEC": str(hosts.shell), "PRTE_MCA_plm_ssh_agent": str(hosts.shell),
        "OMPI_MCA_mpi_yield_when_idle": "1", "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    words = [COMMAND, "run", "-n", 4, "--hosts", "n1,n2", sys.executable, program, tmp_path, STEPS]
    settings = [f"{name}={value}" for name, value in variables.items()]
    line = shlex.join(["env", *settings, sys.executable, "-c", *map(str, words)])
    result = finish(hosts.execute("n1", f"cd {shlex.quote(str(ROOT))} && exec {line}"), "mpidist run", 150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "result").read_text() == (alone / "result").read_text()
    assert len(re.findall("mpidist: restart . of at most 10: ", result.stderr)) == 2, result.stderr
    assert not [line for name in hosts.names for line in hosts.processes(name) if "train.py" in line]
    assert list((tmp_path / "jobs").iterdir()) == []
