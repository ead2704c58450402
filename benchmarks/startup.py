"""How long do ranks take to a strategy, and how much memory, beside mpi4py and NumPy alone?

The parent starts each program with mpirun, by turns, and the clock runs from there until all ranks have met. Memory is
what each rank has for itself alone (private pages) and its part of what it shares (Pss).

python benchmarks/startup.py --ranks 64 --json startup.json
python benchmarks/startup.py --ranks 256 --rounds 1 --work            # also steps and a save, beside bare calls of MPI
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

_MEET = """
import json, sys, time
MPI.COMM_WORLD.Barrier()
end = time.time()
phases = {}

def phase(name, call, times=1):
    begin = time.time()
    for _ in range(times):
        call()
    MPI.COMM_WORLD.Barrier()
    phases[name] = time.time() - begin

if len(sys.argv) > 1:
    work(sys.argv[1], phase)
memory = {"Private_Clean": 0, "Private_Dirty": 0, "Pss": 0}
for line in open("/proc/self/smaps_rollup"):
    name = line.split(":")[0]
    if name in memory:
        memory[name] = int(line.split()[1]) / 1024
# Before any rank ends: pages are shared by fewer then.
MPI.COMM_WORLD.Barrier()
told = MPI.COMM_WORLD.gather((memory["Private_Clean"] + memory["Private_Dirty"], memory["Pss"]))
if told:
    own, parts = zip(*told)
    print("figures", json.dumps({"end": end, "own": sum(own) / len(own), "part": sum(parts) / len(parts),
                                "phases": phases}), flush=True)
"""
_BARE_WORK = """
import numpy

def work(folder, phase):
    array = numpy.ones(10240, numpy.float32)

    def call():
        MPI.COMM_WORLD.Barrier()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)

    phase("20 all-reduces", lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array), 20)
    phase("10 barriers and all-reduces", call, 10)
"""
_WORK = """
import numpy

def work(folder, phase):
    made = []

    def make():
        with strategy.scope():
            made[:] = mpidist.Variable(numpy.zeros(10240, numpy.float32)), mpidist.optimizers.Adam(1e-3)

    phase("variables", make)
    variable, optimizer = made
    gradients = [(numpy.ones(10240, numpy.float32), variable)]
    step = lambda: strategy.run(optimizer.apply_gradients, (gradients,))
    phase("first step", step)
    phase("10 steps", step, 10)
    phase("10 reduces", lambda: strategy.reduce("SUM", numpy.float32(1), axis=None), 10)
    checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
    phase("first save", lambda: checkpoint.save(folder + "/checkpoint"))
    phase("save", lambda: checkpoint.save(folder + "/checkpoint"))
"""
_STRATEGY = "import mpidist\nstrategy = mpidist.MultiWorkerMirroredStrategy()\nfrom mpi4py import MPI\n"
PROGRAMS = {
    "mpi4py and NumPy": f"import numpy\nfrom mpi4py import MPI\n{_BARE_WORK}{_MEET}",
    "mpidist": f"{_STRATEGY}{_WORK}{_MEET}",
}


def measure(ranks: int, code: str, *, works: bool = False) -> dict[str, float]:
    """The seconds until all ranks of a program have met, and the megabytes of a rank.

    Args:
        ranks: Their number.
        code: The program.
        works: Whether it works then; with the seconds of what it does.
    """
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else "mpirun"
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    # The others are installed with their compiled code. The first round, which does not count, compiles mpidist's.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    options = [] if "HYDRA" in version else ["--oversubscribe"]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        run = subprocess.run(
            [mpirun, *options, "-n", str(ranks), sys.executable, "-c", code, *([folder] if works else [])],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )
    lines = [line for line in run.stdout.splitlines() if "figures {" in line]
    if run.returncode or not lines:
        raise click.ClickException(f"a program ended with {run.returncode}: {run.stderr[-2000:]}")
    told = json.loads(lines[0].partition("figures ")[2])
    phases = {f"s, {name}": seconds for name, seconds in told["phases"].items()}
    return {"seconds": told["end"] - begin, "own MB": told["own"], "part MB": told["part"], **phases}


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--ranks", default=64, show_default=True, type=click.IntRange(2))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--work", "works", is_flag=True, help="Then also steps, reductions and saves; calls of MPI beside them.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write a record.")
def main(ranks: int, rounds: int, works: bool, path: str | None) -> None:
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    # The first round, of a few ranks, reads files from the disk.
    for number in range(rounds + 1):
        for name, code in PROGRAMS.items():
            figures = measure(ranks if number else min(ranks, 8), code, works=works)
            if number:
                taken[name].append(figures)
    medians = {
        name: {kind: statistics.median(one[kind] for one in each) for kind in each[0]} for name, each in taken.items()
    }
    for name, figures in medians.items():
        click.echo(f"{name:18}" + "".join(f"{value:9.2f} {kind}" for kind, value in figures.items()))
    bare, ours = (medians[name] for name in PROGRAMS)
    ratio = ours["seconds"] / bare["seconds"]
    more = {kind: ours[kind] - bare[kind] for kind in ("own MB", "part MB")}
    memory = ", ".join(f"{value:.1f} {kind}" for kind, value in more.items())
    click.echo(f"{ratio:.2f} times the time; more memory per rank: {memory}")
    if path:
        result = {"ranks": ranks, "cores": os.cpu_count(), "rounds": rounds, "ratio": ratio, "more": more}
        Path(path).write_text(json.dumps({**result, "medians": medians, "all": taken}, indent=1) + "\n")


if __name__ == "__main__":
    main()
