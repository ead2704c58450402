"""Train a classifier of handwritten digits with Keras's `fit`: a script for one process with two lines added.

    mpirun -n 2 python examples/keras_fit.py
    KERAS_BACKEND=jax mpirun -n 2 python examples/keras_fit.py
    python examples/keras_fit.py --epochs 3
    mpirun -n 2 python examples/keras_fit.py --directory run

The batch size is that of all ranks together, so that the model that comes out is the same on any number of ranks, up to
rounding. With --directory a run that was killed continues from its last epoch when it is started again, and the model
is written there as a plain Keras file.
"""

from __future__ import annotations

import os
from pathlib import Path

# Keras takes its backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "torch")

import click
import digits
import keras
import plots

import mpidist
import mpidist.keras


def make_model() -> keras.Model:
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(128, activation="tanh"),
        keras.layers.Dense(10),
    ])
    model.compile(
        keras.optimizers.Adam(0.003), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--epochs", default=10, show_default=True)
@click.option("--batch-size", default=64, show_default=True, help="Of all ranks together.")
@click.option("--directory", type=click.Path(path_type=Path), help="For the backup and the model.")
@plots.plot_option
def main(epochs: int, batch_size: int, directory: Path | None, plot_path: str | None) -> None:
    x, y, x_test, y_test = digits.load_data()
    keras.utils.set_random_seed(1)

    strategy = mpidist.MultiWorkerMirroredStrategy()    # added
    model = make_model()
    mpidist.keras.distribute(model)                     # added

    callbacks = [] if directory is None else [keras.callbacks.BackupAndRestore(directory / "backup")]
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, validation_split=0.1, callbacks=callbacks, verbose=2
    )
    loss, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
    if strategy.communicator.rank == 0:
        print(f"{strategy.num_replicas_in_sync} ranks: test loss {loss:.4f}, test accuracy {accuracy:.4f}")
        plots.plot_losses(plot_path, history.history["loss"], unit="epoch")
    if directory is not None:
        # The first rank writes.
        model.save(directory / "digits.keras")


if __name__ == "__main__":
    main()
