"""The command `mpidist trace`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from mpidist.cli.texts import AS_JSON, text_of, write
from mpidist.observe import trace as observed

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("trace", short_help="Say where the time of each rank went, and draw a page of it.")
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path),
    help="File of the page; default: DIR/trace.html.",
)
@click.option("--summaries", type=_FOLDER, help="Log directory of the run's summaries; default: DIR.")
@click.option(
    "--doctor", "machine", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What `mpirun -n N mpidist doctor --json` has written: what the machine can do.",
)
@click.option("--perfetto", is_flag=True, help=f"Write DIR/{observed.TIMELINE}, too, for https://ui.perfetto.dev.")
@AS_JSON
def print_trace(
    folder: Path, page: Path | None, summaries: Path | None, machine: Path | None, perfetto: bool, as_json: bool
) -> None:
    """Say where the time of each rank went in a run with MPIDIST_TRACE=DIR, and write a page about it.

    The report has the seconds in which each rank computes, reads input, communicates, writes checkpoints and waits for
    others, and how often it was the last; bytes and bandwidth of each call; and what 2, 4 and 8 times the ranks would
    give. The page has the timeline, too, and opens in a browser without a network.
    """
    target = folder / "trace.html" if page is None else page
    # By name: they load NumPy.
    look, growth, report, pages, curves = (
        importlib.import_module(f"mpidist.cli.trace.{name}")
        for name in ("efficiency", "growth", "report", "page", "summaries")
    )
    try:
        timeline = importlib.import_module("mpidist.cli.trace.timeline").read_timeline(folder)
        best = None if machine is None else report.read_machine(machine)
        found = look.look_at(timeline)
        expected = growth.expect(found)
        drawn = curves.read_curves(folder if summaries is None else summaries)
        target.write_text(pages.page_of(found, expected, drawn, f"mpidist trace {folder.name}"), "utf-8")
        if perfetto:
            observed.join(folder)
    except (OSError, ValueError) as error:
        raise click.ClickException(text_of(error)) from None
    if as_json:
        figures: dict[str, Any] = {**found.as_dict(), "expected": [vars(one) for one in expected], "page": str(target)}
        write(json.dumps(figures, indent=1) + "\n")
    else:
        write(f"{report.text_of(found, expected, best)}\nwrote {target}\n")
