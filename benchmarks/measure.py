"""What the benchmarks share: timing on all ranks, a table, a record and what it was measured on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.arithmetic import compiler

WORLD = MPI.COMM_WORLD
# Of fixed sizes: tests, which only look whether everything is measured, take a small one.
SHARE = float(os.environ.get("MPIDIST_BENCHMARK_SHARE", "1"))
Case = Callable[[], object]


def interleaved(cases: Mapping[str, Case], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each case, the slowest rank counting; cases take turns so that a disturbance hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            WORLD.Barrier()
            begin = time.perf_counter()
            case()
            taken = WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)
            if number > 0:  # the first round touches memory and builds plans
                times[name].append(taken * 1e3)
    return {name: {"min": min(t), "median": statistics.median(t)} for name, t in times.items()}


@contextmanager
def compiling(*, compiles: bool) -> Iterator[None]:
    """Inside, what the extra `fast` compiles is compiled, or left to NumPy."""
    before = os.environ.get(compiler.VARIABLE)
    os.environ[compiler.VARIABLE] = str(int(compiles))
    yield
    os.environ.pop(compiler.VARIABLE)
    if before is not None:
        os.environ[compiler.VARIABLE] = before


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "ranks": WORLD.size,
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\x00 "),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def proportional_memory() -> int:
    """Bytes of memory of this process, shared pages counted in proportion (Pss)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def say(text: str = "") -> None:
    """Print on rank 0."""
    if WORLD.rank == 0:
        print(text, flush=True)


def record(path: str | None, results: Mapping[str, Any]) -> None:
    """Write the results on rank 0, if a path was given."""
    if path and WORLD.rank == 0:
        Path(path).write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
        print(f"wrote {path}", file=sys.stderr)
