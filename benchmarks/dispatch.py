"""What does a call cost beyond its work, of an empty `strategy.run` and of a scalar `strategy.reduce`?

mpirun -n 2 python benchmarks/dispatch.py --json dispatch.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import measure
import numpy as np
from measure import WORLD, say

import mpidist


def microseconds(function: Callable[[], object], calls: int, rounds: int = 21) -> float:
    """Median over rounds of the mean time of a call."""
    times = []
    for _ in range(rounds):
        WORLD.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times)


@click.command(help=__doc__)
@click.option("--calls", default=3000, show_default=True, help="Calls per round.")
@click.option("--json", "json_path", help="Write the figures.")
def main(calls: int, json_path: str | None) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    one = np.float32(1.0)
    source, result = np.ones((), np.float32), np.empty((), np.float32)

    def nothing() -> None:
        pass

    figures = {
        "a Python call": microseconds(nothing, calls),
        "empty strategy.run": microseconds(lambda: strategy.run(nothing), calls),
        "raw Allreduce of 4 bytes": microseconds(lambda: WORLD.Allreduce(source, result), calls),
        "scalar strategy.reduce": microseconds(lambda: strategy.reduce("SUM", one, axis=None), calls),
    }
    figures["reduce beyond Allreduce"] = figures["scalar strategy.reduce"] - figures["raw Allreduce of 4 bytes"]
    say(f"{WORLD.size} ranks, microseconds per call (median)")
    for name, value in figures.items():
        say(f"{name:28}{value:9.2f}")
    measure.record(json_path, {"microseconds": figures})


if __name__ == "__main__":
    main()
