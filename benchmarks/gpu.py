"""How fast is a training step on GPUs, against plain CuPy, and how fast are arrays in GPU memory combined?

    mpirun -n 2 python benchmarks/gpu.py --plot gpu.png --json gpu.json

Measured in turns in one run:

- A whole step of a network of dense layers: forward and backward, the sum over ranks, Adam; and what a program would do
  without mpidist, on its own GPU alone: the same products, and Adam as one hand-written kernel for each variable. Every
  rank has the same rows, so both must end with the same parameters; how far they are apart is printed.
- All-reduce in place by NCCL, CUDA-aware MPI and staging, as far as they can be had; as limits a copy within the GPU,
  and the two copies between GPU and pinned host memory that staging cannot do without.
- Adam on the GPU, as one kernel and function by function.

Without a GPU it says so and ends with 1.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np
from measure import WORLD, interleaved, record, say

import mpidist
from mpidist.cluster.devices.gpu_binding import agree, bind, why_no_gpu
from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.choice import selection
from mpidist.comm.gpu.transport import TRANSPORT, Transport
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import UnavailableError
from mpidist.optimizers.families.adam import Adam, AdamKernel
from mpidist.options import CommunicationOptions
from mpidist.strategy.multi_worker import MultiWorkerMirroredStrategy
from mpidist.variables.update.fused import fused

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
LAYERS = 4
RATE, BETA_1, BETA_2, EPSILON = 0.001, 0.9, 0.999, 1e-7
# What a program without mpidist would write; two corrections of the moments are numbers of the step.
PLAIN_ADAM = """
m[i] = b1 * m[i] + (1 - b1) * g[i];
v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
p[i] -= rate * (m[i] / c1) / (sqrt(v[i] / c2) + epsilon);
"""
Case = Callable[[], object]


def first_weights(width: int) -> list[Any]:
    """Of `LAYERS` dense layers of one width, in host memory; the same on every rank."""
    random = np.random.default_rng(0)
    shape = (width, width)
    return [(random.standard_normal(shape) * np.sqrt(2 / width)).astype(np.float32) for _ in range(LAYERS)]


def backward(xp: Any, weights: Sequence[Any], x: Any, y: Any, gradients: Sequence[Any], replicas: int) -> Any:
    """Forward and backward through dense layers with ReLU between them; gradients of the mean squared error / replicas.

    Returns:
        The output.
    """
    activations = [x]
    for number, weight in enumerate(weights):
        x = x @ weight
        if number < len(weights) - 1:
            x = xp.maximum(x, 0)
        activations.append(x)
    delta = (x - y) * np.float32(2 / (y.size * replicas))
    for number in reversed(range(len(weights))):
        xp.matmul(activations[number].T, delta, out=gradients[number])
        if number:
            delta = (delta @ weights[number].T) * (activations[number] > 0)
    return x


class MpidistStep:
    """A step with a strategy and its optimizer."""

    def __init__(self, strategy: MultiWorkerMirroredStrategy, width: int, x: Any, y: Any) -> None:
        self.xp = strategy.namespace
        self.replicas = strategy.num_replicas_in_sync
        self.x, self.y = x, y
        with strategy.scope():
            self.variables = [mpidist.Variable(weights) for weights in first_weights(width)]
        self.optimizer = Adam(RATE, BETA_1, BETA_2, EPSILON)
        self.gradients = self.optimizer.gradients(self.variables)

    def __call__(self) -> None:
        """Collective. Forward, backward, the sum over the ranks, and the update."""
        backward(self.xp, self.weights, self.x, self.y, self.gradients, self.replicas)
        self.optimizer.apply_gradients(zip(self.gradients, self.variables, strict=True))

    @property
    def weights(self) -> list[Any]:
        """Local. The parameters."""
        return [variable.value() for variable in self.variables]


class PlainStep:
    """The same on this GPU alone, without mpidist."""

    def __init__(self, cupy: Any, width: int, x: Any, y: Any) -> None:
        self.cupy = cupy
        self.x, self.y = x, y
        self.weights = [cupy.asarray(weights) for weights in first_weights(width)]
        self.gradients, self.means, self.squares = ([cupy.zeros_like(w) for w in self.weights] for _ in range(3))
        self.kernel = cupy.ElementwiseKernel(
            "T b1, T b2, T rate, T c1, T c2, T epsilon, raw T g", "raw T p, raw T m, raw T v", PLAIN_ADAM, "plain_adam",
            no_return=True,
        )
        self.step = 0

    def __call__(self) -> None:
        """Local. Forward, backward and the update."""
        backward(self.cupy, self.weights, self.x, self.y, self.gradients, 1)
        self.step += 1
        numbers = (BETA_1, BETA_2, RATE, 1 - BETA_1**self.step, 1 - BETA_2**self.step, EPSILON)
        for arrays in zip(self.gradients, self.weights, self.means, self.squares, strict=True):
            self.kernel(*numbers, *arrays, size=arrays[0].size)


def measure_step(cupy: Any, rows: int, width: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of the steps, the ratio of the medians, and how far the parameters are apart at the end."""
    random = np.random.default_rng(1)
    x, y = (cupy.asarray(random.standard_normal((rows, width)).astype(np.float32)) for _ in range(2))
    with_mpidist = MpidistStep(MultiWorkerMirroredStrategy(), width, x, y)
    plain = PlainStep(cupy, width, x, y)
    times = interleaved({"mpidist": finished(cupy, with_mpidist), "plain CuPy": finished(cupy, plain)}, rounds)
    apart = max(
        float(abs(one - other).max()) for one, other in zip(with_mpidist.weights, plain.weights, strict=True)
    )
    return {
        "rows": rows, "width": width, "layers": LAYERS, "times": times,
        "ratio": times["mpidist"]["median"] / times["plain CuPy"]["median"], "largest_difference": apart,
    }


