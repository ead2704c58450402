"""Train a classifier of handwritten digits: a network with two hidden layers in NumPy, gradients by hand.

    mpirun -n 8 python examples/train.py
    mpirun -n 4 python examples/train.py --device gpu
    mpirun -n 4 python examples/train.py --strategy hybrid
    python examples/train.py --strategy default
    mpirun -n 4 python examples/train.py --checkpoint-dir checkpoints --plot curve.png

The data are the 1797 digits of scikit-learn, or those of --data: an .npz or .h5 file with `x_train`, `y_train`,
`x_test` and `y_test`. With --checkpoint-dir a run that was killed continues from its last checkpoint when it is started
again, on any number of ranks, and ends with the result of an undisturbed run. A run that is about to be ended, by
SIGTERM, SIGUSR1 or Slurm's time limit, saves first; with --requeue Slurm starts it again. With --device gpu each rank
computes on a GPU of its own, with CuPy arrays.
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import numpy.typing as npt

import mpidist
from mpidist.arrays import namespace
from mpidist.errors import UnavailableError
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig

Array = npt.NDArray[Any]
# The environment variable that asks for GPUs; all strategies but the default one read it.
DEVICE = "MPIDIST_DEVICE"
STRATEGIES: dict[str, Callable[[], mpidist.Strategy]] = {
    "multi-worker": mpidist.MultiWorkerMirroredStrategy,
    "mirrored": mpidist.MirroredStrategy,
    "central-storage": mpidist.CentralStorageStrategy,
    "tpu": mpidist.TPUStrategy,
    "hybrid": lambda: mpidist.HybridStrategy(2),
    "one-device": lambda: mpidist.OneDeviceStrategy(f"{os.environ[DEVICE]}:0"),
    "default": mpidist.get_strategy,
}


class Network:
    """Dense layers with tanh between them, and softmax cross-entropy at the end.

    Tanh and not ReLU: for a sum near zero the last bit, which depends on the number of ranks, would decide whether ReLU
    passes a gradient or not.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        random = np.random.default_rng(seed)
        self.kernels = []
        self.biases = []
        for number, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            start = (random.standard_normal((fan_in, fan_out)) * np.sqrt(1 / fan_in)).astype(np.float32)
            self.kernels.append(mpidist.Variable(start, name=f"kernel_{number}"))
            self.biases.append(mpidist.Variable(np.zeros(fan_out, np.float32), name=f"bias_{number}"))

    @property
    def variables(self) -> list[Any]:
        return [*self.kernels, *self.biases]

    def forward(self, x: Array) -> list[Array]:
        """Compute the activations of all layers; the last ones are the logits."""
        xp = namespace(x)
        activations = [x]
        for number, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            x = x @ kernel.value() + bias.value()
            if number < len(self.kernels) - 1:
                x = xp.tanh(x)
            activations.append(x)
        return activations

    def backward(self, activations: list[Array], delta: Array, gradients: Sequence[Array]) -> None:
        """Write the gradients in place; `delta` is the gradient of the logits."""
        xp = namespace(delta)
        layers = len(self.kernels)
        for number in reversed(range(layers)):
            xp.matmul(activations[number].T, delta, out=gradients[number])
            xp.sum(delta, axis=0, out=gradients[layers + number])
            if number:
                delta = (delta @ self.kernels[number].value().T) * (1 - activations[number] ** 2)


