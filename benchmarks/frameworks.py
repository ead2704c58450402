"""What does training on several ranks cost a model of PyTorch, Keras or JAX, beyond the step of each rank by itself?

    mpirun -n 2 python benchmarks/frameworks.py --plot frameworks.png --json frameworks.json
    mpirun -n 2 python benchmarks/frameworks.py --only torch --profile

Ways of one framework take turns in one run, with one thread per rank. The bound is the same step without
communication: what a way costs is its time beyond that. The peers are PyTorch's DistributedDataParallel over gloo, with
the size of its buckets that is fastest here; of JAX, `io_callback` and what NumPy's arrays take. `--profile` prints the
parts of a step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# Before NumPy and PyTorch start their threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import measure
import numpy as np
from measure import SHARE, WORLD, Case, say

import mpidist
from mpidist.arrays import AnyArray


class Comparison(NamedTuple):
    """The ways of one framework.

    Attributes:
        question: What is compared.
        bound: The way that communicates nothing.
        ours: The way of mpidist.
        ways: Makes all of them; a Case is one step.
        stop: Ends what they have started.
    """

    question: str
    bound: str
    ours: str
    ways: Mapping[str, Case]
    stop: Case


def torch_sgd(strategy: mpidist.Strategy) -> Comparison:
    """25 million parameters in six layers, 8 rows per rank, SGD."""
    torch, ours = importlib.import_module("torch"), importlib.import_module("mpidist.torch")
    gloo: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    gloo.init_process_group(
        "gloo", init_method=f"file://{_common_folder()}/store", rank=WORLD.rank, world_size=WORLD.size
    )
    widths = [round(width * SHARE**0.5) for width in (1024, 2304, 2304, 2304, 2304, 2304, 512)]
    own = torch.Generator().manual_seed(WORLD.rank)
    x, y = torch.randn(8, widths[0], generator=own), torch.randint(0, widths[-1], (8,), generator=own)
    loss = torch.nn.CrossEntropyLoss()

    def step_of(wrap: Callable[[Any], Any]) -> Case:
        torch.manual_seed(0)
        layers = [layer for sizes in itertools.pairwise(widths) for layer in (
            torch.nn.Linear(*sizes), torch.nn.Tanh()
        )]
        model = torch.nn.Sequential(*layers[:-1])
        called = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            loss(called(x), y).backward()
            optimizer.step()

        return step

    def data_parallel(megabytes: int) -> Case:
        return step_of(
            lambda model: torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, bucket_cap_mb=megabytes
            )
        )

    ways: dict[str, Case] = {"no communication": step_of(lambda model: model)}
    ways |= {f"DDP over gloo, buckets of {megabytes} MB": data_parallel(megabytes) for megabytes in (4, 25, 100)}
    ways["mpidist"] = step_of(lambda model: ours.distribute(model, strategy=strategy))
    return Comparison(
        "PyTorch, 25 M parameters, SGD", "no communication", "mpidist", ways, gloo.destroy_process_group
    )


def keras_fit(strategy: mpidist.Strategy) -> Comparison:
    """Keras's `fit`, 9.4 million parameters, six batches of 32 rows per rank, SGD; the backend is KERAS_BACKEND's."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras, ours = importlib.import_module("keras"), importlib.import_module("mpidist.keras")
    inputs, hidden, outputs = (round(width * SHARE**0.5) for width in (1024, 1536, 512))
    batch = 32 * WORLD.size
    random = np.random.default_rng(0)
    x = random.standard_normal((6 * batch, inputs)).astype("float32")
    y = random.integers(0, outputs, len(x))

    def make() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            keras.Input((inputs,)), *(keras.layers.Dense(hidden, activation="tanh") for _ in range(4)),
            keras.layers.Dense(outputs),
        ])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    alone, together = make(), ours.distribute(make(), strategy)
    rows = slice(WORLD.rank, None, WORLD.size)
    ways: dict[str, Case] = {
        "alone, its part of each batch": lambda: alone.fit(x[rows], y[rows], batch_size=32, shuffle=False, verbose=0),
        "mpidist": lambda: together.fit(x, y, batch_size=batch, shuffle=False, verbose=0),
    }
    question = f"Keras's fit on {keras.backend.backend()}, {together.count_params() / 1e6:.1f} M parameters, six steps"
    return Comparison(question, "alone, its part of each batch", "mpidist", ways, lambda: None)


def jax_mean(strategy: mpidist.Strategy, elements: int, calls: int) -> Comparison:
    """The mean of one array of gradients, inside a compiled program of JAX and outside; a case makes several calls."""
    jax, ours = importlib.import_module("jax"), importlib.import_module("mpidist.jax")
    io_callback = importlib.import_module("jax.experimental").io_callback
    extended = strategy.extended

    def reduced_copy(given: Any) -> Any:
        return extended.all_reduce("MEAN", np.array(given), in_place=True)

    def by_callback(x: Any) -> Any:
        return io_callback(reduced_copy, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    def of_jax(function: Callable[[Any], Any]) -> Case:
        array = jax.numpy.ones(elements)

        def case() -> None:
            nonlocal array
            for _ in range(calls):
                array = jax.block_until_ready(function(array))

        return case

    def of_numpy(array: AnyArray) -> Case:
        array[...] = 1

        def case() -> None:
            for _ in range(calls):
                extended.all_reduce("MEAN", array, in_place=True)

        return case

    def mean(x: Any) -> Any:
        return ours.all_reduce("MEAN", x, strategy)

    ways = {
        "no communication": of_jax(jax.jit(lambda x: x * 1, donate_argnums=0)),
        "mpidist": of_jax(jax.jit(mean, donate_argnums=0)),
        "io_callback, ordered": of_jax(jax.jit(by_callback, donate_argnums=0)),
        "mpidist outside jit": of_jax(mean),
        "NumPy in place": of_numpy(np.ones(elements, np.float32)),
        "NumPy in place, allocated": of_numpy(extended.allocate((elements,), np.float32)),
    }
    question = f"JAX, {calls} means of {elements * 4 / 1e6:g} MB inside jax.jit"
    return Comparison(question, "no communication", "mpidist", ways, lambda: None)


# Framework: its comparison. A new one is a function and a line here.
COMPARISONS: dict[str, Callable[[mpidist.Strategy], Comparison]] = {
    "torch": torch_sgd,
    "keras": keras_fit,
    "jax-small": functools.partial(jax_mean, elements=256, calls=50),
    "jax-large": functools.partial(jax_mean, elements=round(6_250_000 * SHARE), calls=1),
}


def _common_folder() -> str:
    return str(WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None))


