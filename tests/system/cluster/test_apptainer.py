"""Ranks in containers of the real Apptainer, under mpirun: what they share, and what its options do to them."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.helpers.containers import site_mpi
from tests.helpers.launching import find_mpirun, finish, is_open_mpi, launch_environment, mpirun_command

pytestmark = pytest.mark.timeout_seconds(120)

# With messages that MPI would copy from process to process.
TRAINS = """
import json, os, threading
import numpy as np
import mpidist
if "OTHERS_STAY" in os.environ and not mpidist.is_first_rank():
    threading.Event().wait()
strategy = mpidist.MultiWorkerMirroredStrategy()
ranks = strategy.communicator
with strategy.scope():
    variable = mpidist.Variable(np.zeros(200_000))
    optimizer = mpidist.optimizers.SGD(0.5)
for _ in range(3):
    strategy.run(lambda: optimizer.apply_gradients([(np.full(200_000, ranks.rank + 1.0), variable)]))
received = np.full(1_000_000, float(ranks.rank))
if ranks.size > 1:
    from mpi4py import MPI
    MPI.COMM_WORLD.Sendrecv_replace(received, 1 - ranks.rank, source=1 - ranks.rank)
told = ranks.all_gather_object((ranks.node_sizes, float(variable.numpy()[-1]), float(received[-1])))
if ranks.rank == 0:
    print(json.dumps(told), flush=True)
"""
# What `container.sbatch` sets, for containers that are other users' to one another.
USERS = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_POSIX_USE_PROC_LINK": "n"}
# For containers that share no memory, or no processes. Open MPI's launcher has files for its ranks in /tmp.
CONTAIN = ("--contain", "--bind", tempfile.gettempdir())
APART = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "^shm", "OMPI_MCA_btl": "self,tcp"}


def run(folder: Path, image: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program on two ranks, each in a container, with the MPI of this environment bound in."""
    found = site_mpi(folder)
    if found is None:
        pytest.skip("MPI is not that of Python's packages")
    mpi, libraries = found
    program = folder / "program.py"
    program.write_text(TRAINS)
    process = subprocess.Popen(
        [*mpirun_command(2, find_mpirun()), "apptainer", "exec", *options, image, "python", program],
        env={
            **launch_environment(), "PYTHONPATH": "", "APPTAINER_BIND": f"{mpi},{libraries},{folder}",
            "APPTAINERENV_LD_LIBRARY_PATH": str(mpi / "lib"),
            "APPTAINERENV_MPI4PY_LIBMPI": str(mpi / "lib" / "libmpi.so"), **environment,
        },
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )
    return finish(process, "program.py", 60)


def told(result: subprocess.CompletedProcess[str]) -> list[list[object]]:
    """What each program of the job has printed, which must have ended well."""
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert "ERROR" not in text
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[[")]


@pytest.mark.parametrize(
    ("options", "variables"), [((), {}), (("--userns",), USERS), (("--ipc",), {})], ids=["", "userns", "ipc"]
)
def test_ranks_share_their_node(
    tmp_path: Path, image: Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    """--ipc keeps other things apart than /dev/shm."""
    found = told(run(tmp_path, image, *options, **variables))
    assert found == [[[[2], -4.5, 1.0], [[2], -4.5, 0.0]]]


@pytest.mark.parametrize("options", [CONTAIN, ("--pid",)], ids=["contain", "pid"])
def test_ranks_that_are_kept_apart(tmp_path: Path, image: Path, options: tuple[str, ...]) -> None:
    found = told(run(tmp_path, image, *options, **APART))
    # Open MPI takes them for ranks of one node, and they find a way to its memory.
    sizes = [2] if is_open_mpi(find_mpirun()) else [1, 1]
    assert found == [[[sizes, -4.5, 1.0], [sizes, -4.5, 0.0]]]


def test_without_the_launchers_variables_each_rank_is_a_program(tmp_path: Path, image: Path) -> None:
    found = told(run(tmp_path, image, "--containall"))
    assert found == [[[[1], -1.5, 0.0]]] * 2


def test_ranks_without_common_memory(tmp_path: Path, image: Path) -> None:
    if is_open_mpi(find_mpirun()):
        # It says that a system call has failed, and sends by the network.
        assert told(run(tmp_path, image, *CONTAIN)) == [[[[2], -4.5, 1.0], [[2], -4.5, 0.0]]]
        return
    result = run(tmp_path, image, *CONTAIN, MPIDIST_WARN_SECONDS="2", MPIDIST_TIMEOUT="5")
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert re.search(r"rank \d of 2 on \S+ has waited \d+ s for all ranks, the job ends", text), text
    assert "This rank runs in a container" in text, text
    assert "set MPIR_CVAR_NOLOCAL=1 UCX_TLS=^shm" in text, text


def test_a_rank_that_has_not_come_is_named(tmp_path: Path, image: Path) -> None:
    """Apptainer has a process of its own between the launcher and each rank."""
    result = run(tmp_path, image, OTHERS_STAY="1", MPIDIST_WARN_SECONDS="2", MPIDIST_TIMEOUT="4")
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert re.search(r"rank 1 \(process \d+\) has not reached mpidist yet: .*program.py", text), text
    assert "cannot be seen from here" not in text, text
