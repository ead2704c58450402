"""How does a step of ResNet-50 scale to 65,536 ranks, and which all-reduce is for which size?

    python benchmarks/scale_model.py --times benchmarks/results/collectives_mpich.json --plot scale_model.png
    mpirun -n 2 python benchmarks/scale_model.py --network aries --ranks-per-node 64 --json scale_model.json

A model, not a measurement: latency, bandwidth and addition within a node are fitted to measured times (medians of
`collectives.py`, or taken here in seconds), of which every third is held back and compared with what the model says;
the network is given. It knows no contention, no noise and no slow nodes; read its large numbers as what is possible
at best. Ranks that outnumber the cores wait for one another, which no such model tells: start as many as there are
cores.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click
import measure
import numpy as np
from cost_model import ALGORITHMS, COUNTS, NETWORKS, Line, Machine, Network, best, fit, predicted
from measure import WORLD, say
from mpi4py import MPI

from mpidist.comm.choice import selection
from mpidist.comm.cross_device.reductions import ReductionToOneDevice
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.options import CommunicationOptions

Points = dict[tuple[int, int], float]  # ranks, bytes: seconds

MODEL_BYTES = 25_557_032 * 4
SIZES = tuple(4**power for power in range(2, 13))
RANKS = tuple(4**power for power in range(9))


def sweep(rounds: int) -> dict[str, Points]:
    """Seconds of every algorithm on groups of 2, 3, ... of the ranks, the least of some rounds."""
    world = open_communicator()
    found: dict[str, Points] = {name: {} for name in COUNTS}
    for ranks in range(2, world.size + 1):
        group = world.split(int(world.rank >= ranks))
        if world.rank < ranks:
            for name, points in measured(group, rounds).items():
                found[name].update({(ranks, size): seconds for size, seconds in points.items()})
        # The others sleep: who spins takes a core from those that are measured.
        request = WORLD.Ibarrier()
        while not request.Test():
            time.sleep(0.005)
    return cast("dict[str, Points]", WORLD.bcast(found))


def measured(group: Communicator, rounds: int) -> dict[str, dict[int, float]]:
    """By algorithm and size."""
    names = [name for name in ("RING", "MPI", "NODE") if name != "NODE" or len(group.node_sizes) == 1]
    ways: dict[str, Any] = {
        name: selection.choose(group, CommunicationOptions(implementation=name)) for name in names
    }
    ways["TO ONE"] = ReductionToOneDevice().bind(group)
    results: dict[str, dict[int, float]] = {name: {} for name in ways}
    for size in SIZES:
        array = np.zeros(size // 4, np.float32)
        calls = max(1, min(50, (1 << 20) // size))
        for number in range(rounds + 1):
            for name, way in ways.items():
                group.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    way.all_reduce(array)
                taken = group.all_reduce_max(int((time.perf_counter() - begin) * 1e9)) / 1e9 / calls
                if number > 0:  # the first round opens what opens late
                    results[name][size] = min(taken, results[name].get(size, taken))
    return results


def read_times(path: str) -> dict[str, Points]:
    """Seconds that `collectives.py` has written."""
    content = json.loads(Path(path).read_text())
    ranks = content["machine"]["ranks"]
    found: dict[str, Points] = {name: {} for name in COUNTS}
    for size, times in content["times_us"].items():
        for name in COUNTS:
            if name in times:
                found[name][ranks, int(size)] = times[name]["median"] / 1e6
    return found


def seconds_per_added_byte() -> float:
    """Of `numpy.add` in a cache."""
    total, other = np.zeros(1 << 15, np.float32), np.zeros(1 << 15, np.float32)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        np.add(total, other, out=total)
        times.append(time.perf_counter() - begin)
    return min(times) / total.nbytes


def fit_all(found: Mapping[str, Points]) -> tuple[dict[str, Line], dict[str, dict[str, float]]]:
    """A line for each algorithm, and how far off it is at points that it was not fitted to."""
    lines: dict[str, Line] = {}
    errors: dict[str, dict[str, float]] = {}
    say(f"{'':8}{'start us':>10}{'GB/s':>8}{'beyond':>8}{'knee KB':>10}{'held back':>11}{'median':>9}{'largest':>9}")
    for name, points in found.items():
        if not points:
            continue
        sizes = sorted({size for _, size in points})
        held = {key: value for key, value in points.items() if sizes.index(key[1]) % 3 == 1}
        line = fit(name, {key: value for key, value in points.items() if key not in held})
        off = [abs(predicted(name, line, *key) / value - 1) for key, value in held.items()]
        lines[name], errors[name] = line, {"median": statistics.median(off), "largest": max(off), "points": len(off)}
        rates = [f"{1e-9 / slope:8.1f}" if slope > 0 else f"{'-':>8}" for slope in (line.slope, line.slope_beyond)]
        say(
            f"{name:8}{line.start * 1e6:10.2f}{rates[0]}{rates[1]}{line.knee / 1024:10.0f}{len(off):11}"
            f"{errors[name]['median']:9.0%}{errors[name]['largest']:9.0%}"
        )
    return lines, errors


def predict(machine: Machine, per_node: int, compute: float) -> dict[str, Any]:
    """Seconds of an all-reduce of ResNet-50's gradients, and what a step takes, by ranks."""
    say(
        f"\nResNet-50 ({MODEL_BYTES / 1e6:.0f} MB), {per_node} ranks a node, {compute * 1e3:g} ms of computing, "
        f"{machine.network.name}: milliseconds of an all-reduce; efficiency one after another, and overlapped in full"
    )
    say(f"{'ranks':>6}" + "".join(f"{name:>23}" for name in ALGORITHMS) + f"{'best':>24}{'efficiency':>16}")
    rows: dict[str, Any] = {}
    for ranks in RANKS[1:]:
        times = {name: cost(machine, ranks, per_node, MODEL_BYTES) for name, cost in ALGORITHMS.items()}
        chosen = min(times, key=times.__getitem__)
        after, overlapped = compute / (compute + times[chosen]), compute / max(compute, times[chosen])
        rows[str(ranks)] = {
            "seconds": times, "best": chosen, "step_seconds": compute + times[chosen], "efficiency": after,
            "efficiency_overlapped": overlapped,
        }
        say(
            f"{ranks:6}" + "".join(f"{value * 1e3:23.2f}" for value in times.values())
            + f"{chosen:>24}{after:10.0%}{overlapped:6.0%}"
        )
    return rows


