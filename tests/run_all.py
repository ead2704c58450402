"""Run all tests: those without MPI, the parallel ones on 1, 2, 3 and 4 ranks, then those that start whole programs.

    python tests/run_all.py [--ranks 1,2,3,4] [-k EXPRESSION] [--skip-unit] [--skip-programs] [--long] [--coverage]
                              [pytest's own options]

The MPI is the one of this environment. MPIDIST_TEST_RANKS=2 in the environment stands for `--ranks 2`. Every test has
a time limit (see `mpidist.testing`), and so has every part. Exit code 0: everything passed.

With --long tests that draw or repeat do so more often, tests marked `long` run, and deliberate faults show whether the
tests notice (`tests/mutation.py`): for a night, not for every change.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):
    # Started as a file: the folder above tests is where it and mpidist stand.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import coverage_table
from tests.launching import NoLauncherError, find_mpirun, launch_environment, mpirun_command

ROOT = Path(__file__).resolve().parent.parent
# No part was seen to take much more than half of it; only a launcher that hangs comes here.
PART_SECONDS = 1200
LONG_PART_SECONDS = 4 * 3600
# Programs wait most of their time: for a death, a report, a launcher. Two of them are under way, and two unit tests; of
# three some came too late.
AT_ONCE = ("--numprocesses", "2", "--dist", "worksteal")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts one after another, then say how each went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default=os.environ.get("MPIDIST_TEST_RANKS", "1,2,3,4"), metavar="N,N")
    parser.add_argument("-k", default=None, metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument("--skip-unit", action="store_true", help="leave out the tests without MPI")
    parser.add_argument("--skip-programs", action="store_true", help="leave out the tests of whole programs")
    parser.add_argument("--long", action="store_true", help="run the long forms of tests")
    parser.add_argument(
        "--coverage", action="store_true",
        help="print which share of the package's lines the tests run; programs that tests start do not count",
    )
    options, others = parser.parse_known_args(arguments)
    try:
        ranks = [int(n) for n in options.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks must be numbers as 1,2,3,4, got {options.ranks!r}")
    chosen = [*others, *(["-k", options.k] if options.k else []), *(["--long"] if options.long else [])]
    # Open MPI gives its ranks a terminal, which then write colors into files.
    colors = [] if sys.stdout.isatty() else ["--color=no"]
    pytest = [sys.executable, "-m", "pytest", *colors]
    measured = [sys.executable, "-m", *(coverage_table.RUN if options.coverage else []), *pytest[2:]]
    # What the tests run is counted in one process.
    at_once = () if options.coverage else AT_ONCE
    parts = {} if options.skip_unit else {"unit tests": [*measured, *at_once, "tests/unit", *chosen]}
    try:
        mpirun = find_mpirun()
        for count in ranks:
            command = [*mpirun_command(count, mpirun), *measured, "--with-mpi", "tests/parallel", *chosen]
            parts[f"{count} rank{'s' if count > 1 else ''}"] = command
        if not options.skip_programs:
            parts["programs"] = [*pytest, *AT_ONCE, "tests/system", *chosen]
        if options.long and not options.k:
            parts["faults"] = [sys.executable, "tests/mutation.py"]
    except NoLauncherError as error:
        print(f"run_all: {error}", file=sys.stderr)
        return 1
    seconds = LONG_PART_SECONDS if options.long else PART_SECONDS
    with tempfile.TemporaryDirectory(prefix="mpidist-coverage-") as folder:
        environment = coverage_table.environment(folder) if options.coverage else {}
        results = {name: run(name, command, seconds, environment, selected=bool(options.k))
                   for name, command in parts.items()}
        if options.coverage:
            print(coverage_table.make(folder))
    print("\n" + "\n".join(f"{name:12} {result}" for name, result in results.items()))
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


def run(name: str, command: list[str], limit: float, variables: dict[str, str], *, selected: bool) -> str:
    """Run one part in view of the user.

    Args:
        name: For the headline.
        command: What to run.
        limit: Seconds after which the part is ended.
        variables: Added to the environment.
        selected: Whether a choice may leave the part without tests.

    Returns:
        "passed", or what went wrong, and the time it took.
    """
    print(f"\n===== {name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    # A folder of its own: pytest cleans up those of earlier runs, and ranks that do so at once get in each other's way.
    with tempfile.TemporaryDirectory(prefix="mpidist-tests-", ignore_cleanup_errors=True) as folder:
        environment = {**launch_environment(), "PYTEST_DEBUG_TEMPROOT": folder, **variables}
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        code = wait(process, limit)
    seconds = time.monotonic() - begin
    if code is None:
        return f"FAILED: not done after {limit:.0f} s"
    if code == 0:
        return f"passed in {seconds:.0f} s"
    # pytest's code for "no tests collected".
    if code == 5 and selected:
        return f"passed in {seconds:.0f} s (no test chosen)"
    return f"FAILED with code {code} after {seconds:.0f} s"


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


if __name__ == "__main__":
    sys.exit(main())
