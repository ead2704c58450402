"""The pause between two looks of a watchdog grows with the ranks per core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
from mpidist.failures import job_directory, peers
from mpidist.recorder import time_limits
print(time_limits.TICK_SECONDS, time_limits.ANSWER_SECONDS, peers.STALE_SECONDS,
      job_directory.WRITE_SECONDS, job_directory.IDLE_SECONDS)
"""


@pytest.mark.parametrize(("ranks_per_core", "factor"), [(None, 1), (1, 1), (16, 1), (32, 2), (128, 8)])
def test_looks_of_a_crowded_host_are_rarer(ranks_per_core: int | None, factor: int) -> None:
    environment = {name: value for name, value in os.environ.items() if "LOCAL" not in name}
    if ranks_per_core is not None:
        environment["MPI_LOCALNRANKS"] = str(ranks_per_core * (os.cpu_count() or 1))
    # The pause is a constant of a process.
    out = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert [float(one) for one in out.stdout.split()] == [factor * one for one in (0.5, 1.0, 3.0, 1.0, 10.0)]
