"""Train a network on digits with JAX and optax: the same program on one rank and on several.

    pip install 'mpidist[jax,examples]'
    mpirun -n 2 python examples/jax_train.py
    mpirun -n 2 python examples/jax_train.py --steps 600 --checkpoints run --plot loss.png

Batch sizes are global: the losses and the accuracy are the same on any number of ranks, up to rounding. A job that was
killed continues from its last checkpoint, also on another number of ranks.
"""

from __future__ import annotations

from typing import Any

import click
import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plots

import mpidist
import mpidist.jax

BATCH = 100
NOTE_EVERY = 10
SAVE_EVERY = 100

strategy = mpidist.MultiWorkerMirroredStrategy()
optimizer = mpidist.jax.distribute(optax.adam(3e-3))


def initial(key: Any) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (64, 64)) / 8, "b1": jnp.zeros(64),
        "w2": jax.random.normal(second, (64, 10)) / 8, "b2": jnp.zeros(10),
    }


def logits(params: dict[str, Any], images: Any) -> Any:
    return jnp.tanh(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def mean_loss(params: dict[str, Any], images: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


@jax.jit
def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
    loss, gradients = jax.value_and_grad(mean_loss)(params, images, labels)
    # Gradients are averaged over the ranks, weighted by their rows.
    updates, state = optimizer.update(gradients, state, params, rows=len(images))
    return optax.apply_updates(params, updates), state, loss


@jax.jit
def correct(params: Any, images: Any, labels: Any) -> Any:
    return mpidist.jax.all_reduce("SUM", (logits(params, images).argmax(axis=1) == labels).sum())


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1))
@click.option("--checkpoints", type=click.Path(file_okay=False), help="Save there; continue from the last checkpoint.")
@plots.plot_option
def main(steps: int, checkpoints: str | None, plot_path: str | None) -> None:
    x, y, x_test, y_test = digits.load_data()
    dataset = mpidist.data.Dataset.from_tensor_slices((x, y.astype(np.int32))).shuffle(len(x), seed=1)
    batches = iter(strategy.experimental_distribute_dataset(dataset.batch(BATCH).repeat()))
    params = mpidist.jax.broadcast(initial(jax.random.key(0)))
    state = mpidist.jax.State(params=params, optimizer=optimizer.init(params), step=0)
    manager = None
    if checkpoints:
        checkpoint = mpidist.Checkpoint(state=state, batches=batches)
        manager = mpidist.CheckpointManager(checkpoint, checkpoints, max_to_keep=2)
        if manager.restore_or_initialize() and mpidist.is_first_rank():
            print(f"continues after step {state.step}")
    losses = []
    while state.step < steps:
        state.params, state.optimizer, loss = step(state.params, state.optimizer, *next(batches))
        state.step += 1
        if state.step % NOTE_EVERY == 0:
            losses.append(float(mpidist.jax.all_reduce("MEAN", loss)))
        if state.step % SAVE_EVERY == 0:
            if manager:
                manager.save()
            if mpidist.is_first_rank():
                print(f"step {state.step}: loss {losses[-1]:.4f}")
    own = strategy.extended.rows(len(x_test))
    right = int(correct(state.params, x_test[own], y_test[own]))
    if mpidist.is_first_rank():
        print(f"accuracy {right / len(x_test):.3f} on {strategy.num_replicas_in_sync} ranks")
        plots.plot_losses(plot_path, losses, unit=f"{NOTE_EVERY} steps")


if __name__ == "__main__":
    main()
