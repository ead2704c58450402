"""The program of `scale_counts.py`: each rank runs the phases and writes its counts."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The kinds of native/counts.c, in its order; it counts the thread that runs the program, and all others together.
SHIM_KINDS = ("MPI calls", "bytes sent", "bytes received", "files opened", "of /proc", "looks at paths", "files mapped")
CALLS, OBJECTS, PAGES = "calls", "objects", "pages"
# Seconds after which a wait is reported, and seconds for which the first rank then still lets the others wait.
WARN_SECONDS, MORE_SECONDS = 1.0, 4.0
STEPS, REDUCTIONS, GATHERS = 64, 64, 8
SHAPES = ((64, 256), (256,), (256, 64), (64,))


class Counts:
    """The counts of this rank since the last phase.

    Args:
        what: See `main`.
    """

    def __init__(self, what: str) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.scale_counts.restype = ctypes.POINTER(ctypes.c_long * (2 * len(SHIM_KINDS)))
        self._counters = self._shim.scale_counts().contents
        self._what = what
        self.phases: dict[str, dict[str, float]] = {}
        # The counts in /proc/self would be those of all threads.
        self._io = open("/proc/thread-self/io", "rb", buffering=0)  # noqa: SIM115 - kept open: opening it counts
        self._last = self._now()

    def _now(self) -> tuple[list[int], int, int]:
        counters = list(self._counters)
        memory = _private_bytes() if self._what == PAGES else tracemalloc.get_traced_memory()[0]
        self._io.seek(0)
        fields = self._io.read(400).split()
        return counters, int(fields[5]) + int(fields[7]), memory

    def note(self, phase: str, times: int = 1) -> None:
        """End a phase that has repeated an operation `times` times, and note the counts of one repetition."""
        gc.collect()
        peak = tracemalloc.get_traced_memory()[1]
        counters, io, memory = self._now()
        before, io_before, memory_before = self._last
        more = [now - then for now, then in zip(counters, before, strict=True)]
        found = {name: one / times for name, one in zip(SHIM_KINDS, more, strict=False)}
        # `_now` itself reads this file: that read is not counted.
        found["reads and writes"] = max(0, io - io_before - 1) / times
        if self._what == PAGES:
            found = {"private bytes": (memory - memory_before) / times}
        elif tracemalloc.is_tracing():
            found["bytes kept"] = (memory - memory_before) / times
            found["bytes for a while"] = max(0, peak - memory_before)
        self.phases[phase] = found
        tracemalloc.reset_peak()
        # The operations of the measurement itself are not counted.
        self._last = self._now()

    def trace(self) -> None:
        """Begin to count the bytes of Python's objects; earlier objects are not counted."""
        tracemalloc.start()
        self._last = self._now()

    def own(self) -> list[int]:
        """The counts of this thread so far."""
        return list(self._counters)[: len(SHIM_KINDS)]

    def write_end(self, path: Path) -> None:
        """Make the library write the counts when the process ends."""
        self._shim.scale_counts_end(str(path).encode())

    def background(self) -> list[int]:
        """The counts of the other threads so far."""
        return list(self._counters)[len(SHIM_KINDS) :]


class Looks:
    """The counts of the watchdog's operations from one of its looks to the next."""

    def __init__(self, counts: Counts, mark: Path) -> None:
        self._counts, self._mark = counts, mark
        self._begin = 0.0
        self._last: list[int] = []
        self.found: list[list[int]] = []

    def look(self, now: float) -> None:
        """Note a look; called in the watchdog's thread."""
        self._begin = self._begin or now
        if self._last:
            self.found.append(
                [one - before for one, before in zip(self._counts.background(), self._last, strict=True)]
            )
        if now - self._begin > WARN_SECONDS + MORE_SECONDS and not self._mark.exists():
            self._mark.touch()
        self._last = self._counts.background()

    def phase(self, which: Callable[[list[float]], float]) -> dict[str, float]:
        """The median or the maximum of the looks' counts; `which` selects it from the sorted counts."""
        if not self.found:
            return dict.fromkeys(SHIM_KINDS, 0.0)
        return {
            name: which(sorted(look[place] for look in self.found)) for place, name in enumerate(SHIM_KINDS)
        }


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def main(folder: Path, what: str) -> None:
    """Run all phases.

    Args:
        folder: The folder for the counts of the ranks.
        what: The kind of counts: `CALLS` counts calls alone; `OBJECTS` also the bytes of Python's objects, and a long
            wait, which takes more time; `PAGES` counts the process's own pages instead.
    """
    importlib.import_module("numpy")
    counts = Counts(what)
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    world.Barrier()
    counts.note("MPI alone")
    # Imported before the phases that are of interest: these modules are many, and the same on all ranks.
    for name in ("mpidist", "mpidist.optimizers", "mpidist.failures.watchdog", "h5py"):
        importlib.import_module(name)
    counts.note("import")
    if what == OBJECTS:
        counts.trace()
    strategy = train(counts, folder)
    if what == OBJECTS:
        wait_long(strategy, world, counts, folder)
    (folder / f"{world.rank}.json").write_text(json.dumps(counts.phases))
    (folder / f"{world.rank}.before").write_text(" ".join(map(str, counts.own())))
    counts.write_end(folder / f"{world.rank}.end")


def train(counts: Counts, folder: Path) -> Any:
    """Run the phases from the start to a restore. Returns the strategy."""
    np, mpidist = importlib.import_module("numpy"), importlib.import_module("mpidist")
    strategy = mpidist.MultiWorkerMirroredStrategy()
    counts.note("start")
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
        optimizer = mpidist.optimizers.Adam(0.01)
    counts.note("variables")

    def step() -> None:
        optimizer.apply_gradients([(np.ones(one.shape, np.float32), one) for one in variables])

    rows = np.ones((1, 16), np.float32)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "step": (lambda: strategy.run(step), STEPS),
        "reduce": (lambda: strategy.reduce("SUM", 1, axis=None), REDUCTIONS),
        "gather": (lambda: strategy.gather(rows, axis=0), GATHERS),
    }
    for name, (call, times) in calls.items():
        call()
        counts.note(f"first {name}")
        for _ in range(times):
            call()
        counts.note(name, times)
    checkpoint = mpidist.Checkpoint(optimizer=optimizer, variables=variables)
    checkpoint.save(folder / "saved")
    counts.note("first save")
    path = checkpoint.save(folder / "saved")
    counts.note("save")
    checkpoint.restore(path)
    counts.note("restore")
    return strategy


def wait_long(strategy: Any, world: Any, counts: Counts, folder: Path) -> None:
    """Let all ranks but the first wait in a call until the wait was reported."""
    # Set only now: on a busy machine ranks may wait as long in other phases.
    os.environ["MPIDIST_WARN_SECONDS"] = str(WARN_SECONDS)
    watchdog = importlib.import_module("mpidist.failures.watchdog").WATCHDOG
    looks = Looks(counts, folder / f"{world.rank}.looked")
    watchdog.look_also(looks.look)
    if world.rank == 0:
        while len(list(folder.glob("*.looked"))) < world.size:
            time.sleep(0.5)
    strategy.reduce("SUM", 1, axis=None)
    # The counts of this phase are dropped: the number of times that the first rank lists files depends on the machine.
    counts.note("wait")
    del counts.phases["wait"]
    counts.phases["look, waiting"] = looks.phase(lambda values: values[len(values) // 2])
    counts.phases["look, reporting"] = looks.phase(lambda values: values[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
