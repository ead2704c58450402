"""Programs that measure times: none can be longer than the program itself."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.helpers.launching import run_program


def run_measured(
    ranks: int, program: Path, *arguments: object, timeout_seconds: float, share: str = "1"
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program as `run_program` does; also the microseconds that it took, start and end among them.

    Whatever it has measured took less. More is an error of units, on a slow machine as on a fast one. `share` is
    that of its sizes: see `benchmarks/measure.py`.
    """
    begin = time.monotonic()
    result = run_program(ranks, program, *arguments, timeout_seconds=timeout_seconds, MPIDIST_BENCHMARK_SHARE=share)
    return result, (time.monotonic() - begin) * 1e6