def advise(machine: Machine, per_node: int) -> dict[str, list[list[Any]]]:
    """By ranks: from which size on which algorithm is the fastest."""
    say("\nfrom so many bytes on use")
    advice: dict[str, list[list[Any]]] = {}
    for ranks in RANKS[1:]:
        switches: list[list[Any]] = []
        for power in range(2, 31):
            name = best(machine, ranks, per_node, 2**power)
            if not switches or switches[-1][1] != name:
                switches.append([2**power if switches else 0, name])
        advice[str(ranks)] = switches
        say(f"{ranks:6} ranks: " + ", ".join(f"{size}: {name}" for size, name in switches))
    return advice


def plot(path: str, rows: Mapping[str, Any], network: Network) -> None:
    """Time of the all-reduce by ranks, and efficiency."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    ranks = [int(key) for key in rows]
    for name in ALGORITHMS:
        left.loglog(ranks, [rows[key]["seconds"][name] * 1e3 for key in rows], ".-", label=name)
    left.set_ylabel("ms of an all-reduce (predicted)")
    left.legend(fontsize=8)
    right.semilogx(ranks, [rows[key]["efficiency"] * 100 for key in rows], ".-", label="one after another")
    right.semilogx(ranks, [rows[key]["efficiency_overlapped"] * 100 for key in rows], ".--", label="overlapped in full")
    right.set_ylabel("% of the time spent computing, best algorithm")
    right.set_ylim(0, 105)
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
    figure.suptitle(f"ResNet-50's gradients, model over {network.name}: {network.source}", fontsize=9)
    figure.savefig(path, dpi=110)
    say(f"wrote {path}")


def described(network: Network) -> str:
    """A network's numbers and where they come from."""
    rate = network.bytes_per_second / 1e9
    return f"{network.name}: {network.seconds * 1e6:g} us, {rate:g} GB/s ({network.source})"


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--times", "times_path", help="Fit to what `collectives.py --json` wrote, instead of measuring.")
@click.option("--rounds", default=7, show_default=True, help="Repetitions of a measurement.")
@click.option("--ranks-per-node", "per_node", default=64, show_default=True)
@click.option(
    "--network", "network_name", default=NETWORKS[0].name, show_default=True,
    type=click.Choice([network.name for network in NETWORKS]),
    help="; ".join(described(network) for network in NETWORKS),
)
@click.option("--alpha-us", type=float, help="Microseconds of an empty message between nodes.")
@click.option("--bandwidth", type=float, help="GB/s of a node's link.")
@click.option("--compute-ms", default=100.0, show_default=True, help="Computing of a step, an assumption.")
@click.option("--plot", "plot_path", help="Write a plot.")
@click.option("--json", "json_path", help="Write the figures.")
def main(times_path: str | None, rounds: int, per_node: int, network_name: str, **rest: Any) -> None:
    network = next(one for one in NETWORKS if one.name == network_name)
    if rest["alpha_us"] is not None or rest["bandwidth"] is not None:
        alpha = network.seconds if rest["alpha_us"] is None else rest["alpha_us"] / 1e6
        rate = network.bytes_per_second if rest["bandwidth"] is None else rest["bandwidth"] * 1e9
        network = Network("the given network", alpha, rate, "the command line")
    if per_node < 1 or network.seconds < 0 or network.bytes_per_second <= 0:
        raise click.BadParameter("ranks per node and bandwidth must be positive, and alpha not negative")
    if times_path is None and WORLD.size == 1:
        raise click.UsageError("start it under mpirun with 2 or more ranks, or give --times collectives.json")
    found = read_times(times_path) if times_path else sweep(rounds)
    lines, errors = fit_all(found)
    if "RING" not in lines or "NODE" not in lines:
        raise click.UsageError("there are no times of RING and NODE: ranks of one node are needed")
    add = WORLD.allreduce(seconds_per_added_byte(), MPI.MAX)
    machine = Machine(lines["RING"], lines["NODE"], add, network)
    say(f"\n{described(network)}")
    rows = predict(machine, per_node, rest["compute_ms"] / 1e3)
    advice = advise(machine, per_node)
    measure.record(rest["json_path"], {
        "lines": {name: vars(line) for name, line in lines.items()}, "errors": errors, "network": vars(network),
        "ranks_per_node": per_node, "predicted": rows, "fastest_from_bytes": advice,
    })
    if rest["plot_path"] and WORLD.rank == 0:
        plot(rest["plot_path"], rows, network)


if __name__ == "__main__":
    main()
