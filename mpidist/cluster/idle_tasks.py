"""The warning that a process runs alone in a Slurm job of several tasks; small, since every strategy loads it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

from mpidist import launch

_logger = logging.getLogger(__name__)


def idle_tasks_warning(environment: Mapping[str, str] | None = None) -> str | None:
    """Local. The warning for a process that runs alone in a job of several tasks, which nobody has started; else None.

    It is one in the script of `sbatch`, the shell of `salloc`, or a notebook there: `--ntasks=4` starts none.

    Args:
        environment: Defaults to `os.environ`.
    """
    environment = os.environ if environment is None else environment
    job = environment.get("SLURM_JOB_ID", "")
    counts = [launch.number(environment.get(name)) or 1 for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
    if not job or launch.read(environment) is not None or max(counts) == 1:
        return None
    what = f"{counts[0]} tasks" if counts[0] > 1 else f"{counts[1]} nodes"
    return (
        f"Slurm job {job} has {what}, and this process runs alone: one rank is one replica, and only srun or mpirun "
        "starts several. Write srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH) in front of it"
    )


@functools.cache
def warn_about_idle_tasks() -> None:
    """Local. Warn once that this process runs alone in a job of several tasks."""
    text = idle_tasks_warning()
    if text is not None:
        _logger.warning("%s", text)
