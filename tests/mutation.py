"""Put deliberate faults into a copy of the package, one at a time, and see whether the tests notice.

    python tests/mutation.py [NAME ...] [--list] [--sample N] [--jobs N]

The faults are in `tests/faults/`. A test that fails has found a fault, and so has a run that does not end. Exit code
0: at least 95 % were found, of a small sample all but one. Its seed is that of `tests/run_all.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    # Started as a file: the folder above tests is where it and mpidist stand.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults import FAULTS, Fault
from tests.helpers import selection
from tests.helpers.launching import NoLauncherError, find_mpirun, launch_environment, mpirun_command
from tests.run_all import commit_seed

ROOT = Path(__file__).resolve().parent.parent
WANTED_SHARE = 0.95
LIMIT_SECONDS = 240.0
# All tests of one number of ranks together.
SOUND_SECONDS = 1200.0
# The last one has pytest's settings.
COPIED = ("mpidist", "tests", "pyproject.toml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Look for all faults, or for those that are named; print which of them the tests have found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--sample", type=int, default=None, metavar="N", help="so many of them, chosen by the commit")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="look for so many faults at a time")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"expected names of faults, as --list prints them, got {sorted(unknown)}")
    faults = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    if options.sample is not None:
        seed = os.environ.get(selection.SEED) or commit_seed()
        faults = random.Random(f"{seed} faults").sample(faults, min(options.sample, len(faults)))
        print(f"a sample of {len(faults)} faults, seed {seed}", flush=True)
    if options.list:
        print("\n".join(f"{fault.name:40} {fault.file}" for fault in faults))
        return 0
    with tempfile.TemporaryDirectory(prefix="mpidist-mutation-") as folder:
        # The working tree may change while this runs.
        sound = Path(folder, "sound")
        copy(ROOT, sound)
        failed = check_sound(sound, faults)
        if failed:
            print(f"mutation: without a fault the tests must pass, got {failed}", file=sys.stderr)
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            missed = []
            for fault, result in zip(faults, pool.map(partial(look_for, sound), faults), strict=True):
                print(f"{fault.name:40} {result or 'NOT FOUND'}", flush=True)
                missed += [] if result else [fault.name]
    count = len(faults)
    print(f"\n{count - len(missed)} of {count} faults were found{': not ' if missed else ''}{', '.join(missed)}")
    return 0 if len(missed) <= max(bool(options.sample), int((1 - WANTED_SHARE) * count)) else 1


def check_sound(tree: Path, faults: Sequence[Fault]) -> str:
    """What goes wrong without a fault: a test that always fails would find every fault."""
    kinds: dict[tuple[str, int], dict[str, None]] = {}
    for fault in faults:
        kinds.setdefault((fault.folder, fault.ranks), {}).update(dict.fromkeys(fault.tests.split()))
    for (_, ranks), tests in kinds.items():
        result = run_tests(tree, " ".join(tests), ranks, SOUND_SECONDS)
        if result:
            return f"on {ranks} rank{'s' if ranks > 1 else ''}: {result}\n{(tree / 'output').read_text()[-4000:]}"
    return ""


def look_for(sound: Path, fault: Fault) -> str:
    """How the tests notice a fault; empty if they do not."""
    with tempfile.TemporaryDirectory(dir=sound.parent) as folder:
        tree = Path(folder)
        copy(sound, tree)
        file = tree / "mpidist" / fault.file
        file.write_text(fault.put_into(file.read_text()))
        return run_tests(tree, fault.tests, fault.ranks, LIMIT_SECONDS)


def copy(source: Path, target: Path) -> None:
    """Copy what tests need, with the times of the files: Python's compiled ones stay valid."""
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        else:
            shutil.copy2(source / name, target / name)


def run_tests(tree: Path, tests: str, ranks: int, limit: float) -> str:
    """Run tests of a copy up to the first that fails. Returns what has gone wrong, empty if nothing has."""
    launcher = mpirun_command(ranks, find_mpirun()) if ranks > 1 else []
    command = [
        *launcher, sys.executable, "-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider",
        *(["--with-mpi"] if tests.startswith("parallel") else []),
        *(f"tests/{test}" for test in tests.split()),
    ]
    environment = {
        **launch_environment(), "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DEBUG_TEMPROOT": str(tree),
    }
    begin = time.monotonic()
    # A file: what a fault leaves running could hold a pipe open for ever.
    with (tree / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )
        code = wait(process, limit)
    if code is None:
        return f"not done after {limit:.0f} s"
    return f"exit code {code} after {time.monotonic() - begin:.0f} s" if code else ""


def wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code, or None after the time limit."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # mpirun ends its ranks when it is asked to; what is left then is killed.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoLauncherError as error:
        print(f"mutation: {error}", file=sys.stderr)
        sys.exit(1)
