"""How fast is an all-reduce of 4 bytes to 256 MB, and of ResNet-50's 161 gradients, and against which peers?

    mpirun -n 2 python benchmarks/collectives.py --plot collectives.png --json collectives.json
    mpirun -n 2 python benchmarks/collectives.py --no-sweep    # ResNet-50's gradients only

Measured in turns in one run: every collective of mpidist, on any array and on arrays of `allocate`; raw mpi4py and C
(one call, in place, chunks of 256 KB to 16 MB); PyTorch's gloo; and the memory limit. ResNet-50's gradients also by
Horovod where it is installed (`install_horovod.sh`), over its cycle times and fusion thresholds; it runs in its turns
only, since its thread calls MPI in every cycle, work or none.
The limit: each rank adds its slice of all ranks' arrays, which are in memory that they share, in blocks of 256 KB, and
writes the sum to all of them, so it reads its array's bytes once and writes them once.

Just before the time is taken every rank writes its array, and no other: so all ways find the caches alike. Arrays below
64 KB are combined into a new array, as a program does it; larger ones in place, in every way but "one call".
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import measure
import numpy as np
from collective_peers import (
    HOROVOD_DEFAULTS,
    Array,
    Way,
    gloo_tensor_ways,
    gloo_ways,
    horovod_ways,
    limit_way,
    mpi_ways,
    native_ways,
    open_gloo,
    open_horovod,
    repeated,
)
from measure import WORLD, say
from mpi4py import MPI
from native_mpi import open_native
from sync_step import SHAPES

from mpidist.comm.choice import selection
from mpidist.comm.choice.table import BACKENDS
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.packing import all_reduce_nest
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationOptions

Times = dict[str, dict[str, float]]
Maker = Callable[[int], dict[str, Way]]

IN_PLACE_FROM = 1 << 16
OURS = ("AUTO", "NODE", "RING", "MPI", "STAGED")
COLUMNS = ("memory limit", "AUTO", "NODE", "NODE, allocated", "RING", "MPI", "raw MPI", "C MPI", "gloo")


def all_reduced(collective: CollectiveFront, array: Array) -> Way:
    """Our way: into a new array if small, else in place."""
    is_large = array.nbytes >= IN_PLACE_FROM
    return Way((array,), repeated(functools.partial(collective.all_reduce, array, in_place=is_large)))


def our_ways(collectives: Mapping[str, CollectiveFront], array: Array) -> dict[str, Way]:
    """Every collective on any array, and on one of its own where that is something else."""
    ways = {name: all_reduced(collective, array) for name, collective in collectives.items()}
    if array.nbytes >= IN_PLACE_FROM:
        for name in ("AUTO", "NODE"):
            collective = collectives.get(name)
            if collective is not None:
                own = collective.allocate((array.size,), np.float32)
                ways[f"{name}, allocated"] = all_reduced(collective, own)
    return ways


def interleaved(ways: Mapping[str, Way], calls: int, rounds: int) -> Times:
    """Microseconds of a call of each way, the slowest rank counting; ways take turns.

    In another order each time, the same on all ranks: what a way leaves in the caches helps or hinders the next one.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(ways), len(ways)):
            way = ways[name]
            with way.turn():
                for array in way.written:
                    array.fill(0)  # sums of zeros stay zeros, however often
                WORLD.Barrier()
                begin = time.perf_counter()
                way.run(calls)
                taken = (time.perf_counter() - begin) / calls * 1e6
            if number > 0:  # the first round touches memory and opens what opens late
                times[name].append(WORLD.allreduce(taken, MPI.MAX))
    return {name: {"min": min(t), "median": statistics.median(t)} for name, t in times.items()}


def check(ways: Mapping[str, Way]) -> None:
    """Every way gives the sum where it is in place; else the figures are those of an error."""
    for name, way in ways.items():
        with way.turn():
            for array in way.written:
                array.fill(WORLD.rank + 1)
            WORLD.Barrier()
            way.run(1)
        if sum(array.nbytes for array in way.written) >= IN_PLACE_FROM and "one call" not in name:
            expected = WORLD.size * (WORLD.size + 1) // 2
            is_right = all((array == expected).all() for array in way.written)
            if WORLD.allreduce(int(not is_right), MPI.MAX):
                raise SystemExit(f"{name} gives wrong sums")


def best_of(times: Times, peer: str, which: str = "median") -> tuple[float, str] | None:
    """Time and name of a peer's best way; of ours, those on any array."""
    names = [name for name in times if name == peer or (name.startswith(peer + ",") and peer not in OURS)]
    found = [(times[name][which], name) for name in names]
    return min(found) if found else None


