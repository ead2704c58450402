"""How fast are arrays in GPU memory combined, and against the copy speed of the GPU and of its link to the host?

    mpirun -n 2 python benchmarks/gpu.py --plot gpu.png --json gpu.json

Measured in turns in one run: all-reduce in place by NCCL, CUDA-aware MPI and staging, as far as they can be had; as
limits a copy within the GPU, and the two copies between GPU and pinned host memory that staging cannot do without; and
Adam on the GPU, as one kernel and function by function. Without a GPU it says so and ends with 1. Never run on one yet.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from measure import WORLD, interleaved, record, say

from mpidist.cluster.gpu import agree, bind, why_no_gpu
from mpidist.comm import selection
from mpidist.comm.automatic_collective import AutomaticCollective
from mpidist.comm.communicator import Communicator, open_communicator
from mpidist.comm.cuda_awareness import TRANSPORT, Transport
from mpidist.errors import UnavailableError
from mpidist.optimizers.adam import AdamKernel
from mpidist.optimizers.fused import fused
from mpidist.options import CommunicationOptions

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
Case = Callable[[], object]


def open_transports(communicator: Communicator, cupy: Any) -> dict[str, Any]:
    """The collectives for CuPy arrays that can be had."""
    opened: dict[str, Any] = {}
    for transport in (Transport.NCCL, Transport.CUDA_AWARE, Transport.STAGED):
        os.environ[TRANSPORT] = transport.value
        collective = selection.choose(communicator, CommunicationOptions())
        try:
            if isinstance(collective, AutomaticCollective):
                collective.backend(cupy.zeros(1), 8)
            opened[transport.value] = collective
        except UnavailableError as error:
            say(f"without {transport.value}: {error}")
    return opened


def finished(cupy: Any, call: Case) -> Case:
    """The call, and the wait for what it has started."""
    def run() -> None:
        call()
        cupy.cuda.get_current_stream().synchronize()

    return run


def cases_of(cupy: Any, collectives: dict[str, Any], byte_count: int) -> dict[str, Case]:
    """What is measured for one size."""
    count = byte_count // 4
    values, other = cupy.zeros(count, np.float32), cupy.zeros(count, np.float32)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(byte_count), np.float32, count)

    def to_host_and_back() -> None:
        values.get(out=pinned)
        values.set(pinned)

    return {
        "copy in the GPU": finished(cupy, functools.partial(cupy.copyto, other, values)),
        "copy to the host and back": finished(cupy, to_host_and_back),
        **{
            name: finished(cupy, functools.partial(collective.all_reduce, values, in_place=True))
            for name, collective in collectives.items()
        },
    }


def update_cases(cupy: Any, count: int) -> dict[str, Case]:
    """Adam's update, as one kernel and function by function."""
    kernel = AdamKernel(0.9, 0.999, 1e-7)
    blocks = [cupy.ones(count, np.float32) for _ in range(4)]
    update = kernel.prepare(1, 0.001)
    return {
        name: finished(cupy, functools.partial(one, blocks[0], blocks[1], blocks[2:], []))
        for name, one in (("one kernel", fused(update, 2, 0)), ("function by function", update))
    }


@click.command()
@click.option("--rounds", default=20, help="Rounds over all cases.")
@click.option("--plot", default=None, help="Write a plot there.")
@click.option("--json", "path", default=None, help="Write the figures there.")
def main(rounds: int, plot: str | None, path: str | None) -> None:
    """Measure, print a table, and write what was asked for."""
    missing = why_no_gpu()
    if missing is not None:
        say(f"nothing to measure: {missing}")
        sys.exit(1)
    binding = bind(None, {**os.environ, "MPIDIST_DEVICE": "gpu"})
    communicator = open_communicator()
    agree(binding, communicator)
    cupy = importlib.import_module("cupy")
    collectives = open_transports(communicator, cupy)
    results: dict[str, Any] = {"ranks": WORLD.size, "gpu": binding.uuid, "all_reduce": {}}
    for size in SIZES:
        times = interleaved(cases_of(cupy, collectives, size), rounds)
        results["all_reduce"][str(size)] = times
        listed = ", ".join(f"{name} {value['median'] * 1e3:.0f}" for name, value in times.items())
        say(f"{size:>11} bytes, us: {listed}")
    results["adam"] = interleaved(update_cases(cupy, 1 << 25), rounds)
    for name, value in results["adam"].items():
        say(f"Adam, 2**25 parameters, {name}: {value['median']:.2f} ms")
    record(path, results)
    if plot and WORLD.rank == 0:
        draw(results["all_reduce"], plot)


def draw(results: dict[str, Any], path: str) -> None:
    """Bytes per second against bytes, a line for each way."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    sizes = [int(size) for size in results]
    for name in next(iter(results.values())):
        speeds = [int(size) / times[name]["median"] / 1e6 for size, times in results.items()]
        axes.loglog(sizes, speeds, marker="o", label=name)
    axes.set_xlabel("bytes")
    axes.set_ylabel("GB/s")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
