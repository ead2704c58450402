"""Ranks of one host in containers of their own: each has its own processes and its own /dev/shm."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import find_mpirun, finish, is_open_mpi, mpirun_command, start_command

pytestmark = pytest.mark.timeout_seconds(120)

CONTAINER = """#!/bin/sh
exec unshare --mount --pid --fork --mount-proc --kill-child sh -c \
    'mount -t tmpfs -o size=300m tmpfs /dev/shm && exec "$@"' container "$@"
"""
TRAINS = """
import os
import numpy as np
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
ranks = strategy.communicator
with strategy.scope():
    variable = mpidist.Variable(np.zeros(1000, "float32"))
    optimizer = mpidist.optimizers.SGD(0.5)
for _ in range(3):
    strategy.run(lambda: optimizer.apply_gradients([(np.full(1000, ranks.rank + 1, "float32"), variable)]))
told = ranks.all_gather_object((os.getpid(), ranks.node_sizes, float(variable.value()[0])))
if ranks.rank == 0:
    print(told, flush=True)
"""


@functools.cache
def why_unavailable() -> str:
    """The reason why this machine allows no such containers; empty if it does."""
    if shutil.which("unshare") is None:
        return "there is no unshare (Debian: util-linux)"
    command = ["sh", "-c", CONTAINER.partition("\n")[2], "sh", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return tried.stderr.strip() if tried.returncode else ""


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program on three ranks, each in a container of its own."""
    if why_unavailable():
        pytest.skip(f"this machine allows no namespaces of processes and mounts: {why_unavailable()}")
    program, container = folder / "program.py", folder / "container"
    program.write_text(TRAINS)
    container.write_text(CONTAINER)
    container.chmod(0o755)
    command = [*mpirun_command(3, find_mpirun()), str(container), sys.executable, str(program)]
    return finish(start_command(command, **environment), "program.py", 60)


def test_ranks_that_share_no_memory_count_as_nodes(tmp_path: Path) -> None:
    result = run(tmp_path, MPIR_CVAR_NOLOCAL="1", OMPI_MCA_btl="self,tcp")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    # All ranks are process 1 of the same host.
    assert str([(1, (1, 1, 1), -9.0)] * 3) in result.stdout, text


def test_a_start_that_waits_for_ever_is_explained(tmp_path: Path) -> None:
    if is_open_mpi(find_mpirun()):
        pytest.skip("Open MPI does not wait there: it ends with a segmentation fault")
    result = run(tmp_path, MPIDIST_WARN_SECONDS="2", MPIDIST_TIMEOUT="5")
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert re.search(r"rank \d of 3 on \S+ has waited \d+ s for all ranks, the job ends", text), text
    assert "This rank runs in a container" in text, text
    assert "set MPIR_CVAR_NOLOCAL=1" in text, text
