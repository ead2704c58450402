"""How much of a reduction hides behind computation?

    mpirun -n 2 python benchmarks/overlap.py --plot overlap.png --json overlap.json

A step computes in pieces, after each of which a bucket of gradients is there, as in a backward pass. Measured in
turns: computation alone, communication alone, one after the other, and ways to do both at once: our thread with each
backend, and `MPI_Iallreduce` with a Test between pieces. Ideal is the longer of the two. One thread of BLAS per rank.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
import numpy.typing as npt
from measure import WORLD, Case, say
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpidist.comm.choice import selection
from mpidist.comm.cross_device.asynchronous import AsyncCollective, open_asynchronous
from mpidist.comm.group.opening import open_communicator
from mpidist.options import CommunicationOptions

Array = npt.NDArray[Any]
KINDS = ("matmul", "NumPy", "Python", "GPU")
CHUNK = 1 << 18  # elements: 1 MB, what the backend MPI sends in one call


def computation(kind: str, milliseconds: float) -> Case:
    """A piece of work of about this length: matrix products, short NumPy calls, plain Python, or a wait for a GPU."""
    if kind == "GPU":
        # What a kernel on a GPU is to this process: no core of the host is busy.
        return lambda: time.sleep(milliseconds * 1e-3)
    if kind == "matmul":
        a, b, c = (np.ones((96, 96), np.float32) for _ in range(3))

        def unit() -> None:
            np.matmul(a, b, out=c)
    elif kind == "NumPy":
        x, y = np.ones(4096, np.float32), np.ones(4096, np.float32)

        def unit() -> None:
            np.add(x, y, out=y)
    else:
        def unit() -> None:
            sum(range(500))

    times = []
    for _ in range(200):
        begin = time.perf_counter()
        unit()
        times.append(time.perf_counter() - begin)
    count = WORLD.bcast(max(1, round(milliseconds * 1e-3 / sorted(times)[len(times) // 10])))

    def piece() -> None:
        for _ in range(count):
            unit()

    return piece


def chunks_of(bucket: Array) -> list[Array]:
    return [bucket[at : at + CHUNK] for at in range(0, bucket.size, CHUNK)]


def nonblocking(piece: Case, buckets: list[Array], *, one_call: bool) -> Case:
    """`MPI_Iallreduce` of each bucket, in chunks or in one call, with a Test of the oldest ones between pieces."""

    def case() -> None:
        requests: list[MPI.Request] = []
        for bucket in buckets:
            piece()
            requests += [
                WORLD.Iallreduce(MPI.IN_PLACE, part) for part in ([bucket] if one_call else chunks_of(bucket))
            ]
            while requests and requests[0].Test():
                requests.pop(0)
        MPI.Request.Waitall(requests)

    return case


def by_thread(piece: Case, buckets: list[Array], asynchronous: AsyncCollective) -> Case:
    def case() -> None:
        handles = []
        for bucket in buckets:
            piece()
            handles.append(asynchronous.all_reduce_async(bucket))
        for handle in handles:
            handle.wait()

    return case


def compare(kind: str, buckets: list[Array], rounds: int) -> dict[str, Any]:
    """One figure: computation of one kind, as long as the communication by MPI alone."""
    communicator = open_communicator()
    backends = {
        name: selection.choose(communicator, CommunicationOptions(implementation=name)) for name in ("MPI", "AUTO")
    }
    threads = {
        name: open_asynchronous(one, CommunicationOptions(implementation=name)) for name, one in backends.items()
    }

    def reduced(name: str) -> Case:
        return lambda: [backends[name].all_reduce(bucket, in_place=True) for bucket in buckets]

    alone = measure.interleaved({"MPI": reduced("MPI")}, 9)["MPI"]["min"]
    piece = computation(kind, alone / len(buckets))

    def computed() -> None:
        for _ in buckets:
            piece()

    def blocking(name: str) -> Case:
        def case() -> None:
            for bucket in buckets:
                piece()
                backends[name].all_reduce(bucket, in_place=True)

        return case

    cases: dict[str, Case] = {
        "computation": computed, "communication, MPI": reduced("MPI"), "communication, AUTO": reduced("AUTO"),
        "one after the other, MPI": blocking("MPI"), "one after the other, AUTO": blocking("AUTO"),
        "thread, MPI": by_thread(piece, buckets, threads["MPI"]),
        "thread, AUTO": by_thread(piece, buckets, threads["AUTO"]),
        "Iallreduce in chunks, Test": nonblocking(piece, buckets, one_call=False),
        "Iallreduce in one call, Test": nonblocking(piece, buckets, one_call=True),
    }
    times = measure.interleaved(cases, rounds)
    # Ratios are those of the fastest rounds: what disturbs a machine makes sums of parts look longer than the whole.
    best = {name: t["min"] for name, t in times.items()}
    compute = best["computation"]
    say(f"\n{kind}: {len(buckets)} buckets of {buckets[0].nbytes >> 20} MB, {WORLD.size} ranks, "
        f"{len(os.sched_getaffinity(0))} cores for this rank")
    say(f"{'':32}{'min ms':>9}{'median':>9}{'/ longer':>10}{'/ sum':>8}{'hidden':>8}")
    figures: dict[str, dict[str, float]] = {}
    for name, t in times.items():
        communication = best["communication, AUTO" if name.endswith("AUTO") else "communication, MPI"]
        longer, both = max(compute, communication), compute + communication
        figures[name] = {
            **t, "of_longer": t["min"] / longer, "of_sum": t["min"] / both,
            "hidden": (both - t["min"]) / min(compute, communication),
        }
        ratios = "" if name.startswith(("computation", "communication")) else (
            f"{t['min'] / longer:10.2f}{t['min'] / both:8.2f}{figures[name]['hidden']:8.0%}"
        )
        say(f"{name:32}{t['min']:9.2f}{t['median']:9.2f}{ratios}")
    return {"times_ms": figures}


def plot(path: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Bars: milliseconds of each way, with lines at the longer one and at the sum."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(figures), figsize=(4.6 * len(figures), 4.2), constrained_layout=True)
    for axis, (title, result) in zip(np.atleast_1d(axes), figures.items(), strict=True):
        times = result["times_ms"]
        heights = [t["min"] for t in times.values()]
        bars = axis.bar([name.replace(", ", "\n") for name in times], heights)
        axis.bar_label(bars, [f"{height:.0f}" for height in heights])
        pair = [times["computation"]["min"], times["communication, MPI"]["min"]]
        axis.axhline(max(pair), linestyle="--", label="the longer one (MPI)")
        axis.axhline(sum(pair), linestyle=":", label="sum (MPI)")
        axis.legend(fontsize=7)
        axis.set_title(title)
        axis.tick_params(axis="x", labelsize=6, rotation=60)
        axis.set_ylabel("ms per step (fastest)")
    mpi = " ".join(measure.machine()["mpi"].split())
    figure.suptitle(f"Reduction beside computation, {WORLD.size} ranks, {mpi[:40]}")
    figure.savefig(path, dpi=110)
    say(f"wrote {Path(path)}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--rounds", default=15, show_default=True, help="Repetitions of each case.")
@click.option("--buckets", "count", default=8, show_default=True, help="Buckets of gradients.")
@click.option("--megabytes", default=4, show_default=True, help="Size of a bucket.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(rounds: int, count: int, megabytes: int, plot_path: str | None, json_path: str | None) -> None:
    buckets = [np.zeros(megabytes << 18, np.float32) for _ in range(count)]
    with threadpool_limits(limits=1):
        figures = {kind: compare(kind, buckets, rounds) for kind in KINDS}
    cores = len(os.sched_getaffinity(0))
    measure.record(json_path, {"figures": figures, "cores_of_rank_0": cores, "megabytes": megabytes, "buckets": count})
    if plot_path and WORLD.rank == 0:
        plot(plot_path, figures)


if __name__ == "__main__":
    main()
