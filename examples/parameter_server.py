"""Train a classifier of handwritten digits asynchronously: workers update variables on parameter servers.

    mpirun -n 6 python examples/parameter_server.py
    mpirun -n 7 python examples/parameter_server.py --directory run --evaluator
    mpidist launch-line --fault-tolerant -n 6 python examples/parameter_server.py --kill-one

TF_CONFIG tells the roles. Without it the first rank is the coordinator, the last ones are two servers and, if asked
for, the evaluator; all others are workers. A process without a launcher is all of them. With --directory a run that is
started again continues from its last checkpoint. With --kill-one a worker dies by SIGKILL in a step, which another runs
again: use the line that the third command prints, else the launcher ends the others, too.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import click
import digits
import numpy as np
import numpy.typing as npt
import plots

import mpidist

Array = npt.NDArray[Any]
BATCH, STEPS_PER_EPOCH = 64, 22


class Network:
    """A hidden layer with tanh, and the logits of the ten digits."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.variables: list[Any] = []
        for rows, columns in ((64, 128), (128, 10)):
            start = random.standard_normal((rows, columns)) / rows**0.5
            self.variables += [mpidist.Variable(start.astype(np.float32)), mpidist.Variable(np.zeros(columns, "f4"))]

    def forward(self, x: Array) -> tuple[Array, Array]:
        kernel, bias, last_kernel, last_bias = (variable.value() for variable in self.variables)
        hidden = np.tanh(x @ kernel + bias)
        return hidden, hidden @ last_kernel + last_bias

    def loss_and_gradients(self, x: Array, labels: Array) -> tuple[float, list[Array]]:
        """Compute the mean cross-entropy of a batch, and its gradients by the variables."""
        hidden, logits = self.forward(x)
        delta = np.exp(logits - logits.max(axis=1, keepdims=True))
        delta /= delta.sum(axis=1, keepdims=True)
        right = (np.arange(len(labels)), labels)
        loss = -np.log(delta[right] + 1e-12).mean()
        delta[right] -= 1
        delta /= len(labels)
        below = delta @ self.variables[2].value().T * (1 - hidden**2)
        return float(loss), [x.T @ below, below.sum(axis=0), hidden.T @ delta, delta.sum(axis=0)]

    def accuracy(self) -> float:
        _, _, x, labels = digits.load_data()
        return float((self.forward(x)[1].argmax(axis=1) == labels).mean())


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--epochs", default=20, show_default=True, type=click.IntRange(1))
@click.option("--servers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--directory", type=click.Path(file_okay=False), help="Where checkpoints go, one per epoch.")
@click.option("--evaluator", is_flag=True, help="The last rank evaluates each checkpoint in the directory.")
@click.option("--kill-one", is_flag=True, help="A worker dies in the middle.")
@plots.plot_option
def main(
    epochs: int, servers: int, directory: str | None, evaluator: bool, kill_one: bool, plot_path: str | None
) -> None:
    if evaluator and not directory:
        raise click.UsageError("--evaluator evaluates checkpoints: give it their --directory, too")
    resolver = None
    if "TF_CONFIG" not in os.environ:
        resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=servers, num_evaluators=int(evaluator))
    # Workers and servers serve inside this constructor: the lines below are the coordinator's and the evaluator's.
    strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=16 << 20))
    with strategy.scope():
        network, applied, loss = Network(), mpidist.Variable(0, dtype="int64"), mpidist.metrics.Mean()
    if strategy.roles.task_type == "evaluator":
        saved = mpidist.Checkpoint(network=network, applied=applied)
        for path in mpidist.checkpoints_iterator(directory or ".", restore=saved):
            click.echo(f"evaluator: {Path(path).name}, step {int(applied)}, test accuracy {network.accuracy():.4f}")
        return
    if kill_one and len(strategy.roles.workers) < 2:
        raise click.UsageError("--kill-one needs another worker, which takes over: start 6 ranks")

    total = epochs * STEPS_PER_EPOCH
    optimizer = mpidist.optimizers.SGD(mpidist.optimizers.CosineDecay(0.2, total), momentum=0.5)
    optimizer.build(network.variables)
    manager = None
    if directory:
        checkpoint = mpidist.Checkpoint(network=network, optimizer=optimizer, applied=applied)
        manager = mpidist.CheckpointManager(checkpoint, directory, max_to_keep=3)
        manager.restore_or_initialize()
    first = int(applied)
    fatal, log = (first + total) // 2, Path(tempfile.mkdtemp()) / "executed"

    def make_batches(context: mpidist.InputContext) -> mpidist.data.Dataset:
        dataset = mpidist.data.Dataset.from_tensor_slices(digits.load_data()[:2])
        return dataset.shuffle(2000, seed=first + context.input_pipeline_id).repeat().batch(BATCH)

    def step(batches: Any, number: int) -> None:
        def replica(x: Array, labels: Array) -> None:
            batch_loss, gradients = network.loss_and_gradients(x, labels)
            optimizer.apply_gradients(zip(gradients, network.variables, strict=True))
            applied.assign_add(1)
            loss.update_state(batch_loss)

        strategy.run(replica, args=next(batches))
        if kill_one:
            # A file is no variable: what a step has written to it stays, also if the step is run again.
            with log.open("a") as file:
                file.write(f"{number}\n")
            if number == fatal and log.read_text().split().count(str(number)) == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    coordinator, losses = mpidist.coordinator.ClusterCoordinator(strategy), []
    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    with strategy.scope(), mpidist.observe.Progress(total, description="training", initial=first) as progress:
        found = f"workers: {len(strategy.roles.workers)}, servers: {len(strategy.roles.servers)}"
        progress.write(f"{found}, continues after step {first}" if first else found)
        for epoch in range(first // STEPS_PER_EPOCH, epochs):
            for number in range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH):
                coordinator.schedule(step, args=(batches, number))
            coordinator.join()
            losses.append(float(loss.result()))
            progress.update(STEPS_PER_EPOCH, loss=losses[-1])
            if (epoch + 1) % max(1, epochs // 4) == 0:
                progress.write(f"epoch {epoch + 1}: loss {losses[-1]:.4f}, test accuracy {network.accuracy():.4f}")
            loss.reset_state()
            if manager:
                manager.save()
    if kill_one:
        counts = (total - first, len(log.read_text().split()), int(applied) - first)
        click.echo("scheduled {}, executed {}, applied {}".format(*counts))
    click.echo(f"test accuracy {network.accuracy():.4f}")
    plots.plot_losses(plot_path, losses, unit="epoch")


if __name__ == "__main__":
    main()
