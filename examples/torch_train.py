"""Train a classifier of handwritten digits with PyTorch: a script for DistributedDataParallel with four lines changed.

    mpirun -n 2 python examples/torch_train.py
    python examples/torch_train.py --epochs 3
    mpirun -n 2 python examples/torch_train.py --checkpoint-dir checkpoints

The changes against the script for DistributedDataParallel, which has a process group and a sampler of its own:

    -dist.init_process_group("gloo")
    +strategy = mpidist.MultiWorkerMirroredStrategy()
     model = make_model()
    -loader = DataLoader(train, 64 // dist.get_world_size(), sampler=DistributedSampler(train))
    +loader = DataLoader(train, 64, shuffle=True)
    -model = DistributedDataParallel(model)
    +model, loader = mpidist.torch.distribute(model, loader)
     for epoch in range(epochs):
    -    loader.sampler.set_epoch(epoch)
         for x, y in loader:
             loss(model(x), y).backward()
             optimizer.step()
             optimizer.zero_grad()

The batch size is that of all ranks together, so that the model that comes out is the same on any number of ranks. With
--checkpoint-dir a run that was killed continues from its last checkpoint, in the middle of an epoch, when it is started
again on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import digits
import numpy as np
import plots
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpidist
import mpidist.torch


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Give 1437 digits for training and 360 for the test."""
    x, y, x_test, y_test = map(torch.from_numpy, digits.load_data())
    return TensorDataset(x, y), TensorDataset(x_test, y_test)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 10))


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, strategy: mpidist.Strategy) -> float:
    """Give the accuracy over the whole test: each rank counts among its own rows."""
    model.eval()
    right = rows = 0
    for x, y in loader:
        # A rank without rows has got one that does not count.
        right += int((model(x).argmax(1) == y)[: loader.rows].sum())
        rows += loader.rows
    model.train()
    right, rows = strategy.reduce("SUM", [right, rows], axis=None)
    return float(right / rows)


def steps(loader: Any, epochs: int) -> Iterator[tuple[Any, Any]]:
    """Give the batches of all epochs; after a restore, those that are left."""
    while loader.epoch < epochs:
        yield from loader


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--epochs", default=10, show_default=True, type=click.IntRange(1))
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1), help="Examples per step, of all ranks.")
@click.option("--learning-rate", default=3e-3, show_default=True)
@click.option("--checkpoint-dir", type=click.Path(file_okay=False), help="Where checkpoints go.")
@click.option("--save-every", default=10, show_default=True, type=click.IntRange(1), help="Steps between checkpoints.")
@click.option("--weights", type=click.Path(dir_okay=False), help="Write the trained parameters, as torch.save does.")
@plots.plot_option
def main(
    epochs: int, batch: int, learning_rate: float, checkpoint_dir: str | None, save_every: int, weights: str | None,
    plot_path: str | None,
) -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    torch.manual_seed(0)
    train, test = load_digits()
    model, loader = mpidist.torch.distribute(make_model(), DataLoader(train, batch, shuffle=True))
    _, test_loader = mpidist.torch.distribute(model, DataLoader(test, 90))
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    manager = None
    if checkpoint_dir:
        checkpoint = mpidist.Checkpoint(model=model, optimizer=optimizer, loader=loader)
        manager = mpidist.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=2)
        if manager.restore_or_initialize() and mpidist.is_first_rank():
            click.echo(f"resumed in epoch {loader.epoch} from {manager.latest_checkpoint}")
    losses = []
    for step, (x, y) in enumerate(steps(loader, epochs), 1):
        value = loss(model(x), y)
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        if manager and step % save_every == 0:
            manager.save()
    accuracy = evaluate(model, test_loader, strategy)
    # The loss of a step is that of this rank's rows.
    curve = strategy.reduce("MEAN", np.array(losses), axis=None)
    if mpidist.is_first_rank():
        click.echo(f"{strategy.num_replicas_in_sync} replica(s), test accuracy {accuracy:.4f}")
        if weights:
            torch.save(model.state_dict(), Path(weights))
        plots.plot_losses(plot_path, curve)


if __name__ == "__main__":
    main()
