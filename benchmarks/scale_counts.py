"""Count each rank's operations, and show which counts grow with the ranks. Counts do not depend on a machine's speed.

    python benchmarks/scale_counts.py --plot scale_counts.png --json scale_counts.json
    python benchmarks/scale_counts.py --short                                 # calls alone, in a minute
    python benchmarks/scale_counts.py --long --json scale_counts.json         # up to 256 ranks, and private memory
    python benchmarks/scale_counts.py --counts scale_counts.json              # the table of a record

Each rank runs the phases of a program: MPI and the imports, the start of a strategy, variables, a first and a later
step, `reduce`, `gather`, save, restore, a long wait with its report, the ending. The benchmark starts the ranks: on
this host, and on virtual hosts of two ranks each (`tests/hosts`). It counts the operations of each phase in the thread
that runs the program, and in `look, ...` those of all other threads from one look of the watchdog to the next:

    MPI calls         that communicate; Test, Wait and Iprobe are not counted, since slow machines make more of these
    bytes sent        that the rank passes to these calls
    bytes received    that the rank gets by these calls, or has room for
    files opened      open, openat, fopen, opendir, shm_open, as Python and MPI call them
    of /proc          those of the calls on paths whose path is below /proc
    looks at paths    stat, access, readlink, unlink, rename, mkdir, ...
    files mapped      mmap of a file
    reads and writes  all read and write calls to the kernel of the thread, from /proc/thread-self/io
    bytes kept        by Python's objects and NumPy's arrays, at the end of the phase (tracemalloc)
    bytes for a while the largest number of such bytes within the phase, beyond those at its begin
    private bytes     by the process's own pages, with --long; in a separate run, since tracemalloc uses memory, too

A library that is loaded before MPI and libc counts the calls (`native/counts.c`); the system's C compiler builds it.
The table shows the largest count of all ranks, the best fit of constant, log n, n, n log n and n^2 (least squares; the
slowest growth that fits as well as the best), and its value for more ranks. A count that grows faster than log n has a
mark: it does not scale on any network. For ranks of one host, read the value for as many ranks as a host has cores. The
values for many hosts, together with `scale_model.py`, are for the whole job.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from growth import Growth, fit
from scale_counts_rank import CALLS, OBJECTS, PAGES, SHIM_KINDS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(__file__).parent / "native" / "counts.c"
PROGRAM = Path(__file__).with_name("scale_counts_rank.py")
RANKS, LONG_RANKS, HOSTS, PER_HOST = (2, 4, 8, 16, 32, 64), (128, 256), (2, 4, 8), 2
BEYOND = (1024, 16384, 65536)
JOB_SECONDS = 600
# Random differences: of Python's objects (texts, tables that grow, other threads), and of pages that may be shared.
TOLERANCES = {
    "bytes kept": 32768.0, "bytes for a while": 32768.0, "private bytes": 262144.0, "bytes sent": 64.0,
    "bytes received": 64.0,
}
# For other kinds: some looks do more than others, for instance write a file.
OTHER_TOLERANCE = 1.0
_BY_CHANCE = 0.002
_PLOTTED = ("MPI calls", "bytes received", "files opened", "bytes kept")

Phases = dict[str, dict[str, float]]  # phase, kind: the largest of the ranks' counts
Series = dict[int, Phases]  # by ranks


def build(folder: Path) -> Path:
    """Build the library.

    Raises:
        click.ClickException: The library cannot be compiled here.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise click.ClickException("there is no C compiler: the library that counts cannot be made")
    target = folder / "counts.so"
    # mpi4py calls functions MPI_..._c if MPI has them: the library must not define them if MPI does not.
    code = (
        "import ctypes, mpi4py; mpi4py.rc.initialize = False\nfrom mpi4py import MPI\n"
        "print(hasattr(ctypes.CDLL(MPI.__file__), 'PMPI_Allreduce_c'))"
    )
    has_large = _run([sys.executable, "-c", code]).strip() == "True"
    large = ["-DLARGE_COUNTS"] if has_large else []
    _run([compiler, "-O2", "-shared", "-fPIC", *large, "-o", str(target), str(SOURCE), "-ldl"])
    return target


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise click.ClickException(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def count(ranks: int, library: Path, hosts: int, what: str) -> dict[str, Phases]:
    """Run the program on some ranks. Returns the largest counts of the ranks, and their medians."""
    # Imported only here: no rank needs the tests' helpers.
    sys.path.insert(0, str(ROOT))
    launching = importlib.import_module("tests.helpers.launching")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # No wait may be reported before the one that is counted.
        variables = {"LD_PRELOAD": str(library), "MPIDIST_WARN_SECONDS": str(JOB_SECONDS)}
        if hosts > 1:
            virtual_hosts = importlib.import_module("tests.hosts.virtual_hosts")
            with virtual_hosts.VirtualHosts(hosts) as these:
                result = these.run(
                    [ranks // hosts] * hosts, PROGRAM, folder, what, timeout_seconds=JOB_SECONDS,
                    MPIDIST_JOB_DIR=name, **variables,
                )
        else:
            result = launching.run_program(ranks, PROGRAM, folder, what, timeout_seconds=JOB_SECONDS, **variables)
        if result.returncode:
            raise click.ClickException(f"{ranks} ranks ended with {result.returncode}: {result.stderr[-3000:]}")
        told = [_read(folder, rank) for rank in range(ranks)]
    return {
        which: {
            phase: {kind: choose([one[phase][kind] for one in told]) for kind in told[0][phase]} for phase in told[0]
        }
        for which, choose in (("most", max), ("median", statistics.median))
    }


def _read(folder: Path, rank: int) -> Phases:
    """A rank's counts, including its ending."""
    phases: Phases = json.loads((folder / f"{rank}.json").read_text())
    if "private bytes" not in phases["start"]:
        before, end = ((folder / f"{rank}.{name}").read_text().split() for name in ("before", "end"))
        # Two of the files in these counts are the program's own.
        phases["ending"] = {
            kind: float(last) - float(first) for kind, first, last in zip(SHIM_KINDS, before, end, strict=False)
        }
    return phases


def growths(series: Mapping[int, Phases]) -> dict[tuple[str, str], tuple[dict[int, float], Growth]]:
    """The counts over the ranks, and their growth, by phase and kind."""
    first = next(iter(series.values()))
    found = {}
    for phase, kinds in first.items():
        for kind in kinds:
            points = {ranks: phases[phase][kind] for ranks, phases in series.items()}
            if any(points.values()):
                tolerance = max(TOLERANCES.get(kind, OTHER_TOLERANCE), _BY_CHANCE * max(points.values()))
                found[phase, kind] = points, fit(points, tolerance)
    return found


def shown(number: float) -> str:
    """A number as a short text."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= unit:
            return f"{number / (1e3 if name == 'k' else unit):.{0 if name == 'k' else 1}f}{name}"
    return f"{number:.0f}" if abs(number - round(number)) < 0.005 else f"{number:.2f}"


def show(title: str, most: Mapping[int, Phases], median: Mapping[int, Phases]) -> list[dict[str, Any]]:
    """Print the table of a series. Returns its rows."""
    rows = []
    medians = growths(median)
    click.echo(f"\n{title}\n{'':17}{'':18}" + "".join(f"{ranks:>8}" for ranks in most)
               + f"  {'growth':10}" + "".join(f"{ranks:>8,}" for ranks in BEYOND))
    for (phase, kind), (points, growth) in growths(most).items():
        of_median = medians.get((phase, kind))
        # Only a few ranks have this count, for instance the first one.
        is_of_few = growth.is_fast and (of_median is None or not of_median[1].is_fast)
        mark = ("  * of few ranks" if is_of_few else "  *") if growth.is_fast else ""
        click.echo(f"{phase:17}{kind:18}" + "".join(f"{shown(one):>8}" for one in points.values())
                   + f"  {growth.name:10}" + "".join(f"{shown(growth.at(ranks)):>8}" for ranks in BEYOND) + mark)
        rows.append({
            "phase": phase, "kind": kind, "growth": growth.name, "begin": growth.begin, "slope": growth.slope,
            "faster than log n": growth.is_fast, "of few ranks": is_of_few,
            "predicted": {str(ranks): growth.at(ranks) for ranks in BEYOND},
        })
    return rows


def plot(path: str, all_series: Mapping[str, Mapping[int, Phases]]) -> None:
    """Plot counts over ranks, for each series and some kinds; dotted lines extrapolate them to more ranks."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(
        len(all_series), len(_PLOTTED), figsize=(16, 4 * len(all_series)), constrained_layout=True, squeeze=False
    )
    for line, (title, series) in zip(axes, all_series.items(), strict=True):
        for axis, kind in zip(line, _PLOTTED, strict=True):
            for number, ((phase, _), (points, growth)) in enumerate(
                (key, one) for key, one in growths(series).items() if key[1] == kind
            ):
                color = f"C{number % 10}"
                style = "o-" if growth.is_fast else ".-"
                axis.loglog(list(points), [max(one, 0.1) for one in points.values()], style, color=color, label=phase)
                beyond = [max(points), *BEYOND]
                axis.loglog(beyond, [max(growth.at(ranks), 0.1) for ranks in beyond], ":", color=color)
            axis.set_title(f"{kind}, {title}", fontsize=9)
            axis.set_xlabel("ranks")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=6)
    figure.suptitle("of the rank with most; circles: faster than log n; dotted: extrapolated", fontsize=10)
    figure.savefig(path, dpi=80)
    click.echo(f"wrote {path}")


