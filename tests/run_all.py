"""Run all tests: those without MPI, the parallel ones on 1, 2, 3 and 4 ranks, then those that start whole programs.

    python tests/run_all.py [--ranks 1,2,3,4] [-k EXPRESSION] [--select NAME,...] [--skip-unit] [--skip-parallel]
                              [--skip-programs] [--long] [--coverage] [pytest's own options]

The MPI is the one of this environment. Every test has a time limit (see `mpidist.testing`), and so has every part. At
the end, also of a run that is cut off, come the minutes of each part and the slowest tests. Exit code 0: all passed.

`--select quick` takes minutes instead of half an hour: a quarter of the unit and parallel tests, on 2 ranks, and the
programs of the pages; `--select glance` of each file one test. `tests/helpers/selection.py` has the other selections.
The seed that they choose by, and by which Hypothesis draws, is that of the commit; `MPIDIST_TEST_SEED` in the
environment is another one. `MPIDIST_TEST_SELECTION` there stands for `--select`.

With --long tests that draw or repeat do so more often, tests marked `long` run, the parallel tests also on 5 ranks, and
deliberate faults show whether the tests notice (`tests/mutation.py`): for a night, not for every change.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):
    # Started as a file: the folder above tests is where it and mpidist stand.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers import coverage_table, selection, times
from tests.helpers.launching import NoLauncherError, find_mpirun, launch_environment, mpirun_command

ROOT = Path(__file__).resolve().parent.parent
# No part was seen to take much more than a quarter of it; only a launcher that hangs comes here.
PART_SECONDS = 1800
LONG_PART_SECONDS = 4 * 3600
UNIT_AT_ONCE = 2
# Programs wait most of their time: for a death, a report, a launcher.
PROGRAMS_AT_ONCE = 4


@dataclass
class Part:
    """A command, and how it went.

    Attributes:
        name: For people.
        command: What to run.
        sleeps: Whether ranks sleep where they wait, since several programs share the cores.
        result: How it went; empty before.
        seconds: Of the clock.
        cpu_seconds: Of all cores, by the processes that have ended.
    """

    name: str
    command: list[str]
    sleeps: bool = False
    result: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass
class Run:
    """All parts, and what they have in common.

    Attributes:
        parts: In their order.
        limit: Seconds after which a part is ended.
        variables: Added to the environment.
        may_be_empty: Whether a choice may leave a part without tests.
    """

    parts: list[Part]
    limit: float
    variables: Mapping[str, str]
    may_be_empty: bool
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def go(self) -> bool:
        """Run the parts one after another, in view of the user. Returns whether all have passed."""
        for part in self.parts:
            print(f"\n===== {part.name}: {' '.join(part.command)}", flush=True)
            begin, cpu = time.monotonic(), _cpu_seconds()
            part.result = "CUT OFF"
            try:
                part.result = self._run(part)
            finally:
                part.seconds, part.cpu_seconds = time.monotonic() - begin, _cpu_seconds() - cpu
            print(f"===== {part.name}: {part.result} in {part.seconds:.0f} s", flush=True)
        return all(part.result.startswith("passed") for part in self.parts)

    def _run(self, part: Part) -> str:
        # A folder of its own: pytest cleans up those of earlier runs, and ranks that do so at once get in each other's
        # way.
        with tempfile.TemporaryDirectory(prefix="mpidist-tests-", ignore_cleanup_errors=True) as folder:
            environment = {
                **launch_environment(sleeps=part.sleeps), "PYTEST_DEBUG_TEMPROOT": folder, **self.variables
            }
            code = wait(subprocess.Popen(part.command, cwd=ROOT, env=environment), self.limit)
        if code is None:
            return f"FAILED: not done after {self.limit:.0f} s"
        # pytest's code for "no tests collected".
        if code == 5 and self.may_be_empty:
            return "passed, no test chosen,"
        return f"FAILED with code {code}" if code else "passed"


def main(arguments: list[str] | None = None) -> int:
    """Run the parts one after another, then say how each went."""
    options, others = parse(arguments)
    names = [*selection.TOGETHER.get(options.select, filter(None, options.select.split(",")))]
    seed = os.environ.get(selection.SEED) or str(commit_seed())
    try:
        parts = parts_of(
            options, [*others, f"--hypothesis-seed={seed}", *(["--select", ",".join(names)] if names else [])]
        )
    except NoLauncherError as error:
        print(f"run_all: {error}", file=sys.stderr)
        return 1
    # As an interrupt: what has run by then is told.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="mpidist-times-") as folder:
        noted = Path(folder, "times")
        variables = {
            selection.SEED: seed, times.PLACE: str(noted),
            **(coverage_table.environment(folder) if options.coverage else {}),
        }
        run = Run(
            parts, LONG_PART_SECONDS if options.long else PART_SECONDS, variables, may_be_empty=bool(options.k or names)
        )
        try:
            passed = run.go()
        except KeyboardInterrupt:
            passed = False
        if options.coverage:
            print(coverage_table.make(folder))
        print(times.slowest(noted))
    print(f"\nselected: {', '.join(names) or 'all'}; seed {seed}\n{table(parts)}")
    return 0 if passed else 1


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of this program, and those of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default=None, metavar="N,N")
    parser.add_argument("-k", default=None, metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument("--select", default=os.environ.get("MPIDIST_TEST_SELECTION", ""), metavar="NAME,...")
    parser.add_argument("--skip-unit", action="store_true", help="leave out the tests without MPI")
    parser.add_argument("--skip-parallel", action="store_true", help="leave out those of several ranks")
    parser.add_argument("--skip-programs", action="store_true", help="leave out the tests of whole programs")
    parser.add_argument("--long", action="store_true", help="run the long forms of tests")
    parser.add_argument(
        "--coverage", action="store_true",
        help="print which share of the package's lines the tests run; programs that tests start do not count",
    )
    options, others = parser.parse_known_args(arguments)
    standard = "2" if options.select in selection.TOGETHER else "1,2,3,4,5" if options.long else "1,2,3,4"
    try:
        options.ranks = [int(n) for n in (options.ranks or standard).split(",")]
    except ValueError:
        parser.error(f"--ranks must be numbers as 1,2,3,4, got {options.ranks!r}")
    return options, others


def parts_of(options: argparse.Namespace, others: list[str]) -> list[Part]:
    """The parts that the options ask for."""
    chosen = [*others, *(["-k", options.k] if options.k else []), *(["--long"] if options.long else [])]
    # Open MPI gives its ranks a terminal, which then write colors into files.
    colors = [] if sys.stdout.isatty() else ["--color=no"]
    pytest = [sys.executable, "-m", "pytest", *colors]
    measured = [sys.executable, "-m", *(coverage_table.RUN if options.coverage else []), *pytest[2:]]
    parts = []
    if not options.skip_unit:
        parts.append(Part("unit tests", [*measured, *_at_once(UNIT_AT_ONCE, options), "tests/unit", *chosen]))
    for count in [] if options.skip_parallel else options.ranks:
        # One rank needs no launcher, and leaves a core free.
        start = mpirun_command(count, find_mpirun()) if count > 1 else []
        workers = _at_once(UNIT_AT_ONCE, options) if count == 1 else []
        command = [*start, *measured, *workers, "--with-mpi", "tests/parallel", *chosen]
        # Ranks of one job find each other sooner by spinning: 4 on two cores took 7 minutes so, and 12 by sleeping.
        parts.append(Part(f"{count} rank{'s' if count > 1 else ''}", command))
    if not options.skip_programs:
        command = [*pytest, *_at_once(PROGRAMS_AT_ONCE, options), "tests/system", *chosen]
        parts.append(Part("programs", command, sleeps=True))
    if options.long and not options.k:
        parts.append(Part("faults", [sys.executable, "tests/mutation.py"], sleeps=True))
    return parts


def _at_once(count: int, options: argparse.Namespace) -> list[str]:
    # What the tests run is counted in one process.
    return [] if options.coverage else ["--numprocesses", str(count), "--dist", "worksteal"]


def commit_seed() -> int:
    """A number of the commit of this checkout; 0 where there is none."""
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(asked.stdout[:8], 16) if asked.returncode == 0 else 0


def table(parts: list[Part]) -> str:
    """How each part went, and its minutes."""
    rows = [f"{'part':12} {'minutes':>8} {'CPU minutes':>12}  result"]
    rows += [f"{part.name:12} {part.seconds / 60:8.1f} {part.cpu_seconds / 60:12.1f}  {part.result or 'not run'}"
             for part in parts]
    return "\n".join(rows)


def wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code, or None after the time limit."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(30)
        return None
    except KeyboardInterrupt:
        process.terminate()
        process.wait(30)
        raise


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
