"""Mistakes in jobs of Slurm, which would train nothing or the wrong thing, or hang: each says what to write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.private_slurm import PrivateSlurm

pytestmark = pytest.mark.timeout_seconds(180)

PROGRAM = """
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
print(f"trains on {strategy.num_replicas_in_sync} replica(s)", flush=True)
"""
RESOLVER = """
import mpidist
from mpidist.errors import LauncherError
try:
    mpidist.cluster_resolver.SlurmClusterResolver()
except LauncherError as error:
    print("refused:", error, flush=True)
"""
DEATH = """
import os
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
if strategy.communicator.rank == 1:
    os._exit(3)
strategy.reduce("SUM", 1.0, axis=None)
print("goes on alone", flush=True)
"""
# Each command's output stands below its name; `wrong` is the other MPI's kind.
JOB = """
tell() { echo "=== $1"; shift; "$@" 2>&1; echo "ends with $?"; }
tell none srun --mpi=none python program.py
tell wrong srun --mpi=$WRONG python program.py
tell right srun --mpi=$MPI python program.py
tell resolver mpirun python resolver.py
tell death srun --mpi=$MPI --kill-on-bad-exit=1 python death.py
tell default env SLURM_MPI_TYPE=pmix mpirun python program.py
"""


def test_what_is_wrong_is_said_and_ends_the_job(slurm: PrivateSlurm, tmp_path: Path) -> None:
    for name, text in (("program", PROGRAM), ("resolver", RESOLVER), ("death", DEATH)):
        (tmp_path / f"{name}.py").write_text(text)
    wrong = {"pmix": "pmi2", "pmi2": "pmix"}[slurm.mpi]
    options = ["--nodes=2", "--ntasks=3"]
    job = slurm.wait(slurm.submit_command(JOB, folder=tmp_path, options=options, WRONG=wrong))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    found = re.findall(r"=== (\w+)\n(.*?)ends with (\d+)\n", job.output, re.DOTALL)
    texts = {name: text for name, text, _ in found}
    codes = {name: int(code) for name, _, code in found}
    for name in ("none", "wrong"):
        # Never a training of its own on each rank.
        assert "trains on" not in texts[name], texts[name]
        assert "launcher and MPI library do not match: srun" in texts[name], texts[name]
        assert f"{slurm.mpi} for " in texts[name] or f"--mpi={slurm.mpi}" in texts[name], texts[name]
        assert codes[name], texts[name]
        assert "Abort(" not in texts[name], texts[name]
    assert (codes["right"], texts["right"].count("trains on 3 replica(s)")) == (0, 3), texts["right"]
    assert texts["resolver"].count("refused:") == 3, texts["resolver"]
    assert "MPIClusterResolver()" in texts["resolver"], texts["resolver"]
    assert codes["death"], texts["death"]
    assert "goes on alone" not in texts["death"], texts["death"]
    if slurm.mpi == "pmix":
        assert (codes["default"], texts["default"].count("trains on 3 replica(s)")) == (0, 3), texts["default"]
    else:
        assert codes["default"], texts["default"]
        assert "export SLURM_MPI_TYPE=none" in texts["default"], texts["default"]
        assert "Abort(" not in texts["default"], texts["default"]