def taken(
    ranks: Sequence[int], hosts: Sequence[int], per_host: int, kinds: Sequence[str]
) -> Iterator[tuple[str, int, dict[str, Phases]]]:
    """The name of the series, the ranks and their counts, for each number of ranks and of hosts."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        library = build(Path(folder))
        jobs = [("one host", one, 1) for one in ranks]
        jobs += [(f"hosts of {per_host}", one * per_host, one) for one in hosts]
        for title, count_of_ranks, count_of_hosts in jobs:
            click.echo(f"{count_of_ranks} ranks, {title}", err=True)
            found: dict[str, Phases] = {}
            for what in kinds:
                for which, phases in count(count_of_ranks, library, count_of_hosts, what).items():
                    for phase, numbers in phases.items():
                        found.setdefault(which, {}).setdefault(phase, {}).update(numbers)
            yield title, count_of_ranks, found


def read(path: str) -> dict[str, dict[str, Series]]:
    """Read the counts of a record, by series."""
    content = json.loads(Path(path).read_text())["counts"]
    return {
        title: {which: {int(ranks): phases for ranks, phases in series.items()} for which, series in both.items()}
        for title, both in content.items()
    }


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--ranks", default=RANKS, show_default=True, multiple=True, help="Of one host; 0: none.")
@click.option("--hosts", default=HOSTS, show_default=True, multiple=True, help="Numbers of virtual hosts; 0: none.")
@click.option("--per-host", default=PER_HOST, show_default=True, help="Ranks of each virtual host.")
@click.option("--short", "kinds", flag_value=CALLS, help="Calls alone, and no long wait.")
@click.option("--long", "kinds", flag_value=PAGES, help=f"Also {LONG_RANKS} ranks, and private memory.")
@click.option("--counts", "counts_path", help="Show a record, instead of counting.")
@click.option("--plot", "plot_path", help="Write a plot.")
@click.option("--json", "json_path", help="Write the figures.")
def main(
    ranks: Sequence[int], hosts: Sequence[int], per_host: int, kinds: str | None, counts_path: str | None,
    plot_path: str | None, json_path: str | None,
) -> None:
    if counts_path:
        counts = read(counts_path)
    else:
        counts = {}
        is_long = kinds == PAGES
        all_ranks = [*filter(None, ranks), *(LONG_RANKS if is_long else ())]
        counted = [CALLS] if kinds == CALLS else [OBJECTS, PAGES] if is_long else [OBJECTS]
        for title, one, found in taken(all_ranks, [*filter(None, hosts)], per_host, counted):
            for which, phases in found.items():
                counts.setdefault(title, {}).setdefault(which, {})[one] = phases
    rows = {title: show(title, both["most"], both["median"]) for title, both in counts.items()}
    if plot_path:
        plot(plot_path, {title: both["most"] for title, both in counts.items()})
    if json_path:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "mpi": _mpi_version()}
        content = {"machine": machine, "rows": rows, "counts": counts}
        Path(json_path).write_text(json.dumps(content, indent=1) + "\n")


def _mpi_version() -> str:
    code = "import mpi4py; mpi4py.rc.initialize = False\nfrom mpi4py import MPI\nprint(MPI.Get_library_version())"
    return _run([sys.executable, "-c", code]).splitlines()[0].strip("\x00 ")


if __name__ == "__main__":
    main()
