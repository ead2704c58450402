"""The warning that tasks of a Slurm job are idle: no command has started them."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpidist import launch
from mpidist.comm.first_use import at_first_use

if TYPE_CHECKING:
    from mpidist.cluster.slurm.step import is_own_step, parse_counts
else:
    # Every strategy loads this module, most of them where there is no Slurm.
    is_own_step = at_first_use("mpidist.cluster.slurm.step", "is_own_step")
    parse_counts = at_first_use("mpidist.cluster.slurm.step", "parse_counts")

_logger = logging.getLogger(__name__)


def idle_tasks_warning(environment: Mapping[str, str] | None = None) -> str | None:
    """Local. The warning for a job with tasks that were not started; else None.

    A process may run alone, in the script of `sbatch`, the shell of `salloc`, or a notebook there: `--ntasks=4` starts
    none. Or `srun -n 2` has started fewer on each node than `--ntasks-per-node` says; the first of them gets the text.

    Args:
        environment: Defaults to `os.environ`.
    """
    environment = os.environ if environment is None else environment
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return None
    if is_own_step(environment):
        return _small_step_warning(environment, job)
    counts = [launch.number(environment.get(name)) or 1 for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
    if launch.read(environment) is not None or max(counts) == 1:
        return None
    what = f"{counts[0]} tasks" if counts[0] > 1 else f"{counts[1]} nodes"
    return (
        f"Slurm job {job} has {what}, and this process runs alone: one rank is one replica, and only srun or mpirun "
        "starts several. Write srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH) in front of it"
    )


def _small_step_warning(environment: Mapping[str, str], job: str) -> str | None:
    wanted = launch.number(environment.get("SLURM_NTASKS_PER_NODE"))
    # Components of a heterogeneous job have numbers of their own, and the variable is that of one of them.
    if wanted is None or environment["SLURM_PROCID"] != "0" or environment.get("SLURM_HET_SIZE", "1") != "1":
        return None
    try:
        counts = parse_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except ValueError:
        # The reader of the step reports that.
        return None
    # Beside --ntasks the number is an upper limit, which some node reaches.
    if max(counts) >= wanted:
        return None
    return (
        f"Slurm job {job} has --ntasks-per-node={wanted}, and srun has started {sum(counts)} task(s) on {len(counts)} "
        f"node(s), at most {max(counts)} on each: the other tasks are not ranks. Leave out -n behind srun, or, if that "
        f"is meant, give --ntasks-per-node={max(counts)} to srun, too"
    )


@functools.cache
def warn_about_idle_tasks() -> None:
    """Local. Warn once of tasks of the job that were not started."""
    text = idle_tasks_warning()
    if text is not None:
        _logger.warning("%s", text)
