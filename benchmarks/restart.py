"""How long from the death of a rank to the next step, by part, beside a bare mpi4py program and torchrun?

A training with Adam is started by `mpidist run`; one of its ranks is killed, again and again, and the clock runs from
there: once with checkpoints on the disk, once with copies in memory. The bare program has the same number of bytes in a
file of NumPy's, which rank 0 reads and broadcasts, and is started again by a loop around mpirun. PyTorch's is started
by `torchrun --max-restarts`, over gloo. Then the training runs undisturbed for some copies in memory, at the interval
that is chosen, and the share of the time that they take is measured.

python benchmarks/restart.py --ranks 4 --megabytes 120 --json restart.json
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

# Each note of the first rank is one line; `launched` is when the launcher was started.
_HEAD = """
import json, os, sys, time
begun = time.time()
from pathlib import Path
folder, megabytes = Path(sys.argv[1]), float(sys.argv[2])
copies = "copies" in sys.argv
size = int(megabytes * 1e6 / 12)
def tell(rank, **times):
    if rank == 0:
        with open(folder / "notes", "a") as file:
            file.write(json.dumps(times) + "\\n")
def ready(rank):
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
def is_over():
    return (folder / "over").exists()
"""
_TRAINING = _HEAD + """
import numpy as np
import mpidist
imported = time.time()
strategy = mpidist.MultiWorkerMirroredStrategy()
made = time.time()
rank = strategy.communicator.rank
with strategy.scope():
    weight = mpidist.Variable(np.ones(size, "float32"))
    optimizer = mpidist.optimizers.Adam(1e-3)
    count = mpidist.Variable(np.int64(0))
optimizer.build([weight])
checkpoint = mpidist.Checkpoint(weight=weight, optimizer=optimizer, count=count)
IN_MEMORY = dict(step_counter=count, checkpoint_interval=1 << 40)
IN_MEMORY["memory"] = True if "costs" in sys.argv else 1
manager = mpidist.CheckpointManager(checkpoint, folder / "checkpoints", 2, **(IN_MEMORY if copies else {}))
manager.restore_or_initialize()
restored = time.time()
def step():
    gradient, = optimizer.gradients([weight])
    gradient[:] = 1e-3
    optimizer.apply_gradients([(gradient, weight)])
"""
MPIDIST = _TRAINING + """
strategy.run(step)
stepped = time.time()
# Who saves nothing new is not started again and again.
for _ in range(3 if copies else 1):
    count.assign_add(1)
    manager.save()
ready(rank)
strategy.communicator.barrier()
launched = os.stat(os.environ["MPIDIST_RUN"] + "/word").st_mtime
tell(rank, launched=launched, begun=begun, imported=imported, made=made, restored=restored, stepped=stepped)
while not strategy.reduce("SUM", float(is_over()), axis=None):
    time.sleep(0.01)
"""
# The first copy reserves the memory and chooses the interval: the time counts from its end.
COSTS = _TRAINING + """
made, begun, steps, spent = -1, 0.0, 0, 0.0
while made < int(sys.argv[3]):
    strategy.run(step)
    count.assign_add(1)
    steps, began = steps + 1, time.perf_counter()
    has_copied = manager.copy()
    spent += time.perf_counter() - began
    made += has_copied
    if has_copied and not made:
        begun, steps, spent = time.perf_counter(), 0, 0.0
seconds = time.perf_counter() - begun
tell(rank, seconds=seconds, steps=steps, spent=spent)
manager.close()
"""
BARE = _HEAD + """
import numpy as np
imported = time.time()
from mpi4py import MPI
world = MPI.COMM_WORLD
made = time.time()
state = np.ones((3, size), "float32")
if world.rank == 0 and (folder / "state.npy").exists():
    state = np.load(folder / "state.npy")
world.Bcast(state)
restored = time.time()
sums = np.empty(size, "float32")
world.Allreduce(state[0], sums)
stepped = time.time()
if world.rank == 0 and not (folder / "state.npy").exists():
    np.save(folder / "state.npy", state)
ready(world.rank)
world.Barrier()
launched = float((folder / "launched").read_text())
tell(world.rank, launched=launched, begun=begun, imported=imported, made=made, restored=restored, stepped=stepped)
while not world.allreduce(is_over()):
    time.sleep(0.01)
"""
TORCH = _HEAD + """
import torch
import torch.distributed as dist
imported = time.time()
dist.init_process_group("gloo")
made, rank = time.time(), dist.get_rank()
weight = torch.nn.Parameter(torch.ones(size))
optimizer = torch.optim.Adam([weight], lr=1e-3)
file = folder / "state.pt"
has_file = file.exists()
if has_file:
    saved = torch.load(file)
    optimizer.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        weight.copy_(saved["weight"])
restored = time.time()
weight.grad = torch.full((size,), 1e-3)
dist.all_reduce(weight.grad)
optimizer.step()
stepped = time.time()
dist.barrier()
if rank == 0 and not has_file:
    torch.save({"optimizer": optimizer.state_dict(), "weight": weight.data}, file)
ready(rank)
dist.barrier()
tell(rank, launched=begun, begun=begun, imported=imported, made=made, restored=restored, stepped=stepped)
over = torch.zeros(1)
while not over:
    time.sleep(0.01)
    over[0] = is_over()
    dist.all_reduce(over)
