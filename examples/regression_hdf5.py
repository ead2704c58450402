"""Linear regression on an HDF5 file that is larger than memory: each rank reads its rows of a batch, and keeps none.

    python examples/regression_hdf5.py --data rows.h5 --rows 1000000
    mpirun -n 4 python examples/regression_hdf5.py --data rows.h5 --plot loss.png

Without a file at --data the first rank writes one of --rows rows and 64 columns of float32, a piece at a time: 256 MB
for a million rows. Training reads the file once per epoch. `hdf5_reader` opens it on every rank; a rank reads those
rows of each batch that are its share, in one piece, in a thread that is a batch ahead. The program prints how much
memory a rank has needed beside the size of the file.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import numpy.typing as npt
import plots

import mpidist

Array = npt.NDArray[Any]
COLUMNS, NOISE, PIECE = 64, 0.1, 1 << 14


def wanted() -> Array:
    """Give the weights with which the file is made."""
    return np.random.default_rng(3).normal(0, 1, COLUMNS).astype(np.float32)


def write_rows(path: Path, rows: int) -> None:
    """Write a file of rows x and y = x w + noise, a piece at a time."""
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (rows, COLUMNS), "f4")
        y = file.create_dataset("y", (rows,), "f4")
        for begin in range(0, rows, PIECE):
            random = np.random.default_rng(begin)
            piece = random.standard_normal((min(PIECE, rows - begin), COLUMNS), np.float32)
            x[begin : begin + len(piece)] = piece
            y[begin : begin + len(piece)] = piece @ wanted() + NOISE * random.standard_normal(len(piece), np.float32)


def peak_memory() -> int:
    """Give the largest amount of memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--data", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The HDF5 file.")
@click.option("--rows", default=200_000, show_default=True, type=click.IntRange(1), help="Rows of a new file.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--batch", default=1024, show_default=True, type=click.IntRange(1), help="Rows in a step of all ranks.")
@click.option("--learning-rate", default=0.1, show_default=True)
@plots.plot_option
def main(data: Path, rows: int, epochs: int, batch: int, learning_rate: float, plot_path: str | None) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    if mpidist.is_first_rank() and not data.exists():
        write_rows(data, rows)
    # Every rank waits here until the file is whole.
    strategy.reduce("SUM", 0, axis=None)
    before = peak_memory()

    options = mpidist.data.Options()
    # One file, so its rows are shared out, not files.
    options.experimental_distribute.auto_shard_policy = mpidist.data.AutoShardPolicy.DATA
    reader = mpidist.data.hdf5_reader("x", "y")
    dataset = mpidist.data.Dataset.from_files([str(data)], reader).batch(batch, drop_remainder=True)
    dataset = dataset.with_options(options)
    batches = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        weights = mpidist.Variable(np.zeros(COLUMNS, np.float32))
        optimizer = mpidist.optimizers.SGD(learning_rate)

    def train_step(x: Array, y: Array) -> Array:
        error = x @ weights.value() - y
        optimizer.apply_gradients([(x.T @ error / np.float32(batch), weights)])
        return error**2

    losses = []
    for _ in range(epochs):
        for inputs in batches:
            losses.append(float(strategy.reduce("MEAN", strategy.run(train_step, args=inputs), axis=0)))
    off = float(np.abs(weights.numpy() - wanted()).max())
    more = max(strategy.gather_object(peak_memory() - before))
    if mpidist.is_first_rank():
        click.echo(
            f"{strategy.num_replicas_in_sync} replica(s), {len(losses)} steps; loss {losses[0]:.2f} at first, "
            f"{losses[-1]:.4f} at last; weights are off by {off:.3f} at most"
        )
        click.echo(f"the file has {data.stat().st_size >> 20} MB, and a rank has taken {more >> 20} MB to train")
        plots.plot_losses(plot_path, losses)


if __name__ == "__main__":
    main()
