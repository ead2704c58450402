"""The options `--plot` and `--losses` of examples: the loss of each step or epoch, as a curve and as text."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import click

import mpidist


def in_folder(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a file in a folder that is missing before the training, and not behind it; the first rank writes it."""
    if path and mpidist.is_first_rank() and not Path(path).absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {Path(path).absolute().parent} for {path}. Make it first")
    return path


plot_option = click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False), callback=in_folder, help="Draw the loss curve into a PNG."
)
losses_option = click.option(
    "--losses", "losses_path", type=click.Path(dir_okay=False), callback=in_folder,
    help="Write the loss of each step as text.",
)


def write_losses(path: str | None, losses: Sequence[float]) -> None:
    """Write a line for each loss, if a path is given. One rank calls this."""
    if path is not None:
        Path(path).write_text("".join(f"{float(loss)!r}\n" for loss in losses))


def plot_losses(path: str | None, losses: Sequence[float], title: str = "", unit: str = "step") -> None:
    """Draw losses, if a path is given. One rank calls this.

    Args:
        path: The PNG.
        losses: The loss of each unit.
        title: What stands above.
        unit: What the horizontal axis counts.
    """
    if path is None:
        return
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    axis.semilogy(range(1, len(losses) + 1), losses)
    axis.set(xlabel=unit, ylabel="loss", title=title)
    figure.savefig(path, dpi=120)
    click.echo(f"wrote {path}")