"""
# From one time to the next one; torchrun does not end between two starts.
PARTS = {
    "end of the job": "launched", "launcher": "begun", "imports": "imported", "MPI and strategy": "made",
    "restore": "restored", "first step": "stepped",
}
RUN = "import sys; from mpidist.cli.main import main; sys.argv[0] = 'mpidist'; main()"


def mpirun(ranks: int) -> list[str]:
    """The start of a command line."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else "mpirun"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return [program, *([] if "HYDRA" in version else ["--oversubscribe"]), "-n", str(ranks)]


def repeat(line: list[str], folder: Path, environment: Mapping[str, str], output: Any) -> None:
    """Start the bare program again and again, until it ends by itself; a process of its own does this."""
    while not (folder / "over").exists():
        (folder / "launched").write_text(repr(time.time()))
        subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)


@contextmanager
def started(name: str, ranks: int, megabytes: float, folder: Path) -> Iterator[None]:
    """A job that is started again after each death."""
    program = folder / "program.py"
    program.write_text({"mpi4py": BARE, "torchrun": TORCH}.get(name, MPIDIST))
    words = [str(program), str(folder), str(megabytes), *(["copies"] if name == "in memory" else [])]

    def ours() -> list[str]:
        options = ["-n", str(ranks), "--max-restarts", "100", "--restart-errors"]
        return [sys.executable, "-c", RUN, "run", *options, sys.executable, *words]

    lines: dict[str, Callable[[], list[str]]] = {
        "mpidist run": ours, "in memory": ours,
        "mpi4py": lambda: [*mpirun(ranks), sys.executable, *words],
        "torchrun": lambda: [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                             "--max-restarts=100", "--monitor-interval=0.1", *words],
    }
    # PyTorch 2.13 keeps its store over a restart, with the addresses of the dead in it: gloo is refused, or waits.
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if name == "torchrun" else {}
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **store, **os.environ}
    with (folder / "output").open("w") as output:
        if name == "mpi4py":
            looping = os.fork()
            if not looping:
                repeat(lines[name](), folder, environment, output)
                os._exit(0)
            try:
                yield
            finally:
                (folder / "over").touch()
                os.waitpid(looping, 0)
            return
        with subprocess.Popen(
            lines[name](), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as process:
            try:
                yield
            finally:
                (folder / "over").touch()
                process.wait()


def notes(folder: Path, count: int, limit: float = 120.0) -> dict[str, float]:
    """The times of a start, once its first step is done."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        path = folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > count:
            return dict(json.loads(lines[count]))
        time.sleep(0.01)
    raise click.ClickException(f"no start {count} within {limit:g} s:\n{(folder / 'output').read_text()[-3000:]}")


def measure(name: str, ranks: int, megabytes: float, kills: int) -> list[dict[str, float]]:
    """The seconds of each part, after each kill."""
    found = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with started(name, ranks, megabytes, folder):
            notes(folder, 0)
            for number in range(kills):
                rank = 1 + number % (ranks - 1)
                pid = int((folder / f"pid-{rank}").read_text())
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                times = notes(folder, number + 1)
                row, before = {"all": times["stepped"] - killed}, killed
                for part, end in PARTS.items():
                    row[part], before = times[end] - before, times[end]
                found.append(row)
    return found


def cost_of_copies(ranks: int, megabytes: float, copies: int) -> dict[str, float]:
    """The share of an undisturbed training's time that copies in memory take, and the seconds of a step and a copy."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        program = folder / "program.py"
        program.write_text(COSTS)
        words = [str(program), text, str(megabytes), str(copies), "copies", "costs"]
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        line = [sys.executable, "-c", RUN, "run", "-n", str(ranks), sys.executable, *words]
        subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, check=True)
        found = notes(folder, 0)
    seconds, spent = found["seconds"], found["spent"]
    return {
        "share": spent / seconds, "step": (seconds - spent) / found["steps"], "copy": spent / copies,
        "steps between copies": found["steps"] / copies,
    }


@click.command()
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(2))
@click.option("--megabytes", default=120.0, show_default=True, help="Of parameters and Adam's state.")
@click.option("--kills", default=7, show_default=True, help="Of each program.")
@click.option("--copies", default=4, show_default=True, type=click.IntRange(1), help="Whose cost is measured.")
@click.option("--json", "record", type=click.Path(path_type=Path), help="Write the figures to a file.")
def main(ranks: int, megabytes: float, kills: int, copies: int, record: Path | None) -> None:
    """Kill ranks, and print the medians."""
    names = ["mpidist run", "in memory", "mpi4py", *(["torchrun"] if importlib.util.find_spec("torch") else [])]
    figures: dict[str, dict[str, float]] = {}
    click.echo(f"{ranks} ranks, {megabytes:g} MB of state; seconds after the kill of a rank, medians of {kills}")
    columns = ["all", "least", *PARTS]
    click.echo(" ".join([f"{'':12}", *(f"{column:>17}" for column in columns)]))
    for name in names:
        rows = measure(name, ranks, megabytes, kills)
        figures[name] = {part: statistics.median(row[part] for row in rows) for part in rows[0]}
        figures[name]["least"] = min(row["all"] for row in rows)
        click.echo(" ".join([f"{name:12}", *(f"{figures[name][column]:17.2f}" for column in columns)]))
    costs = cost_of_copies(ranks, megabytes, copies)
    click.echo(
        f"copies take {costs['share']:.2%} of the time: {1e3 * costs['copy']:.0f} ms after each "
        f"{costs['steps between copies']:.0f} steps of {1e3 * costs['step']:.1f} ms"
    )
    if record is not None:
        result = {"ranks": ranks, "megabytes": megabytes, "kills": kills, "figures": figures, "copies": costs}
        record.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
