"""How fast is the input: examples per second through the distributed pipeline, and memory with and without `shared`?

    mpirun -n 2 python benchmarks/input.py --plot input.png --json input.json

Every rank reads its half of shuffled global batches, in one run, in turns: mpidist, a bare NumPy loop over the same
rows, PyTorch's `DataLoader` with `DistributedSampler` without worker processes, and Grain likewise, where they
are installed. The consumer looks at each batch (a sum), as training would.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
import numpy.typing as npt
from measure import WORLD, Case, say

import mpidist
from mpidist.data import Dataset

Array = npt.NDArray[Any]
# Name, examples, shape of an example, dtype, global batch size.
DATA: tuple[tuple[str, int, tuple[int, ...], str, int], ...] = (
    ("MNIST, batches of 256", 60_000, (28, 28), "uint8", 256),
    ("CIFAR-10, batches of 256", 20_000, (32, 32, 3), "float32", 256),
    ("64x64x3, batches of 512", 16_384, (64, 64, 3), "uint8", 512),
    ("vectors of 1024, batches of 4096", 65_536, (1024,), "float32", 4096),
)


def consume(batches: Iterable[Any]) -> None:
    """Touch every batch."""
    for x, y in batches:
        x.ravel()[::64].sum()
        y.sum()


def numpy_case(x: Array, y: Array, batch_size: int) -> Case:
    """The same rows in the same way, without a pipeline: a permutation, slices of it, one `take` per array."""
    generator = np.random.default_rng(0)
    rank, size = WORLD.rank, WORLD.size

    def case() -> None:
        order = generator.permutation(len(x))
        mine = batch_size // size

        def batches() -> Iterable[Any]:
            for begin in range(0, len(x) - batch_size + 1, batch_size):
                rows = order[begin + rank * mine : begin + (rank + 1) * mine]
                yield x.take(rows, axis=0), y.take(rows, axis=0)

        consume(batches())

    return case


def torch_case(x: Array, y: Array, batch_size: int, workers: int) -> Case:
    """PyTorch's loader over the same arrays."""
    torch = importlib.import_module("torch")
    data = torch.utils.data
    torch.set_num_threads(1)
    dataset = data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    sampler = data.distributed.DistributedSampler(dataset, WORLD.size, WORLD.rank, shuffle=True, drop_last=True)
    loader = data.DataLoader(
        dataset, batch_size // WORLD.size, sampler=sampler, drop_last=True, num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: consume((a.numpy(), b.numpy()) for a, b in loader)


def grain_case(x: Array, y: Array, batch_size: int) -> Case:
    """Grain's `MapDataset`, shuffled, sharded and batched, without worker processes."""
    grain = importlib.import_module("grain.python")

    class Pairs:
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, number: int) -> Any:
            return x[number], y[number]

    shuffled = grain.MapDataset.source(Pairs()).shuffle(seed=0)
    mine = shuffled[WORLD.rank :: WORLD.size].batch(batch_size // WORLD.size, drop_remainder=True)
    return lambda: consume(mine.to_iter_dataset())


def compare(name: str, count: int, shape: tuple[int, ...], dtype: str, size: int, rounds: int) -> dict[str, Any]:
    """One table: examples per second of each way."""
    x = np.zeros((count, *shape), dtype)
    x += np.arange(count).reshape(-1, *(1 for _ in shape)).astype(dtype)
    y = np.arange(count)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    pipeline = Dataset.from_tensor_slices((x, y)).shuffle(count, seed=0).batch(size, drop_remainder=True)
    distributed = strategy.experimental_distribute_dataset(pipeline)
    cases: dict[str, Case] = {"NumPy loop": numpy_case(x, y, size), "mpidist": lambda: consume(distributed)}
    if importlib.util.find_spec("torch"):
        cases["PyTorch"] = torch_case(x, y, size, 0)
    if importlib.util.find_spec("grain"):
        cases["Grain"] = grain_case(x, y, size)
    times = measure.interleaved(cases, rounds)
    # The two that are close get many more passes, which cost little.
    times.update(measure.interleaved({case: cases[case] for case in ("NumPy loop", "mpidist")}, 10 * rounds))
    examples = count // size * size
    rates = {case: examples / t["median"] * 1e3 for case, t in times.items()}
    say(f"\n{name}: {examples} examples of {x[0].nbytes} bytes, {WORLD.size} ranks")
    say(f"{'':16}{'min ms':>9}{'median':>9}{'examples/s':>13}{'/ NumPy loop':>14}")
    for case, t in times.items():
        say(
            f"{case:16}{t['min']:9.1f}{t['median']:9.1f}{rates[case]:13.0f}{rates[case] / rates['NumPy loop']:14.2f}"
        )
    return {"times_ms": times, "examples_per_second": rates, "of_numpy": rates["mpidist"] / rates["NumPy loop"]}


def memory(megabytes: int) -> dict[str, float]:
    """Memory of the node that a data set takes, in copies of it, as every rank loads it and with `shared`."""
    result: dict[str, float] = {}
    for name in ("private", "shared"):
        gc.collect()
        WORLD.Barrier()
        before = WORLD.allreduce(measure.proportional_memory())
        dataset = Dataset.from_tensor_slices(np.ones((megabytes, 2**20), np.uint8))
        if name == "shared":
            dataset = dataset.shared()
        consume((row, row) for row in dataset)
        gc.collect()
        WORLD.Barrier()
        result[name] = (WORLD.allreduce(measure.proportional_memory()) - before) / (megabytes * 2**20)
        WORLD.Barrier()
        del dataset
    say(
        f"\nmemory of the node, in copies of a data set of {megabytes} MiB: private {result['private']:.2f}, "
        f"shared {result['shared']:.2f}"
    )
    return result


def plot(path: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Bars: examples per second of each way; below the number what part of the NumPy loop's that is."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(figures), figsize=(3.4 * len(figures), 3.8), constrained_layout=True)
    for axis, (title, result) in zip(axes, figures.items(), strict=True):
        rates = result["examples_per_second"]
        bars = axis.bar(list(rates), [rate / 1e3 for rate in rates.values()])
        axis.bar_label(bars, [f"{rate / 1e3:.0f}\n{rate / rates['NumPy loop']:.2f}" for rate in rates.values()])
        axis.margins(y=0.15)
        axis.set_title(title, fontsize=9)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_ylabel("thousand examples per second")
    mpi = " ".join(measure.machine()["mpi"].split())
    figure.suptitle(f"Shuffled batches from memory, {WORLD.size} ranks, {mpi[:40]}")
    figure.savefig(path, dpi=110)
    say(f"wrote {Path(path)}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--rounds", default=9, show_default=True, help="Passes of each case.")
@click.option("--megabytes", default=512, show_default=True, help="Size of the data set of the memory figure.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(rounds: int, megabytes: int, plot_path: str | None, json_path: str | None) -> None:
    copies = memory(megabytes)  # first: the peers leave memory behind
    figures = {case[0]: compare(*case, rounds=rounds) for case in DATA}
    measure.record(json_path, {"figures": figures, "memory_in_data_set_copies": copies})
    if plot_path and WORLD.rank == 0:
        plot(plot_path, figures)


if __name__ == "__main__":
    main()
