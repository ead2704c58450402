"""Draw the record of `sync_step.py`: milliseconds of each way of a step, its best setting.

python benchmarks/step_plot.py benchmarks/results/sync_step_mpich.json sync_step.png
"""

from __future__ import annotations

import importlib
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

# Of a bar's name stand so many letters in a line: bars are as wide.
_LETTERS = 10


def shown(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the median milliseconds of limits, of mpidist and of each peer's best setting, in this order."""
    times, best = result["times_ms"], result["best"]
    limits = [name for name in ("memory limit", "traffic limit") if name in times]
    own = [name for name in ("mpidist, fast", "mpidist") if name in times]
    peers = [name for peer, name in best.items() if peer not in limits]
    return {name: times[name]["median"] for name in (*limits, *own, *peers)}


def draw(record: Mapping[str, Any]) -> Any:
    """Return a figure of matplotlib's: a chart of bars for each case."""
    figures, machine = record["figures"], record["machine"]
    figure: Any = importlib.import_module("matplotlib.figure").Figure((4.6 * len(figures), 4), layout="constrained")
    axes = figure.subplots(1, len(figures))
    for axis, (title, result) in zip(axes, figures.items(), strict=True):
        heights = shown(result)
        bars = axis.bar([textwrap.fill(name, _LETTERS) for name in heights], list(heights.values()))
        axis.bar_label(bars, [f"{height:.1f}" for height in heights.values()])
        axis.margins(y=0.1)
        axis.set_title(title)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_ylabel("ms per step (median)")
    library = " ".join(machine["mpi"].split(",")[0].replace("Version:", "").split())
    figure.suptitle(f"ResNet-50's gradients (102 MB float32), {machine['ranks']} ranks, {library}")
    return figure


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("plot", type=click.Path(path_type=Path))
def main(record: Path, plot: Path) -> None:
    draw(json.loads(record.read_text())).savefig(plot, dpi=110)


if __name__ == "__main__":
    main()
