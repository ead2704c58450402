"""What does a call cost beyond its work: an empty `strategy.run`, a scalar `strategy.reduce`, the recorder?

A second table has a scalar reduce of ranks that count as two nodes, with and without comparing calls between them.

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
from mpidist.comm.group.opening import open_communicator
from mpidist.strategy.base import Strategy
from mpidist.testing.plugin import fake_nodes
from mpidist.variables.arena import Arena
from mpidist.variables.replicas import Replicas


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


def between_nodes(calls: int, rounds: int = 201) -> dict[str, dict[str, float]]:
    """Microseconds of a scalar reduce between two pretended nodes, with and without comparing calls, by turns."""
    communicator = fake_nodes(open_communicator(purpose="benchmark"), (WORLD.size + 1) // 2)
    replicas = Replicas(communicator)
    strategy, order = Strategy(replicas, Arena(replicas)), communicator.order
    one = np.float32(1.0)
    strategy.reduce("SUM", one, axis=None)

    def reduce(*, is_compared: bool) -> None:
        # No comparison is under way when the comparing stops.
        order.compare_across()
        order.is_across = is_compared
        for _ in range(calls):
            strategy.reduce("SUM", one, axis=None)
        order.is_across = True

    times = measure.interleaved(
        {"compared": lambda: reduce(is_compared=True), "not compared": lambda: reduce(is_compared=False)}, rounds
    )
    figures = {name: {kind: time / calls * 1e3 for kind, time in case.items()} for name, case in times.items()}
    figures["ratio"] = {kind: time / figures["not compared"][kind] for kind, time in figures["compared"].items()}
    return figures


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--calls", default=3000, show_default=True, help="Calls per round.")
@click.option("--json", "json_path", help="Write the figures.")
def main(calls: int, json_path: str | None) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    one = np.float32(1.0)
    source, result = np.ones((), np.float32), np.empty((), np.float32)

    recorded, order = strategy.communicator.calls, strategy.communicator.order

    def nothing() -> None:
        pass

    def enter_and_leave() -> None:
        recorded.enter("nothing")
        recorded.leave()

    def enclose() -> None:
        order.during("nothing")
        order.leave()

    def sign() -> None:
        # The comparison itself is part of the barrier, or of the call of MPI.
        order.enter("nothing", None, source, meets=False)
        order.leave()

    figures = {
        "a Python call": microseconds(nothing, calls),
        "empty strategy.run": microseconds(lambda: strategy.run(nothing), calls),
        "raw Allreduce of 4 bytes": microseconds(lambda: WORLD.Allreduce(source, result), calls),
        "scalar strategy.reduce": microseconds(lambda: strategy.reduce("SUM", one, axis=None), calls),
    }
    figures["the recorder, per call"] = microseconds(enter_and_leave, calls) - figures["a Python call"]
    # What surrounds several calls is recorded, and guarded against threads and interrupts, and not signed.
    figures["recorder and guards, per call"] = microseconds(enclose, calls) - figures["a Python call"]
    figures["signature, recorder and guards, per call"] = microseconds(sign, calls) - figures["a Python call"]
    figures["the signature, per call"] = (
        figures["signature, recorder and guards, per call"] - figures["recorder and guards, per call"]
    )
    figures["reduce beyond Allreduce"] = figures["scalar strategy.reduce"] - figures["raw Allreduce of 4 bytes"]
    say(f"{WORLD.size} ranks, microseconds per call (median)")
    for name, value in figures.items():
        say(f"{name:42}{value:9.2f}")
    across = {}
    if WORLD.size > 1:
        # Short rounds, most of which nothing disturbs.
        across = between_nodes(max(1, calls // 10))
        say(f"\n{'scalar strategy.reduce of 2 nodes':34}{'min':>9}{'median':>9}")
        for name, times in across.items():
            say(f"{name:34}{times['min']:9.2f}{times['median']:9.2f}")
    measure.record(json_path, {"microseconds": figures, "between nodes": across})


if __name__ == "__main__":
    main()
