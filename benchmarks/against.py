"""Is this tree slower than another commit? The benchmarks of both trees run in turns, in processes of their own.

    python benchmarks/against.py COMMIT --plot against.png --json against.json

A turn runs each of `dispatch.py`, `sync_step.py` and `collectives.py` in the other tree, then in this one. The ratio of
a figure is the median over the turns of (this tree's time / the other tree's time): below 1 this tree is faster. Peers,
whose code is the same in both trees (raw MPI, the memory limit, PyTorch), show how far ratios stray by chance.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
# Benchmark: its options, the same for both trees.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "dispatch": (),
    "sync_step": ("--rounds", "7"),
    "collectives": ("--to-bytes", str(1 << 26), "--rounds", "9", "--seconds", "2", "--no-gloo", "--no-model"),
}
_PEERS = (
    "memory limit", "traffic limit", "raw ", "C MPI", "MPI one", "MPI in", "MPI chunks", "PyTorch", "a Python call",
)
_SECONDS = 600


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The tree of a commit in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="mpidist-against-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(tree: Path, benchmark: str, mpirun: list[str]) -> dict[str, float]:
    """The medians of one benchmark of one tree, by name."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [*mpirun, sys.executable, str(tree / "benchmarks" / f"{benchmark}.py"), *BENCHMARKS[benchmark]]
        subprocess.run(
            [*command, "--json", str(record)], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True,
            timeout=_SECONDS, stdout=subprocess.DEVNULL,
        )
        content = json.loads(record.read_text())
    content.pop("machine")
    return dict(_medians(content, benchmark))


def _medians(content: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        inner = f"{name}, {key}"
        if key in ("ratios", "best", "memory_in_parameter_copies", "compiler"):
            continue
        if isinstance(value, dict):
            if "median" in value:
                yield inner, float(value["median"])
            else:
                yield from _medians(value, name if key in ("figures", "times_ms", "microseconds") else inner)
        elif key != "reduce beyond Allreduce":  # a difference of two times has no ratio
            yield inner, float(value)


def is_peer(name: str) -> bool:
    """Whether a figure is that of a peer, whose code both trees share."""
    return name.rsplit(", ", 2)[-1].startswith(_PEERS) or any(f", {peer}" in name for peer in _PEERS)


def plot(path: str, ratios: Mapping[str, float], title: str) -> None:
    """A bar for each figure, around 1."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(9, 0.16 * len(ratios) + 1.5), constrained_layout=True)
    names = list(ratios)[::-1]
    colors = ["0.7" if is_peer(name) else "tab:blue" for name in names]
    axis.barh(names, [ratios[name] - 1 for name in names], left=1, color=colors)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.tick_params(axis="y", labelsize=6)
    axis.set_xlabel("time of this tree / time of the other (gray: peers, the same code in both)")
    axis.set_title(title, fontsize=9)
    axis.margins(y=0.01)
    figure.savefig(path, dpi=110)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("commit")
@click.option("--benchmark", "chosen", multiple=True, type=click.Choice(list(BENCHMARKS)), help="Default: all.")
@click.option("--ranks", default=2, show_default=True)
@click.option("--turns", default=5, show_default=True, help="Runs of each tree.")
@click.option("--mpirun-option", "options", multiple=True, help="Passed to mpirun, once for each.")
@click.option("--plot", "plot_path", help="Write a bar chart of the ratios.")
@click.option("--json", "json_path", help="Write times and ratios.")
def main(
    commit: str, chosen: tuple[str, ...], ranks: int, turns: int, options: tuple[str, ...], plot_path: str | None,
    json_path: str | None,
) -> None:
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise click.ClickException("no mpirun beside the interpreter or on the PATH: install an MPI first")
    command = [mpirun, "-n", str(ranks), *options]
    times: dict[str, list[tuple[float, float]]] = {}
    with checked_out(commit) as tree:
        for turn in range(turns):
            for benchmark in chosen or tuple(BENCHMARKS):
                click.echo(f"turn {turn + 1} of {turns}: {benchmark}", err=True)
                before, now = run(tree, benchmark, command), run(ROOT, benchmark, command)
                for name in before.keys() & now.keys():
                    times.setdefault(name, []).append((before[name], now[name]))
    ratios = {
        name: statistics.median(now / before for before, now in pairs)
        for name, pairs in sorted(times.items(), key=lambda item: (is_peer(item[0]), item[0]))
    }
    for name, ratio in ratios.items():
        click.echo(f"{ratio:6.2f}  {name}")
    for kind, peers in (("mpidist", False), ("peers", True)):
        some = [ratio for name, ratio in ratios.items() if is_peer(name) is peers]
        click.echo(f"{kind}: median ratio {statistics.median(some):.3f}, {min(some):.2f} to {max(some):.2f}")
    if json_path:
        record = {"commit": commit, "ranks": ranks, "turns": turns, "ratios": ratios, "times": times}
        Path(json_path).write_text(json.dumps(record, indent=1) + "\n")
    if plot_path:
        plot(plot_path, ratios, f"this tree against {commit}, {ranks} ranks, {turns} turns")


if __name__ == "__main__":
    main()