def open_transports(communicator: Communicator, cupy: Any) -> dict[str, Any]:
    """The collectives for CuPy arrays that can be had."""
    opened: dict[str, Any] = {}
    asked = os.environ.get(TRANSPORT, Transport.AUTO.value)
    for transport in (Transport.NCCL, Transport.CUDA_AWARE, Transport.STAGED):
        os.environ[TRANSPORT] = transport.value
        collective = selection.choose(communicator, CommunicationOptions())
        try:
            if isinstance(collective.backend, AutomaticBackend):
                collective.backend.backend(cupy.zeros(1), 8)
            opened[transport.value] = collective
        except UnavailableError as error:
            say(f"without {transport.value}: {error}")
    os.environ[TRANSPORT] = asked
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
@click.option("--rows", default=1024, help="Rows of a batch, on each rank.")
@click.option("--width", default=4096, help="Of the layers.")
@click.option("--to-bytes", default=SIZES[-1], help="The largest array that is combined.")
@click.option("--plot", default=None, help="Write a plot there.")
@click.option("--json", "path", default=None, help="Write the figures there.")
def main(rounds: int, rows: int, width: int, to_bytes: int, plot: str | None, path: str | None) -> None:
    """Measure, print a table, and write what was asked for."""
    missing = why_no_gpu()
    if missing is not None:
        say(f"nothing to measure: {missing}")
        sys.exit(1)
    os.environ["MPIDIST_DEVICE"] = "gpu"
    binding = bind()
    communicator = open_communicator()
    agree(binding, communicator)
    cupy = importlib.import_module("cupy")
    collectives = open_transports(communicator, cupy)
    results: dict[str, Any] = {"ranks": WORLD.size, "gpu": binding.uuid, "all_reduce": {}}
    step = results["step"] = measure_step(cupy, rows, width, rounds)
    say(
        f"step of {LAYERS} layers of {width}, {rows} rows a rank: "
        + ", ".join(f"{name} {value['median']:.2f} ms" for name, value in step["times"].items())
        + f", ratio {step['ratio']:.2f}; parameters differ by {step['largest_difference']:.1e} at most"
    )
    for size in (size for size in SIZES if size <= to_bytes):
        times = interleaved(cases_of(cupy, collectives, size), rounds)
        results["all_reduce"][str(size)] = times
        listed = ", ".join(f"{name} {value['median'] * 1e3:.0f}" for name, value in times.items())
        say(f"{size:>11} bytes, us: {listed}")
    count = to_bytes // 4
    results["adam"] = {"parameters": count, "times": interleaved(update_cases(cupy, count), rounds)}
    for name, value in results["adam"]["times"].items():
        say(f"Adam, {count} parameters, {name}: {value['median']:.2f} ms")
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