def compare(comparison: Comparison, rounds: int) -> dict[str, Any]:
    """Measure all ways in turns, and print what each costs beyond the bound."""
    times = measure.interleaved(comparison.ways, rounds)
    bound = times[comparison.bound]
    beyond = {
        name: {kind: t[kind] - bound[kind] for kind in ("min", "median")}
        for name, t in times.items() if name != comparison.bound
    }
    say(f"\n{comparison.question}, {WORLD.size} ranks")
    say(f"{'':36}{'min ms':>9}{'median':>9}{'beyond: min':>13}{'median':>9}")
    for name, t in times.items():
        costs = "".join(f"{beyond[name][kind]:>{width}.1f}" for kind, width in (("min", 13), ("median", 9))) if (
            name in beyond
        ) else ""
        say(f"{name:36}{t['min']:9.1f}{t['median']:9.1f}{costs}")
    whole = {kind: times[comparison.ours][kind] / bound[kind] for kind in ("min", "median")}
    say(f"{comparison.ours} / {comparison.bound}: min {whole['min']:.2f}, median {whole['median']:.2f}")
    peers = [name for name in beyond if name != comparison.ours]
    if not peers:
        return {"times_ms": times, "beyond_ms": beyond, "whole": whole}
    ratios = {
        kind: min(beyond[name][kind] for name in peers) / max(beyond[comparison.ours][kind], 1e-3)
        for kind in ("min", "median")
    }
    say(f"the best peer / {comparison.ours}, beyond the bound: min {ratios['min']:.2f}, median {ratios['median']:.2f}")
    return {"times_ms": times, "beyond_ms": beyond, "whole": whole, "ratios": ratios}


@contextlib.contextmanager
def profiled(parts: dict[str, list[float]]) -> Iterator[None]:
    """Inside, note the milliseconds of the parts of our step for PyTorch."""
    memory = importlib.import_module("mpidist.torch.memory")
    places, whole = memory.GradientPlace, memory.GradientMemory
    extended = mpidist.StrategyExtended
    methods = [
        (places, "take", "copies of gradients"), (whole, "collect", "flags, statistics, gradients left"),
        (extended, "all_reduce", "the reduction"), (whole, "distribute", "views of the result"),
    ]
    before = [getattr(owner, name) for owner, name, _ in methods]

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                parts.setdefault(part, []).append((time.perf_counter() - begin) * 1e3)

        return call

    for (owner, name, part), function in zip(methods, before, strict=True):
        setattr(owner, name, timed(function, part))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(methods, before, strict=True):
            setattr(owner, name, function)


def profile(comparison: Comparison, rounds: int) -> None:
    """Print the parts of our step on rank 0."""
    parts: dict[str, list[float]] = {}
    with profiled(parts):
        for _ in range(rounds):
            WORLD.Barrier()
            comparison.ways[comparison.ours]()
    say("parts of a step, ms (all calls of a step together, mean over the rounds):")
    for part, times in parts.items():
        calls = f"{len(times) // rounds} calls, median {statistics.median(times):.3f}"
        say(f"  {part:36}{sum(times) / rounds:8.2f}   {calls}")


def plot(path: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Bars: the fastest of each way in milliseconds."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(figures), figsize=(4 * len(figures), 4.4), constrained_layout=True)
    for axis, result in zip(np.atleast_1d(axes), figures.values(), strict=True):
        times = result["times_ms"]
        bars = axis.bar([name.replace(", ", "\n") for name in times], [t["min"] for t in times.values()])
        axis.bar_label(bars, [f"{t['min']:.3g}" for t in times.values()])
        axis.set_title(result["question"].replace(", ", "\n", 1), fontsize=9)
        axis.tick_params(axis="x", labelsize=7, rotation=60)
        axis.set_ylabel("ms (fastest)")
    figure.suptitle(f"Frameworks, {WORLD.size} ranks, {' '.join(measure.machine()['mpi'].split())[:40]}")
    figure.savefig(path, dpi=110)
    say(f"wrote {path}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--only", multiple=True, type=click.Choice(list(COMPARISONS)), help="Default: all.")
@click.option("--rounds", default=20, show_default=True, help="Steps of each way.")
@click.option("--profile", "profiles", is_flag=True, help="Print the parts of our step, too.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(only: tuple[str, ...], rounds: int, profiles: bool, plot_path: str | None, json_path: str | None) -> None:
    figures = {}
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        for name in only or tuple(COMPARISONS):
            comparison = COMPARISONS[name](strategy)
            figures[name] = {"question": comparison.question, **compare(comparison, rounds)}
            if profiles and name == "torch":
                profile(comparison, rounds)
            comparison.stop()
    measure.record(json_path, {"figures": figures})
    if plot_path and WORLD.rank == 0:
        plot(plot_path, figures)


if __name__ == "__main__":
    main()