class History:
    """The loss of every step. It is saved in checkpoints, so that the curve of a resumed run has all steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        return {"losses": np.array(self.losses)}

    def load_state(self, saved: Any) -> None:
        self.losses = saved["losses"].numpy().tolist()


def open_strategy(name: str, device: str) -> mpidist.Strategy:
    """Make the strategy, on GPUs if asked for. Without GPUs the program then ends, and one rank prints the reason."""
    # Before the strategy is made: it chooses the GPU before MPI starts.
    os.environ[DEVICE] = device
    if device == "gpu" and name == "default":
        raise click.UsageError("--strategy default computes on the CPU. With --device gpu choose another strategy")
    try:
        return STRATEGIES[name]()
    except UnavailableError as error:
        if mpidist.is_first_rank():
            click.echo(f"Error: {error}, that is --device cpu", err=True)
        else:
            # The launcher ends all ranks as soon as one ends with a code: the first must have printed the reason.
            time.sleep(3)
        raise SystemExit(1) from None


def load_data(path: str | None) -> tuple[Array, Array, Array, Array]:
    """Load images, as rows of floats from 0 to 1, and labels, for training and for the test."""
    if path is None:
        digits = importlib.import_module("sklearn.datasets").load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        x, y = digits.data[order].astype(np.float32) / 16, digits.target[order]
        return x[360:], y[360:], x[:360], y[:360]
    names = ("x_train", "y_train", "x_test", "y_test")
    with np.load(path) if path.endswith(".npz") else h5py.File(path) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise click.BadParameter(f"{path} has no {', '.join(missing)}; expected {', '.join(names)}")
        x_train, y_train, x_test, y_test = (np.asarray(file[name]) for name in names)
    scale = np.float32(255 if x_train.max() > 1 else 1)
    flat = [x.reshape(len(x), -1).astype(np.float32) / scale for x in (x_train, x_test)]
    return flat[0], y_train.astype(np.int64), flat[1], y_test.astype(np.int64)


def all_for_each_rank() -> mpidist.data.Options:
    """Options of a dataset that ranks do not share: each reads all of it."""
    options = mpidist.data.Options()
    options.experimental_distribute.auto_shard_policy = mpidist.AutoShardPolicy.OFF
    return options


def plot_losses(path: str, losses: Sequence[float], title: str) -> None:
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    axis.semilogy(losses)
    axis.set(xlabel="step", ylabel="loss", title=title)
    figure.savefig(path, dpi=120)


def in_folder(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a file in a folder that is missing before the training, and not behind it; the first rank writes it."""
    if path and mpidist.is_first_rank() and not Path(path).absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {Path(path).absolute().parent} for {path}. Make it first")
    return path


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--strategy", "strategy_name", type=click.Choice(list(STRATEGIES)), default="multi-worker")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--data", type=click.Path(exists=True, dir_okay=False), help="An .npz or .h5 file instead of the digits.")
@click.option("--epochs", default=30, show_default=True, type=click.IntRange(1))
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1), help="Examples per step, of all ranks.")
@click.option("--learning-rate", default=0.1, show_default=True)
@click.option("--checkpoint-dir", type=click.Path(file_okay=False), help="Where checkpoints go, one per epoch.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Go on from the last checkpoint.")
@click.option("--requeue", is_flag=True, help="Have Slurm queue the job again when it is about to be ended.")
@click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False), callback=in_folder, help="Draw the loss curve into a PNG."
)
@click.option(
    "--losses", "losses_path", type=click.Path(dir_okay=False), callback=in_folder,
    help="Write the loss of each step as text.",
)
@click.option("--seed", default=0, show_default=True)
def main(
    strategy_name: str,
    device: str,
    data: str | None,
    epochs: int,
    batch: int,
    learning_rate: float,
    checkpoint_dir: str | None,
    resume: bool,
    requeue: bool,
    plot_path: str | None,
    losses_path: str | None,
    seed: int,
) -> None:
    strategy = open_strategy(strategy_name, device)
    x_train, y_train, x_test, y_test = load_data(data)
    # Groups of ranks make steps by themselves, each with a part of the examples; other strategies are one group.
    groups = len(strategy.groups) if isinstance(strategy, mpidist.HybridStrategy) else 1
    share = max(1, batch // groups)
    train = mpidist.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train), seed=seed).batch(share)
    test = mpidist.data.Dataset.from_tensor_slices((x_test, y_test)).batch(512)
    if groups > 1:
        # Every group takes the whole test.
        test = test.with_options(all_for_each_rank())
    batches = iter(strategy.experimental_distribute_dataset(train.repeat(epochs)))
    test_batches = strategy.experimental_distribute_dataset(test)
    steps_per_epoch = -(-len(x_train) // share) // groups

    with strategy.scope():
        network = Network([x_train.shape[1], 256, 128, int(y_train.max()) + 1], seed)
        # SGD and not Adam: Adam divides a gradient by its own size, and so makes a full step even of a gradient that is
        # nothing but rounding error. With SGD the loss is the same on any number of ranks, up to rounding.
        optimizer = mpidist.optimizers.SGD(
            mpidist.optimizers.CosineDecay(learning_rate, epochs * steps_per_epoch), momentum=0.9, nesterov=True
        )
        accuracy = mpidist.metrics.SparseCategoricalAccuracy()
    gradients = optimizer.gradients(network.variables)
    history = History()

    def train_step(x: Array, y: Array, global_size: int) -> Any:
        xp = namespace(x)
        activations = network.forward(x)
        logits = activations[-1] - activations[-1].max(axis=1, keepdims=True)
        exponentials = xp.exp(logits)
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        right = (xp.arange(len(y)), y)
        losses = -xp.log(probabilities[right] + 1e-12)
        probabilities[right] -= 1
        network.backward(activations, probabilities / np.float32(global_size), gradients)
        optimizer.apply_gradients(zip(gradients, network.variables, strict=True))
        return mpidist.compute_average_loss(losses, global_batch_size=global_size)

    def evaluate() -> float:
        accuracy.reset_state()
        for x, y in test_batches:
            strategy.run(lambda x, y: accuracy.update_state(y, network.forward(x)[-1]), args=(x, y))
        return float(accuracy.result())

    def train_next() -> float:
        x, y = next(batches)
        # The loss is the mean over the global batch, whose size all ranks must know: the last batch of an epoch is
        # smaller. These two calls are collective; do not put them under `if`.
        global_size = strategy.reduce("SUM", len(y), axis=None)
        loss = float(strategy.reduce("SUM", strategy.run(train_step, args=(x, y, global_size)), axis=None))
        history.losses.append(loss)
        return loss

    manager = handler = None
    if checkpoint_dir:
        checkpoint = mpidist.Checkpoint(network=network, optimizer=optimizer, batches=batches, history=history)
        manager = mpidist.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=3)
        if resume:
            # It restores the last checkpoint, and saves before the job is ended.
            config = TerminationConfig(requeue=requeue)
            handler = PreemptionCheckpointHandler(strategy.cluster_resolver, manager, termination_config=config)

    first, steps = optimizer.iterations, epochs * steps_per_epoch
    with mpidist.observe.Progress(steps, description="training", initial=first) as progress:
        ranks = strategy.num_replicas_in_sync
        progress.write(f"{type(strategy).__name__}: {ranks} replica(s), {len(x_train)} training examples")
        if first:
            at = f"epoch {first // steps_per_epoch}, step {first},"
            progress.write(f"resumed after {at} from {manager.latest_checkpoint if manager else ''}")
        for step in range(first + 1, steps + 1):
            progress.update(loss=handler.run(train_next) if handler else train_next())
            epoch, rest = divmod(step, steps_per_epoch)
            if manager and not rest:
                manager.save()
            if not rest and (epoch % 5 == 0 or epoch == epochs):
                progress.write(f"epoch {epoch}: loss {history.losses[-1]:.5f}, test accuracy {evaluate():.4f}")
    if isinstance(strategy, mpidist.HybridStrategy):
        # Now all groups hold the same parameters.
        strategy.finish()
    final = evaluate()
    if mpidist.is_first_rank():
        click.echo(f"test accuracy {final:.4f}")
        if losses_path:
            Path(losses_path).write_text("".join(f"{loss!r}\n" for loss in history.losses))
        if plot_path:
            plot_losses(plot_path, history.losses, f"{type(strategy).__name__}, test accuracy {final:.4f}")
            click.echo(f"wrote {plot_path}")


if __name__ == "__main__":
    main()
