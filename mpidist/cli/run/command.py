"""The command `mpidist run`: what it starts, where, and whether it may."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from mpidist import launch
from mpidist.cli.run.hosts import Crew
from mpidist.cli.run.rules import RestartRules
from mpidist.cli.run.supervise import Supervision
from mpidist.cli.slurm.sbatch import MPI_KINDS
from mpidist.cluster.launch_line import Starter, count_cores, find_starter
from mpidist.cluster.slurm.host_list import expand
from mpidist.errors import LauncherError, UnavailableError

# Slurm gives the steps of scripts, and of interactive shells, the numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def gather(names: Sequence[str], ranks: int | None, per_host: int | None, kind: str) -> Crew:
    """Local. The hosts and ranks of a job.

    Args:
        names: The hosts; empty: this one, or those of the Slurm job.
        ranks: The number of ranks; None: one for each core, or Slurm's.
        per_host: The largest number of ranks of a host.
        kind: The kind for `srun --mpi`; empty: that of the MPI at hand.

    Raises:
        LauncherError: This process is a rank itself, or there is no launcher.
        UnavailableError: It is not known how srun starts this MPI.
        ValueError: There are more ranks than the hosts have room for.
    """
    _require_no_launcher()
    starter = _srun() if kind and "SLURM_JOB_ID" in os.environ else find_starter()
    if starter.in_slurm:
        kind = kind or MPI_KINDS.get(starter.library, "")
        if not kind:
            raise UnavailableError(
                f"mpidist does not know which kind of `srun --mpi` starts {starter.library!r}. Name the kind: "
                "--mpi=pmix, or another one that `srun --mpi=list` prints"
            )
        given = launch.number(os.environ.get("SLURM_NTASKS"))
        names = names or expand(os.environ.get("SLURM_JOB_NODELIST", ""))
        crew = Crew(starter, tuple(names), ranks or given, per_host, kind)
    else:
        names = [name for name in names if len(names) > 1 or name not in ("localhost", os.uname().nodename)]
        if ranks is None:
            ranks = len(names) * (per_host or 1) if names else count_cores()
        crew = Crew(starter, tuple(names), ranks, per_host)
    if per_host and crew.names and crew.ranks is not None and crew.ranks > per_host * len(crew.names):
        raise ValueError(
            f"expected at most {per_host * len(crew.names)} ranks, {per_host} on each of {len(crew.names)} hosts, got "
            f"{crew.ranks}. Name more hosts"
        )
    return crew


def _srun() -> Starter:
    return Starter("", "srun", in_slurm=True)


def _require_no_launcher() -> None:
    step = launch.number(os.environ.get("SLURM_STEP_ID"))
    place = launch.read()
    if place is not None and not (place.launcher == "srun" and step is not None and step >= _FIRST_SPECIAL_STEP):
        raise LauncherError(
            f"`mpidist run` starts the launcher itself, and was started by {place.launcher} as rank {place.rank} of "
            f"{place.size}. Leave that launcher out, and pass the number of ranks: mpidist run -n {place.size} train.py"
        )
    if step is not None and step < _FIRST_SPECIAL_STEP:
        raise LauncherError(
            "`mpidist run` starts srun itself, and is a step of srun here. Start it by the job script, without srun"
        )


def run(
    crew: Crew, words: Sequence[str], max_restarts: int, restart_errors: bool, min_ranks: int | None
) -> int:
    """Local. Run a program to its end.

    Args:
        crew: Its hosts and ranks.
        words: Its words.
        max_restarts: The number of restarts in all.
        restart_errors: Whether an exception of the program is followed by a restart.
        min_ranks: The number of ranks with which it may continue after a host was lost; None: all.

    Returns:
        The exit code.

    Raises:
        LauncherError, UnavailableError: See `Supervision.run`.
        FileNotFoundError: There is no such program on this host, where all ranks are.
        OSError: The launcher cannot be started.
    """
    # A launcher would end as after a death, and be started again.
    if not crew.names and shutil.which(words[0]) is None:
        raise FileNotFoundError(
            f"expected a program, got {words[0]!r}, which is no file that can be executed, nor a command in PATH. Pass "
            "a script of Python (train.py), or the words of a command line"
        )
    return Supervision(crew, words, RestartRules(max_restarts, restart_errors), min_ranks).run()
