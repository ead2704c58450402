"""What do bits cost that do not depend on the ranks, of an all-reduce and of a whole training step?

    mpirun -n 2 python benchmarks/reproducible.py --plot reproducible.png --json reproducible.json

An all-reduce of the default options, one under `reproducible=True` (the tree: on one node in shared memory, and by
messages alone, as between nodes), and raw `MPI_Allreduce` in chunks of 1 MB, in turns. Then a step of a network of two
layers on the same global batch: `run` and `apply_gradients`, the same under `reproducible`, and `Strategy.gradients`
with as many logical replicas as ranks, and with more.
"""

from __future__ import annotations

import importlib
from typing import Any

import click
import measure
import numpy as np
import numpy.typing as npt
from measure import WORLD, Case, say
from mpi4py import MPI

import mpidist
from mpidist.comm.choice import selection
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.opening import open_communicator
from mpidist.experimental import CommunicationOptions

Array = npt.NDArray[Any]
ROWS, INPUTS, HIDDEN, CLASSES = 512, 784, 1024, 10
MPI_CHUNK = 1 << 18


def raw(array: Array) -> Case:
    """MPI_Allreduce in place, 1 MB at a time."""

    def case() -> None:
        for begin in range(0, array.size, MPI_CHUNK):
            WORLD.Allreduce(MPI.IN_PLACE, array[begin : begin + MPI_CHUNK])

    return case


def repeated(collective: CollectiveFront, array: Array, calls: int) -> Case:
    """So many sums in place: small ones are too short to be measured one by one."""

    def case() -> None:
        for _ in range(calls):
            collective.all_reduce(array, in_place=True)

    return case


def all_reduce_cases(byte_count: int, calls: int, collectives: dict[str, CollectiveFront]) -> dict[str, Case]:
    """One size, each way on an array of its own."""
    cases = {
        name: repeated(collective, np.zeros(byte_count // 4, np.float32), calls)
        for name, collective in collectives.items()
    }
    once = raw(np.zeros(byte_count // 4, np.float32))
    return {**cases, "raw MPI": lambda: [once() for _ in range(calls)]}


def step_cases(logical: int) -> tuple[dict[str, Case], list[Any]]:
    """A whole step each way, and what must stay alive."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
    labels = random.integers(0, CLASSES, ROWS)
    mine = np.array_split(np.arange(ROWS), WORLD.size)[WORLD.rank]
    batch = {"x": x[mine], "labels": labels[mine]}
    shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    initial = [random.normal(size=shape).astype(np.float32) * 0.05 for shape in shapes]
    kept: list[Any] = []

    def make(logical_replicas: int | None, *, reproducible: bool) -> Case:
        options = CommunicationOptions(reproducible=reproducible)
        strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=options)
        with strategy.scope():
            weights = [mpidist.Variable(array) for array in initial]
        optimizer = mpidist.optimizers.Adam(1e-4)
        kept.extend((strategy, weights, optimizer))

        def gradients(batch: dict[str, Array]) -> list[Array]:
            w1, b1, w2, b2 = [weight.value() for weight in weights]
            hidden = np.maximum(batch["x"] @ w1 + b1, 0)
            z = hidden @ w2 + b2
            p = np.exp(z - z.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True) * ROWS
            p[np.arange(len(p)), batch["labels"]] -= 1 / ROWS
            back = (p @ w2.T) * (hidden > 0)
            return [batch["x"].T @ back, back.sum(0), hidden.T @ p, p.sum(0)]

        def plain() -> None:
            optimizer.apply_gradients(zip(strategy.run(gradients, args=(batch,)), weights, strict=True))

        def in_tree() -> None:
            summed = strategy.gradients(gradients, batch, logical_replicas or 1)
            optimizer.apply_gradients(zip(summed, weights, strict=True), skip_gradients_aggregation=True)

        return plain if logical_replicas is None else in_tree

    cases = {
        "run": make(None, reproducible=False),
        "run, reproducible": make(None, reproducible=True),
        f"gradients, {WORLD.size} logical": make(WORLD.size, reproducible=True),
        f"gradients, {logical} logical": make(logical, reproducible=True),
    }
    return cases, kept


def draw(path: str, sizes: dict[int, dict[str, dict[str, float]]], steps: dict[str, dict[str, float]]) -> None:
    """Ratios to the default options."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name in next(iter(sizes.values())):
        left.loglog(list(sizes), [times[name]["median"] for times in sizes.values()], "o-", label=name)
    left.set(xlabel="bytes", ylabel="ms for an all-reduce (median)", title=f"{WORLD.size} ranks")
    left.legend()
    right.barh(list(steps), [times["median"] for times in steps.values()])
    right.set(xlabel="ms for a step (median)", title=f"network of {INPUTS}-{HIDDEN}-{CLASSES}, batch {ROWS}, Adam")
    figure.tight_layout()
    figure.savefig(path)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--rounds", default=15, show_default=True, help="Rounds of each measurement.")
@click.option("--logical", default=8, show_default=True, help="Logical replicas of the last way.")
@click.option("--largest", default=1 << 25, show_default=True, help="Bytes of the largest all-reduce.")
@click.option("--json", "json_path", help="Write the figures.")
@click.option("--plot", "plot_path", help="Draw them.")
def main(rounds: int, logical: int, largest: int, json_path: str | None, plot_path: str | None) -> None:
    ranks = open_communicator(WORLD)
    collectives = {
        "default": selection.choose(ranks, CommunicationOptions()),
        "reproducible": selection.choose(ranks, CommunicationOptions(reproducible=True)),
        "by messages": selection.choose(ranks, CommunicationOptions(reproducible=True, implementation="MPI")),
    }
    sizes: dict[int, dict[str, dict[str, float]]] = {}
    say(f"all-reduce of float32 in place, {WORLD.size} ranks: milliseconds, median; ratio to the default")
    for byte_count in [size for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 23, 1 << 25) if size <= largest]:
        calls = max(1, min(100, (1 << 20) // byte_count))
        times = measure.interleaved(all_reduce_cases(byte_count, calls, collectives), rounds)
        sizes[byte_count] = {name: {k: v / calls for k, v in one.items()} for name, one in times.items()}
        found = {name: one["median"] for name, one in sizes[byte_count].items()}
        columns = "".join(f"{name:>14} {value:9.4f}" for name, value in found.items())
        say(f"{byte_count:10}{columns}{found['reproducible'] / found['default']:9.2f}x")
    cases, kept = step_cases(logical)
    steps = measure.interleaved(cases, rounds)
    say(f"\nstep of a network {INPUTS}-{HIDDEN}-{CLASSES}, global batch {ROWS}, Adam: milliseconds, median")
    for name, one in steps.items():
        say(f"{name:28}{one['median']:9.2f}{one['median'] / steps['run']['median']:9.2f}x")
    measure.record(json_path, {"all_reduce_ms": sizes, "step_ms": steps, "logical_replicas": logical})
    if plot_path and WORLD.rank == 0:
        draw(plot_path, sizes, steps)
    kept.clear()


if __name__ == "__main__":
    main()
