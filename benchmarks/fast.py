"""What is the extra `fast` good for, beside plain updates (`sync_step.py`)?

    mpirun -n 4 python benchmarks/fast.py --plot fast.png --json fast.json

Each case runs without the compiler (`MPIDIST_COMPILE=0`) and with it, in turns: sums of arrays by the backend NODE, in
node memory and anywhere; SGD whose gradients are clipped by their global norm; SGD with an average of the weights; a
call that accumulates gradients; Adam on the rows of a table, some of which are far more frequent than others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
from measure import SHARE, WORLD, Case, compiling, say

import mpidist
from mpidist.comm.arithmetic import compiler
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import SGD, Adam, Optimizer
from mpidist.options import CommunicationOptions, ReduceOp

# Of the arrays that are summed; and of variables.
ELEMENTS = round((8 << 20) * SHARE)
ARRAY = (ELEMENTS,)
SHAPES = ((ELEMENTS,), (ELEMENTS // 2,), (ELEMENTS // 2,))
# Rows and width of the table, and how many rows each rank names in a step.
TABLE, NAMED = (ELEMENTS // 32, 64), ELEMENTS // 256


def sum_case(*, allocated: bool) -> Case:
    """A sum of all ranks' arrays."""
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(implementation="NODE"))
    collective = strategy.replicas.collective
    array = collective.allocate(ARRAY, "float32") if allocated else np.empty(ARRAY, np.float32)
    array[...] = 0
    return partial(collective.all_reduce, array, ReduceOp.SUM, in_place=True)


def step_case(make: Callable[[], Optimizer]) -> Case:
    """A step of an optimizer, whose gradients are written in place."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    optimizer = make()
    optimizer.build(variables)
    gradients = [np.full(shape, 1e-3, np.float32) for shape in SHAPES]
    return partial(optimizer.apply_gradients, list(zip(gradients, variables, strict=True)))


def rows_case() -> Case:
    """A step of Adam on some rows of a table."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        table = mpidist.Variable(np.zeros(TABLE, np.float32), sparse_gradient=True)
    optimizer = Adam(1e-3)
    optimizer.build([table])
    generator = np.random.default_rng(WORLD.rank)
    # As words of a language: the numbers of half of them are below 1 % of the rows.
    rows = (TABLE[0] * generator.random(NAMED) ** 7).astype(np.int64)
    gradient = IndexedSlices(generator.standard_normal((NAMED, TABLE[1]), np.float32), rows, TABLE)
    return partial(optimizer.apply_gradients, [(gradient, table)])


CASES: dict[str, Callable[[], Case]] = {
    "sum, node memory": lambda: sum_case(allocated=True),
    "sum, any array": lambda: sum_case(allocated=False),
    "SGD, global_clipnorm": lambda: step_case(lambda: SGD(1e-3, global_clipnorm=1.0)),
    "SGD, use_ema": lambda: step_case(lambda: SGD(1e-3, use_ema=True)),
    # No step ends: each call only adds.
    "accumulation": lambda: step_case(lambda: SGD(1e-3, gradient_accumulation_steps=1 << 20)),
    "Adam on rows": rows_case,
}


def compare(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of each case, without and with the compiler."""
    if not compiler.load(WORLD.size):
        raise SystemExit("this compares with the extra `fast`: pip install 'mpidist[fast]', and unset MPIDIST_COMPILE")
    results = {}
    say(f"{'ms, medians':24}{'without':>9}{'with':>9}{'ratio':>8}")
    for name, make in CASES.items():
        ways: dict[str, Case] = {}
        for way, compiles in (("without", False), ("with", True)):
            with compiling(compiles=compiles):
                case = make()

            def run(case: Case = case, *, compiles: bool = compiles) -> None:
                with compiling(compiles=compiles):
                    case()

            ways[way] = run
        results[name] = times = measure.interleaved(ways, rounds)
        without, compiled = (times[way]["median"] for way in ("without", "with"))
        say(f"{name:24}{without:9.2f}{compiled:9.2f}{without / compiled:8.2f}")
    return results


def plot(path: str, results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Bars: milliseconds without and with the compiler."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, 4), constrained_layout=True)
    places = np.arange(len(results))
    for shift, way in ((-0.2, "without"), (0.2, "with")):
        bars = axes.bar(places + shift, [times[way]["median"] for times in results.values()], 0.4, label=way)
        axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(places, [name.replace(", ", ",\n") for name in results])
    axes.set_ylabel("ms (median)")
    axes.legend(title="the extra fast")
    axes.set_title(f"{WORLD.size} ranks, {measure.machine()['mpi'][:40]}")
    figure.savefig(path, dpi=110)
    say(f"wrote {Path(path)}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--rounds", default=15, show_default=True, help="Repetitions of each case.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(rounds: int, plot_path: str | None, json_path: str | None) -> None:
    results: dict[str, Any] = compare(rounds)
    measure.record(json_path, {"figures": results})
    if plot_path and WORLD.rank == 0:
        plot(plot_path, results)


if __name__ == "__main__":
    main()
