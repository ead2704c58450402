"""Train a generative adversarial network with uneven steps: two models, each with an optimizer of its own.

    python examples/gan.py
    mpirun -n 4 python examples/gan.py --plot points.png

The generator learns to draw points of an arc from noise, and the discriminator to tell them from real ones. In each
round the discriminator makes --critic-steps steps, and the generator one. The optimizers do not share anything:
each adds up the gradients of its own variables over all ranks, in its own calls. Which steps are made depends on the
round alone, so that all ranks make the same ones.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import mpidist

Array = npt.NDArray[Any]
WIDTH, BLUR = 0.15, 0.3


class Layers:
    """Two hidden layers with tanh, and a linear one."""

    def __init__(self, inputs: int, hidden: int, outputs: int, random: np.random.Generator) -> None:
        sizes = (inputs, hidden, hidden, outputs)
        self.kernels, self.biases = [], []
        for fan_in, fan_out in itertools.pairwise(sizes):
            start = random.normal(0, 1 / np.sqrt(fan_in), (fan_in, fan_out)).astype(np.float32)
            self.kernels.append(mpidist.Variable(start))
            self.biases.append(mpidist.Variable(np.zeros(fan_out, np.float32)))

    @property
    def variables(self) -> list[Any]:
        return [*self.kernels, *self.biases]

    def forward(self, x: Array) -> list[Array]:
        """Compute the activations of all layers, the input among them."""
        activations = [x]
        for number, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            x = x @ kernel.value() + bias.value()
            if number < len(self.kernels) - 1:
                x = np.tanh(x)
            activations.append(x)
        return activations

    def backward(self, activations: list[Array], delta: Array) -> tuple[list[Array], Array]:
        """Give the gradients of the variables, and that of the input; `delta` is that of the output."""
        kernels: list[Array] = []
        biases: list[Array] = []
        for number in reversed(range(len(self.kernels))):
            kernels.insert(0, activations[number].T @ delta)
            biases.insert(0, delta.sum(axis=0))
            delta = delta @ self.kernels[number].value().T
            if number:
                delta *= 1 - activations[number] ** 2
        return [*kernels, *biases], delta


def sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def arc(count: int, random: np.random.Generator) -> Array:
    """Draw real points."""
    x = random.uniform(-1, 1, count)
    y = x**2 - 0.5 + WIDTH * random.standard_normal(count)
    return np.stack([x, y], axis=1).astype(np.float32)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--rounds", default=1000, show_default=True, type=click.IntRange(1))
@click.option("--critic-steps", default=3, show_default=True, type=click.IntRange(1), help="... of a generator's step.")
@click.option("--batch", default=128, show_default=True, type=click.IntRange(1), help="Points in a step of all ranks.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), help="Draw the points into a PNG.")
def main(rounds: int, critic_steps: int, batch: int, plot_path: str | None) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(0)
    with strategy.scope():
        generator, critic = Layers(4, 48, 2, random), Layers(2, 48, 1, random)
        generator_optimizer = mpidist.optimizers.Adam(5e-4, beta_1=0.5)
        critic_optimizer = mpidist.optimizers.Adam(1e-3, beta_1=0.5)
    # Points and noise of all steps come from a dataset: the same ones on any number of ranks.
    count = batch * critic_steps * 20
    data = (arc(count, random), random.standard_normal((count, 8)).astype(np.float32))
    dataset = mpidist.data.Dataset.from_tensor_slices(data).shuffle(count, seed=1).batch(batch).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    def critic_step(real: Array, noise: Array) -> Array:
        # It sees points that are blurred: else it would tell them apart before the generator can learn.
        drawn = generator.forward(noise[:, :4])[-1]
        points = np.concatenate([real + BLUR * noise[:, 4:6], drawn + BLUR * noise[:, 6:]])
        wanted = np.repeat([[1.0], [0.0]], [len(real), len(noise)], axis=0).astype(np.float32)
        activations = critic.forward(points)
        # The gradient of the cross-entropy: real points should get 1, drawn ones 0.
        error = sigmoid(activations[-1]) - wanted
        gradients, _ = critic.backward(activations, error / np.float32(batch))
        critic_optimizer.apply_gradients(zip(gradients, critic.variables, strict=True))
        losses: Array = -np.log(1 - np.abs(error[:, 0]) + 1e-7)
        return losses

    def generator_step(_: Array, noise: Array) -> Array:
        layers = generator.forward(noise[:, :4])
        activations = critic.forward(layers[-1] + BLUR * noise[:, 6:])
        error = sigmoid(activations[-1]) - 1
        delta = critic.backward(activations, error / np.float32(batch))[1]
        gradients = generator.backward(layers, delta)[0]
        generator_optimizer.apply_gradients(zip(gradients, generator.variables, strict=True))
        losses: Array = -np.log(1 - np.abs(error[:, 0]) + 1e-7)
        return losses

    for number in range(1, rounds + 1):
        for _ in range(critic_steps):
            critic_losses = strategy.run(critic_step, args=next(batches))
        losses = strategy.run(generator_step, args=next(batches))
        if number % max(1, rounds // 5) == 0:
            means = [float(strategy.reduce("MEAN", each, axis=0)) for each in (critic_losses, losses)]
            if mpidist.is_first_rank():
                click.echo(f"round {number}: loss of the discriminator {means[0]:.3f}, of the generator {means[1]:.3f}")

    points = generator.forward(np.random.default_rng(7).standard_normal((1000, 4)).astype(np.float32))[-1]
    off = points[:, 1] - (points[:, 0] ** 2 - 0.5)
    if mpidist.is_first_rank():
        click.echo(
            f"{strategy.num_replicas_in_sync} replica(s), {critic_optimizer.iterations} and "
            f"{generator_optimizer.iterations} steps; drawn points are "
            f"{np.abs(off).mean():.2f} off the arc (real: 0.12), and spread {points[:, 0].std():.2f} along it (0.58)"
        )
        if plot_path:
            pyplot = importlib.import_module("matplotlib.pyplot")
            figure, axis = pyplot.subplots(figsize=(4, 4), constrained_layout=True)
            axis.plot(*arc(1000, random).T, ".", markersize=2, label="real")
            axis.plot(*points.T, ".", markersize=2, label="drawn")
            axis.legend()
            figure.savefig(plot_path, dpi=120)
            click.echo(f"wrote {plot_path}")


if __name__ == "__main__":
    main()
