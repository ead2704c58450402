"""Train a classifier of handwritten digits with Keras in a loop of one's own, on PyTorch.

    mpirun -n 2 python examples/keras_custom_loop.py
    python examples/keras_custom_loop.py --epochs 3

`import mpidist.keras as keras` has every name of Keras; models, optimizers and metrics that are made in the scope of a
strategy belong to it. In `strategy.run` the optimizer takes the sum of the replicas' gradients, so the loss is divided
by the global batch size; outside of it a metric's result is that of all replicas.
"""

from __future__ import annotations

import os
from typing import Any

# Keras takes its backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "torch")

import click
import digits
import plots
import torch

import mpidist
import mpidist.keras as keras


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--epochs", default=10, show_default=True)
@click.option("--batch-size", default=64, show_default=True, help="Of all ranks together.")
@plots.plot_option
def main(epochs: int, batch_size: int, plot_path: str | None) -> None:
    x, y, x_test, y_test = digits.load_data()
    keras.utils.set_random_seed(1)

    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((64,)),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(10),
        ])
        optimizer = keras.optimizers.Adam(0.003)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    each_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(inputs: Any) -> float:
        features, labels = inputs
        logits = model(features, training=True)
        loss = keras.ops.sum(each_loss(labels, logits)) / batch_size
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([one.value.grad for one in model.trainable_variables], model.trainable_variables)
        accuracy.update_state(labels, logits.detach())
        return float(loss.detach())

    def test_step(inputs: Any) -> None:
        features, labels = inputs
        with torch.no_grad():
            accuracy.update_state(labels, model(features))

    training = mpidist.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=2).batch(batch_size)
    test = mpidist.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch_size)
    training_batches = strategy.experimental_distribute_dataset(training)
    test_batches = strategy.experimental_distribute_dataset(test)

    curve = []
    for epoch in range(epochs):
        losses = [
            float(strategy.reduce("SUM", strategy.run(train_step, args=(inputs,)), axis=None))
            for inputs in training_batches
        ]
        curve += losses
        trained = float(accuracy.result())
        accuracy.reset_state()
        for inputs in test_batches:
            strategy.run(test_step, args=(inputs,))
        tested = float(accuracy.result())
        accuracy.reset_state()
        if strategy.communicator.rank == 0:
            print(
                f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}, accuracy {trained:.4f}, "
                f"test accuracy {tested:.4f}"
            )
    if strategy.communicator.rank == 0:
        plots.plot_losses(plot_path, curve)


if __name__ == "__main__":
    main()