def open_collectives() -> dict[str, CollectiveFront]:
    """All that can be had here, by name; says why the others cannot."""
    communicator = open_communicator()
    collectives: dict[str, CollectiveFront] = {}
    for name in ("AUTO", *(one.name for one, row in BACKENDS.items() if row.takes_host_arrays)):
        try:
            collectives[name] = selection.choose(communicator, CommunicationOptions(implementation=name))
        except UnavailableError as error:
            say(str(error))
    return collectives


def open_maker(collectives: Mapping[str, CollectiveFront], gloo: Any) -> Maker:
    """All ways for an array of so many float32."""
    communicator = open_communicator()
    native, why = open_native()
    say(f"C: {why}")

    def make(count: int) -> dict[str, Way]:
        array, total = np.zeros(count, np.float32), np.zeros(count, np.float32)
        ways: dict[str, Way] = {}
        if array.nbytes >= IN_PLACE_FROM and len(communicator.node_sizes) == 1:
            ways["memory limit"] = limit_way(communicator, count)
        ways |= our_ways(collectives, array) | mpi_ways(array, total)
        if native is not None:
            ways |= native_ways(native, array, total)
        return ways | (gloo_ways(gloo, array) if gloo is not None else {})

    return make


def sweep(make: Maker, sizes: list[int], rounds: int, seconds: float) -> dict[int, Times]:
    """All ways over all sizes."""
    results: dict[int, Times] = {}
    say(f"\nall-reduce of float32, {WORLD.size} ranks: microseconds, median, each peer at its best")
    say(f"{'bytes':>10}" + "".join(f"{name:>16}" for name in COLUMNS))
    for size in sizes:
        ways = make(size // 4)
        check(ways)
        calls = max(1, int(measure.SHARE * min(200, (1 << 22) // size)))
        begin = time.perf_counter()
        interleaved(ways, calls, 1)
        affordable = int(seconds / (time.perf_counter() - begin) * 2)
        times = results[size] = interleaved(ways, calls, WORLD.bcast(max(3, min(rounds, affordable))))
        columns = [best_of(times, name) for name in COLUMNS]
        say(f"{size:10}" + "".join(f"{found[0]:16.2f}" if found else f"{'-':>16}" for found in columns))
    return results


def nest_ways(collective: CollectiveFront) -> dict[str, Way]:
    """ResNet-50's arrays as they are, each for itself, and as views of one array: both without a call for each."""
    apart = [np.zeros(shape, np.float32) for shape in SHAPES]
    flat = np.zeros(sum(array.size for array in apart), np.float32)
    views = views_of(flat)

    def run(arrays: list[Array]) -> Callable[[int], None]:
        return repeated(lambda: all_reduce_nest(collective, arrays, in_place=True))

    return {"AUTO, nest of 161": Way(apart, run(apart)), "AUTO, nest of 161 views": Way((flat,), run(views))}


def views_of(flat: Array) -> list[Array]:
    """ResNet-50's arrays as views of one."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def resnet50(make: Maker, collective: CollectiveFront, gloo: Any, horovod: Any, rounds: int) -> Times:
    """ResNet-50's gradients: as one flat array with a view for each, or array by array."""
    count = sum(int(np.prod(shape)) for shape in SHAPES)
    ways = {name: way for name, way in make(count).items() if "allocated" in name or "," not in name or "MPI" in name}
    array = np.zeros(count, np.float32)
    views = views_of(array)
    ways |= (nests := nest_ways(collective))

    def per_tensor() -> None:
        for view in views:
            WORLD.Allreduce(MPI.IN_PLACE, view)

    ways["raw MPI, per tensor"] = Way((array,), repeated(per_tensor))
    if gloo is not None:
        ways |= gloo_tensor_ways(gloo, array, views) | gloo_ways(gloo, array)
    if horovod is not None:
        ways |= horovod_ways(horovod, array, views)
    check(ways)
    times = interleaved(ways, 1, rounds)
    mine = times["AUTO, allocated" if "AUTO, allocated" in times else "AUTO"]["median"]
    say(f"\nResNet-50's gradients: {len(SHAPES)} arrays, {count} float32, {WORLD.size} ranks")
    say(f"{'':32}{'min ms':>9}{'median':>9}{'/ AUTO, allocated':>19}")
    for name, t in times.items():
        say(f"{name:32}{t['min'] / 1e3:9.2f}{t['median'] / 1e3:9.2f}{t['median'] / mine:19.2f}")
    if horovod is not None:
        say_horovod(times, tuple(nests))
    return times


def say_horovod(times: Times, ours: Sequence[str]) -> None:
    """How many times Horovod's fused path takes, by its defaults and at its best, of what ours take."""
    for which in ("min", "median"):
        paths = [best for path in ("fused", "grouped") if (best := best_of(times, f"Horovod, {path}", which))]
        names = f"Horovod, fused, {HOROVOD_DEFAULTS}", min(paths)[1]
        for name, own in itertools.product(names, ours):
            say(f"{which}: {name} / {own}: {times[name][which] / times[own][which]:.2f}")


def ratios_of(results: Mapping[int, Times], which: str) -> dict[str, dict[int, float]]:
    """What the figures are wanted for, by size; from minima or medians."""
    ratios: dict[str, dict[int, float]] = {}

    def note(what: str, over: str, under: str, low: int, high: int) -> None:
        for size, times in results.items():
            a, b = best_of(times, over, which), best_of(times, under, which)
            if a and b and low <= size <= high:
                value = a[0] - b[0] if " - " in what else a[0] / b[0]
                ratios.setdefault(what, {})[size] = round(value, 3)

    large = 1 << 24, 1 << 40
    note("NODE, allocated / memory limit", "NODE, allocated", "memory limit", *large)
    note("NODE, any array / memory limit", "NODE", "memory limit", *large)
    note("raw MPI, one call / NODE, allocated", "raw MPI, one call", "NODE, allocated", *large)
    note("raw MPI, one call / NODE, any array", "raw MPI, one call", "NODE", *large)
    note("AUTO - raw MPI, microseconds", "AUTO", "raw MPI", 0, 1 << 10)
    note("raw MPI at its best / AUTO", "raw MPI", "AUTO", 0, 1 << 40)
    note("C MPI at its best / AUTO", "C MPI", "AUTO", 0, 1 << 40)
    say(f"\nratios of {which} times, by size in bytes")
    for what, values in ratios.items():
        say(f"{what:36}" + "  ".join(f"{size}: {value:.2f}" for size, value in values.items()))
    return ratios


def plot(path: str, results: Mapping[int, Times]) -> None:
    """Time and bandwidth over size, both axes logarithmic."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), constrained_layout=True)
    for peer in COLUMNS:
        found = [(size, best[0]) for size, times in results.items() if (best := best_of(times, peer))]
        if not found:
            continue
        sizes, values = [size for size, _ in found], [value for _, value in found]
        style = "k--" if peer == "memory limit" else ".-"
        left.loglog(sizes, values, style, label=peer)
        right.loglog(sizes, [size / value / 1e3 for size, value in found], style, label=peer)
    left.set_ylabel("microseconds (median, each at its best)")
    right.set_ylabel("GB/s: bytes of the array / time")
    for axis in (left, right):
        axis.set_xlabel("bytes of each rank's float32 array")
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.suptitle(f"all-reduce, {WORLD.size} ranks, {measure.machine()['mpi'][:40]}")
    figure.savefig(path, dpi=110)
    say(f"wrote {path}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--from-bytes", default=4, show_default=True, help="Smallest array.")
@click.option("--to-bytes", default=1 << 28, show_default=True, help="Largest array; sizes grow by a factor of 4.")
@click.option("--rounds", default=15, show_default=True, help="Repetitions of each way, at most.")
@click.option("--seconds", default=20.0, show_default=True, help="Time for each size; at least 3 rounds are made.")
@click.option("--sweep/--no-sweep", "with_sweep", default=True, help="With arrays of all sizes.")
@click.option("--gloo/--no-gloo", "with_gloo", default=True, help="With PyTorch and Horovod.")
@click.option("--model/--no-model", "with_model", default=True, help="With ResNet-50's gradients.")
@click.option("--plot", "plot_path", help="Write a log-log plot.")
@click.option("--json", "json_path", help="Write the figures.")
def main(  # noqa: PLR0913 - one argument for each option
    from_bytes: int, to_bytes: int, rounds: int, seconds: float, with_sweep: bool, with_gloo: bool, with_model: bool,
    plot_path: str | None, json_path: str | None,
) -> None:
    if from_bytes < 4 or to_bytes < from_bytes:
        raise click.BadParameter(f"expected 4 <= --from-bytes <= --to-bytes, got {from_bytes} and {to_bytes}")
    if plot_path and not with_sweep:
        raise click.UsageError("--plot draws all sizes: expected it without --no-sweep")
    sizes = [size for power in range(20) if from_bytes <= (size := 4**power * 4) <= to_bytes]
    gloo, horovod = (open_gloo(), open_horovod()) if with_gloo else (None, None)
    collectives = open_collectives()
    make = open_maker(collectives, gloo)
    results = sweep(make, sizes, rounds, seconds) if with_sweep else {}
    model = resnet50(make, collectives["AUTO"], gloo, horovod, rounds) if with_model else {}
    ratios = {which: ratios_of(results, which) for which in ("min", "median")} if results else {}
    figures = {"times_us": results, "resnet50_us": model, "ratios": ratios}
    measure.record(json_path, figures)
    if plot_path and WORLD.rank == 0:
        plot(plot_path, results)


if __name__ == "__main__":
    main()
