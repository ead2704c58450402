"""Train a classifier of handwritten digits: a network with two hidden layers in NumPy, gradients by hand.

    mpirun -n 8 python examples/train.py
    mpirun -n 4 python examples/train.py --device gpu
    mpirun -n 4 python examples/train.py --strategy hybrid
    python examples/train.py --strategy default
    mpirun -n 4 python examples/train.py --checkpoint-dir checkpoints --plot curve.png

The data are the 1797 digits of scikit-learn, or those of --data: an .npz or .h5 file with `x_train`, `y_train`,
`x_test` and `y_test`. With --checkpoint-dir a run that was killed continues from its last checkpoint when it is started
again, on any number of ranks, and ends with the result of an undisturbed run. A run that is about to be ended, by
SIGTERM, SIGUSR1 or Slurm's time limit, saves first; with --requeue Slurm starts it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import click
import digits
import numpy as np
import numpy.typing as npt
import plots

import mpidist
from mpidist import errors, training

Array = npt.NDArray[Any]
# The environment variable that asks for GPUs; all strategies but the default one read it.
DEVICE = "MPIDIST_DEVICE"
STRATEGIES: dict[str, Callable[[], mpidist.Strategy]] = {
    "multi-worker": mpidist.MultiWorkerMirroredStrategy,
    "sharded": lambda: mpidist.MultiWorkerMirroredStrategy(shard_optimizer=True),
    "mirrored": mpidist.MirroredStrategy,
    "central-storage": mpidist.CentralStorageStrategy,
    "tpu": mpidist.TPUStrategy,
    "hybrid": lambda: mpidist.HybridStrategy(2),
    "one-device": lambda: mpidist.OneDeviceStrategy(f"{os.environ[DEVICE]}:0"),
    "default": mpidist.get_strategy,
}


class Losses(training.Callback):
    """The loss of every step. It is saved in checkpoints, so that the curve of a resumed run has all steps."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, _: int, logs: Mapping[str, float] | None = None) -> None:
        self.values.append((logs or {})["loss"])

    def state(self) -> dict[str, Any]:
        return {"values": np.array(self.values)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self.values = saved["values"].tolist()


def open_strategy(name: str, device: str) -> mpidist.Strategy:
    """Make the strategy, on GPUs if asked for. Without GPUs the program then ends, and one rank prints the reason."""
    # Before the strategy is made: it chooses the GPU before MPI starts.
    os.environ[DEVICE] = device
    if device == "gpu" and name == "default":
        raise click.UsageError("--strategy default computes on the CPU. With --device gpu choose another strategy")
    try:
        return STRATEGIES[name]()
    except errors.UnavailableError as error:
        if mpidist.is_first_rank():
            click.echo(f"Error: {error}, that is --device cpu", err=True)
        else:
            # The launcher ends all ranks as soon as one ends with a code: the first must have printed the reason.
            time.sleep(3)
        raise SystemExit(1) from None


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--strategy", "strategy_name", type=click.Choice(list(STRATEGIES)), default="multi-worker")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="One GPU per rank.")
@click.option("--data", type=click.Path(exists=True, dir_okay=False), help="An .npz or .h5 file instead of the digits.")
@click.option("--epochs", default=30, show_default=True, type=click.IntRange(1))
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1), help="Examples per step, of all ranks.")
@click.option("--learning-rate", default=0.1, show_default=True)
@click.option("--checkpoint-dir", type=click.Path(file_okay=False), help="Where checkpoints go, one per epoch.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Go on from the last checkpoint.")
@click.option("--requeue", is_flag=True, help="Have Slurm queue the job again when it is about to be ended.")
@plots.plot_option
@plots.losses_option
@click.option("--seed", default=0, show_default=True)
def main(
    strategy_name: str, device: str, data: str | None, epochs: int, batch: int, learning_rate: float,
    checkpoint_dir: str | None, resume: bool, requeue: bool, plot_path: str | None, losses_path: str | None, seed: int,
) -> None:
    strategy = open_strategy(strategy_name, device)
    x_train, y_train, x_test, y_test = digits.load_data(data)
    # Groups of ranks make steps by themselves, each with a part of the examples; other strategies are one group.
    groups = len(strategy.groups) if isinstance(strategy, mpidist.HybridStrategy) else 1
    share = max(1, batch // groups)
    train = mpidist.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train), seed=seed).batch(share)
    test = mpidist.data.Dataset.from_tensor_slices((x_test, y_test)).batch(512)
    steps_per_epoch = -(-len(x_train) // share) // groups

    with strategy.scope():
        network = digits.Network([x_train.shape[1], 256, 128, int(y_train.max()) + 1], seed)
        # SGD and not Adam: Adam divides a gradient by its own size, and so makes a full step even of a gradient that is
        # nothing but rounding error. With SGD the loss is the same on any number of ranks, up to rounding.
        schedule = mpidist.optimizers.CosineDecay(learning_rate, epochs * steps_per_epoch)
        optimizer = mpidist.optimizers.SGD(schedule, momentum=0.9, nesterov=True)
    gradients = optimizer.gradients(network.variables)

    def train_step(x: Array, y: Array) -> dict[str, Any]:
        # The gradient is that of the mean over the global batch, whose size all ranks must know: the last batch of an
        # epoch is smaller. This call is collective; do not put it under a condition that differs between ranks.
        size = len(y)
        if strategy.num_replicas_in_sync > 1:
            context: Any = mpidist.get_replica_context()
            size = context.all_reduce("SUM", size)
        losses = network.losses_and_gradients(x, y, size, gradients)
        optimizer.apply_gradients(zip(gradients, network.variables, strict=True))
        return {"loss": losses}

    def evaluate_step(x: Array, y: Array) -> dict[str, Any]:
        return {"accuracy": network.forward(x)[-1].argmax(axis=1) == y}

    losses = Losses()
    callbacks: list[Any] = [losses, training.ProgressBar(5)]
    manager = None
    if checkpoint_dir:
        checkpoint = mpidist.Checkpoint(network=network, optimizer=optimizer)
        manager = mpidist.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=3)
        if resume:
            # It restores the last checkpoint, and saves before the job is ended.
            callbacks.append(training.Preemption(mpidist.experimental.TerminationConfig(requeue=requeue)))
    if mpidist.is_first_rank():
        ranks = strategy.num_replicas_in_sync
        click.echo(f"{type(strategy).__name__}: {ranks} replica(s), {len(x_train)} training examples", err=True)
    trainer = mpidist.Trainer(strategy, train_step, checkpoint=manager, evaluate_step=evaluate_step, resume=resume)
    trainer.fit(train, epochs, validation_data=test, callbacks=callbacks)
    final = trainer.evaluate(test)["accuracy"]
    if mpidist.is_first_rank():
        click.echo(f"test accuracy {final:.4f}")
        plots.write_losses(losses_path, losses.values)
        plots.plot_losses(plot_path, losses.values, f"{type(strategy).__name__}, test accuracy {final:.4f}")


if __name__ == "__main__":
    main()
