"""Train a classifier of handwritten digits whose hidden layer is split over the ranks of each replica.

    mpirun -n 4 python examples/model_parallel.py                 # 2 replicas of 2 logical devices
    mpirun -n 4 python examples/model_parallel.py --devices 1     # 4 replicas of one: data parallelism alone
    mpirun -n 4 python examples/model_parallel.py --devices 4     # one replica of 4: model parallelism alone
    python examples/model_parallel.py --devices 1

All four have the same loss curve, up to rounding. Each logical device has the columns of the first kernel and the rows
of the second one that belong to its part of the hidden layer, with the optimizer's state for them: a model that is too
large for one node's memory is trained so. The last bias is one variable over all ranks. With --checkpoint-dir a run
continues from its last checkpoint, also with another number of ranks or devices.
"""

from __future__ import annotations

from typing import Any

import click
import digits
import numpy as np
import numpy.typing as npt
import plots

import mpidist
from mpidist.parallel import column_parallel_matmul, row_parallel_matmul

Array = npt.NDArray[Any]
HIDDEN, CLASSES = 256, 10


class Network:
    """A dense layer that is split by columns, tanh, and a dense layer that is split by rows."""

    def __init__(self, inputs: int, devices: int, seed: int) -> None:
        random = np.random.default_rng(seed)

        def kernel(fan_in: int, fan_out: int) -> Array:
            values: Array = random.standard_normal((fan_in, fan_out)) / np.sqrt(fan_in)
            return values

        self.kernel_0 = mpidist.Variable(kernel(inputs, HIDDEN), name="kernel_0", partition_dimensions=[1, devices])
        self.bias_0 = mpidist.Variable(np.zeros(HIDDEN), name="bias_0", partition_dimensions=[devices])
        self.kernel_1 = mpidist.Variable(kernel(HIDDEN, CLASSES), name="kernel_1", partition_dimensions=[devices, 1])
        self.bias_1 = mpidist.Variable(np.zeros(CLASSES), name="bias_1")

    @property
    def variables(self) -> list[Any]:
        return [self.kernel_0, self.bias_0, self.kernel_1, self.bias_1]

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute the logits; also gives what computes the gradients of all variables from theirs."""
        product, product_backward = column_parallel_matmul(x, self.kernel_0.value())
        hidden = np.tanh(product + self.bias_0.value())
        partial, partial_backward = row_parallel_matmul(hidden, self.kernel_1.value())

        def backward(delta: Array) -> list[Array]:
            hidden_delta, kernel_1 = partial_backward(delta)
            product_delta = hidden_delta * (1 - hidden**2)
            _, kernel_0 = product_backward(product_delta)
            return [kernel_0, product_delta.sum(axis=0), kernel_1, delta.sum(axis=0)]

        return partial + self.bias_1.value(), backward


def open_strategy(devices: int) -> mpidist.TPUStrategy:
    topology = mpidist.tpu.experimental.initialize_tpu_system()
    assignment = mpidist.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, devices], num_replicas=max(1, sum(topology.node_sizes) // devices)
    )
    return mpidist.TPUStrategy(experimental_device_assignment=assignment)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--devices", default=2, show_default=True, type=click.IntRange(1), help="Logical devices of a replica.")
@click.option("--data", type=click.Path(exists=True, dir_okay=False), help="An .npz or .h5 file instead of the digits.")
@click.option("--epochs", default=10, show_default=True, type=click.IntRange(1))
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1), help="Examples per step.")
@click.option("--checkpoint-dir", type=click.Path(file_okay=False), help="Where checkpoints go, one per epoch.")
@plots.plot_option
@plots.losses_option
@click.option("--seed", default=0, show_default=True)
def main(
    devices: int, data: str | None, epochs: int, batch: int, checkpoint_dir: str | None, plot_path: str | None,
    losses_path: str | None, seed: int,
) -> None:
    strategy = open_strategy(devices)
    x_train, y_train, x_test, y_test = digits.load_data(data)
    # With these the network computes in float64: the losses are the same for all layouts, to rounding.
    x_train, x_test = x_train.astype(np.float64), x_test.astype(np.float64)
    train = mpidist.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train), seed=seed).batch(batch)
    batches = iter(strategy.experimental_distribute_dataset(train.repeat(epochs)))
    test_batches = strategy.experimental_distribute_dataset(
        mpidist.data.Dataset.from_tensor_slices((x_test, y_test)).batch(512)
    )
    steps_per_epoch = -(-len(x_train) // batch)
    with strategy.scope():
        network = Network(x_train.shape[1], devices, seed)
        # SGD and not Adam, which makes a full step even of a gradient that is nothing but rounding error.
        optimizer = mpidist.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=5.0)
        accuracy = mpidist.metrics.SparseCategoricalAccuracy()
    optimizer.build(network.variables)

    def train_step(x: Array, y: Array, global_size: int) -> Any:
        logits, backward = network.forward(x)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        right = (np.arange(len(y)), y)
        losses = -np.log(probabilities[right])
        probabilities[right] -= 1
        optimizer.apply_gradients(zip(backward(probabilities / global_size), network.variables, strict=True))
        return mpidist.compute_average_loss(losses, global_batch_size=global_size)

    manager = None
    if checkpoint_dir:
        checkpoint = mpidist.Checkpoint(network=network, optimizer=optimizer, batches=batches)
        manager = mpidist.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=3)
        manager.restore_or_initialize()
    losses = []
    for step in range(optimizer.iterations + 1, epochs * steps_per_epoch + 1):
        x, y = next(batches)
        global_size = strategy.reduce("SUM", len(y), axis=None)
        loss = float(strategy.reduce("SUM", strategy.run(train_step, args=(x, y, global_size)), axis=None))
        losses.append(loss)
        if step % steps_per_epoch == 0:
            if manager:
                manager.save()
            if mpidist.is_first_rank():
                click.echo(f"epoch {step // steps_per_epoch}: loss {loss:.5f}")
    for x, y in test_batches:
        strategy.run(lambda x, y: accuracy.update_state(y, network.forward(x)[0]), args=(x, y))
    final = float(accuracy.result())
    if mpidist.is_first_rank():
        click.echo(f"{strategy.num_replicas_in_sync} replica(s) of {devices}: test accuracy {final:.4f}")
        plots.write_losses(losses_path, losses)
        plots.plot_losses(plot_path, losses, f"replicas of {devices} logical devices")


if __name__ == "__main__":
    main()
