"""How fast is an all-reduce of hosts between which bandwidth is limited?

    python benchmarks/hosts.py --plot hosts.png --json hosts.json

Virtual hosts of this machine (`tests/hosts`) with the given bandwidth from each to the others (`tc`, the token bucket
filter). It starts the ranks itself, by the `mpirun` beside this Python. Beside the library stand MPI over all ranks,
which does not care where they are, in one call and in chunks, and the limit: 2(m - 1)/m of the array through the
interface of each of m hosts.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = ("2+2", "1+1+1", "2+1+1")
# What the filter lets through at once. A larger bucket would carry a good part of a small array without a limit.
BURST_BYTES = 1 << 17
JOB_SECONDS = 200


def ranks_of(layout: str) -> list[int]:
    """Numbers of ranks of the hosts."""
    return [int(word) for word in layout.split("+")]


def limit_ms(layout: str, byte_count: int, megabits: int) -> float:
    """Milliseconds that the bytes need which every host must send."""
    hosts = len(ranks_of(layout))
    return 2 * (hosts - 1) / hosts * byte_count * 8 / (megabits * 1e3)


def work(path: str, sizes: Sequence[int], rounds: int) -> None:
    """Measure as a rank: milliseconds of each way for each size, and the bytes that this host sends."""
    # Only here: they start MPI.
    measure = importlib.import_module("measure")
    np, mpi, mpidist = (importlib.import_module(name) for name in ("numpy", "mpi4py.MPI", "mpidist"))
    world = mpi.COMM_WORLD

    def through(implementation: str) -> Any:
        options = mpidist.experimental.CommunicationOptions(implementation=implementation)
        strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=options)
        return lambda array: strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", array))

    ways: dict[str, Callable[[Any], object]] = {
        "MPI, one call": lambda array: world.Allreduce(mpi.IN_PLACE, array),
        "MPI, chunks of 1 MB": through("MPI"),
        "ring of all ranks": through("RING"),
        "mpidist (AUTO)": through("AUTO"),
    }
    found: dict[str, Any] = {}
    for size in sizes:
        array = np.ones(size // 4, np.float32)
        cases = {name: functools.partial(way, array) for name, way in ways.items()}
        found[str(size)] = {name: times["median"] for name, times in measure.interleaved(cases, rounds).items()}
    if world.rank == 0:
        Path(path).write_text(json.dumps({"machine": measure.machine(), "ms": found}))


def run_job(layout: str, sizes: Sequence[int], rounds: int, megabits: int) -> dict[str, Any]:
    """The figures of a job on so many hosts."""
    sys.path.insert(0, str(ROOT))
    virtual_hosts = importlib.import_module("tests.hosts.virtual_hosts")
    launching = importlib.import_module("tests.helpers.launching")
    ranks = ranks_of(layout)
    with virtual_hosts.VirtualHosts(len(ranks)) as hosts, tempfile.TemporaryDirectory() as folder:
        for name in hosts.names:
            limit = f"tbf rate {megabits}mbit burst {BURST_BYTES} latency 50ms"
            made = launching.finish(hosts.execute(name, f"tc qdisc add dev eth0 root {limit}"), "tc", 60)
            if made.returncode:
                raise click.ClickException(f"tc cannot limit the bandwidth here: {made.stderr.strip()}")
        out = f"{folder}/figures.json"
        words = ["--rank-writes", out, "--rounds", rounds]
        words += [word for size in sizes for word in ("--kilobytes", size >> 10)]
        result = hosts.run(ranks, Path(__file__), *words, timeout_seconds=JOB_SECONDS)
        if not Path(out).exists():
            raise click.ClickException(result.stdout + result.stderr)
        figures: dict[str, Any] = json.loads(Path(out).read_text())
        return figures


def show(layout: str, found: dict[str, Any], megabits: int) -> None:
    """Print a table: milliseconds, and how often the limit they are."""
    for size, times in found.items():
        least = limit_ms(layout, int(size), megabits)
        cells = ", ".join(f"{name} {ms:.2f} ms ({ms / least:.2f})" for name, ms in times.items())
        click.echo(f"{layout} hosts, {int(size) >> 10} KB, limit {least:.2f} ms: {cells}")


def plot(path: str, results: dict[str, Any], megabits: int) -> None:
    """Bars: times of the largest array over the limit, for each layout."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(7, 3.4), constrained_layout=True)
    names: list[str] = []
    for number, (layout, found) in enumerate(results.items()):
        size, times = list(found.items())[-1]
        names = list(times)
        ratios = [ms / limit_ms(layout, int(size), megabits) for ms in times.values()]
        axis.bar([place + 0.25 * number for place in range(len(names))], ratios, 0.22, label=f"{layout} ranks")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks([place + 0.25 * (len(results) - 1) / 2 for place in range(len(names))], names, fontsize=8)
    axis.set_ylabel("time / limit")
    axis.set_title(f"all-reduce between hosts with {megabits} Mbit/s each")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--layout", "layouts", default=LAYOUTS, show_default=True, multiple=True, help="Ranks of each host.")
@click.option("--kilobytes", default=(64, 1024, 8192), show_default=True, multiple=True, help="Sizes of arrays.")
@click.option("--megabits", default=1000, show_default=True, help="Per second, from each host.")
@click.option("--rounds", default=7, show_default=True, help="Measurements of each way.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
@click.option("--rank-writes", hidden=True)
def main(
    layouts: Sequence[str], kilobytes: Sequence[int], megabits: int, rounds: int, plot_path: str | None,
    json_path: str | None, rank_writes: str | None,
) -> None:
    sizes = [size << 10 for size in kilobytes]
    if rank_writes:
        work(rank_writes, sizes, rounds)
        return
    figures = {layout: run_job(layout, sizes, rounds, megabits) for layout in layouts}
    results = {layout: one["ms"] for layout, one in figures.items()}
    for layout, found in results.items():
        show(layout, found, megabits)
    if plot_path:
        plot(plot_path, results, megabits)
    if json_path:
        machine = {key: value for key, value in figures[layouts[0]]["machine"].items() if key != "ranks"}
        text = json.dumps({"machine": machine, "megabits": megabits, "ms": results}, indent=1)
        Path(json_path).write_text(text + "\n")


if __name__ == "__main__":
    main()
