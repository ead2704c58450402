"""This process's rank, job size and node by the launcher's environment; pure, without MPI.

The truth about ranks and nodes is MPI's. These variables serve what has to be known before MPI starts, or without it:
whether to start MPI at all, which GPU to take, and whether the launcher and the MPI library fit together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launcher:
    """One row of the table: the variables in which a launcher gives a process its rank.

    Attributes:
        name: Its usual name.
        rank: Variable with the rank.
        size: Variables with the number of ranks, the first one that is set counts.
        node_rank: Variable with the rank within the node.
        mark: Another variable that it sets, where the others do not identify it.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    node_rank: str
    mark: str = ""


# Innermost launcher first: under `sbatch` + `mpirun` every rank inherits the batch step's SLURM_PROCID=0, so what
# mpirun itself says comes before what SLURM says. tests/launch_environments.json has what was seen of each.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("Open MPI mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("MVAPICH mpirun", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK"),
    Launcher("PALS mpiexec", "PALS_RANKID", ("PALS_SIZE", "PMI_SIZE"), "PALS_LOCAL_RANKID"),
    Launcher("Flux", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID"),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_LOCAL_RANK"),
    # These speak PMI, an interface. Hydra sets the number within the node, and srun never does; Intel's Hydra and
    # MVAPICH's have a variable more.
    Launcher("Intel MPI mpirun (Hydra)", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "I_MPI_HYDRA_UUID"),
    Launcher("MVAPICH mpirun", "PMI_RANK", ("PMI_SIZE",), "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
    Launcher("MPICH mpirun (Hydra)", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALRANKID"),
    Launcher("srun --mpi=pmi2", "PMI_RANK", ("PMI_SIZE",), "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    Launcher("a launcher over PMI", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    # SLURM_LOCALID is the node rank under srun only: under mpirun it is that of mpirun's daemon.
    Launcher("srun --mpi=pmix", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), "SLURM_LOCALID", "PMIX_RANK"),
    Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), "SLURM_LOCALID"),
)


# The variables in which launchers give the number of ranks of a host.
_NODE_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
# Python refuses to read numbers of some thousand digits.
_MOST_DIGITS = 18
# Names of launchers as processes; the outermost ancestor of these names is the one a person started.
LAUNCHER_PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prun", "orterun", "srun", "jsrun", "flux")
# What starts the ranks of a host for them; as the kernel names processes, in 15 letters.
_DAEMONS = ("prted", "orted", "hydra_pmi_proxy", "slurmstepd", "jsmd", "flux-shell")


@dataclass(frozen=True)
class Launch:
    """This process's rank and job, as its launcher's variables give them.

    Attributes:
        launcher: Name of the launcher.
        rank: Rank of this process in the job.
        size: Number of ranks of the job.
        node_rank: Rank within the node, None where the launcher does not say.
    """

    launcher: str
    rank: int
    size: int
    node_rank: int | None


def read(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Local. Read this process's rank and job from the variables of the innermost launcher.

    Args:
        environment: Defaults to `os.environ`.

    Returns:
        The rank and the job; None where no launcher started this process: it runs alone, and MPI is not started.
    """
    environment = os.environ if environment is None else environment
    for launcher in LAUNCHERS:
        rank = number(environment.get(launcher.rank))
        size = next((n for n in (number(environment.get(name)) for name in launcher.size) if n is not None), None)
        is_marked = not launcher.mark or launcher.mark in environment
        if rank is not None and size is not None and is_marked:
            return Launch(launcher.name, rank, size, number(environment.get(launcher.node_rank)))
    return None


def world_rank() -> int:
    """Local. This process's rank in the whole job, 0 without a launcher; of independent programs rank 0 writes."""
    launch = read()
    return 0 if launch is None else launch.rank


def is_first_rank() -> bool:
    """Local. Whether this process is rank 0 of the whole job; True without a launcher.

    Only the launcher's environment is read: no MPI starts, and no strategy is needed. Programs ask it before they print
    or write a file of their own. Collective calls, `reduce` and saving among them, must never be under this condition:
    the first rank would wait for the others.

    Returns:
        True on exactly one process of the job, which need not be the chief of a strategy on some of its ranks.

    Example:
        >>> if is_first_rank():
        ...     print("printed once, on any number of ranks")
        printed once, on any number of ranks
    """
    return world_rank() == 0


def world_size() -> int:
    """Local. Number of ranks in the whole job, 1 without a launcher."""
    launch = read()
    return 1 if launch is None else launch.size


def node_size() -> int | None:
    """Local. Number of ranks of the job on this host; None where the launcher does not say."""
    return next((count for name in _NODE_SIZES if (count := number(os.environ.get(name)))), None)


def terminal() -> str | None:
    """Local. The terminal on which this process's stderr is shown, None where it is a file or a pipe.

    Behind a launcher a rank cannot ask its own stderr: MPICH gives it a pipe on a terminal, and Open MPI a
    pseudo-terminal in front of a file. What counts is the stderr of the launcher itself, if it runs on this host.
    """
    if read() is None:
        return os.ttyname(2) if os.isatty(2) else None
    try:
        found = [os.readlink(f"/proc/{process}/fd/2") for process in launcher_processes()]
    except OSError:
        return None
    return found[-1] if found and found[-1].startswith(("/dev/pts/", "/dev/tty")) else None


def launcher_processes() -> list[int]:
    """Local. The launchers among the ancestors of this process on this host, the innermost first.

    Raises:
        OSError: An ancestor cannot be seen.
    """
    return [process for process, name in _ancestors() if name in LAUNCHER_PROGRAMS]


def has_lost_launcher() -> bool:
    """Local. Whether no launcher is among the ancestors of this process; False where they cannot be seen."""
    try:
        return not any(name in LAUNCHER_PROGRAMS or name in _DAEMONS for _, name in _ancestors())
    except OSError:
        return False


def _ancestors() -> Iterator[tuple[int, str]]:
    """The processes above this one, and their names, the innermost first."""
    process = os.getppid()
    while process > 1:
        status = Path(f"/proc/{process}/stat").read_text()
        name, rest = status[status.index("(") + 1 :].rsplit(") ", 1)
        yield process, name
        process = int(rest.split()[1])


def hydra_lets_live() -> bool | None:
    """Local. Whether MPICH's launcher has the option by which ranks survive a death; None if it cannot be found."""
    try:
        launchers = launcher_processes()
        words = Path(f"/proc/{launchers[0]}/cmdline").read_text().split("\0") if launchers else None
    except OSError:
        return None
    return None if words is None else any(word.lstrip("-") == "disable-auto-cleanup" for word in words)


def is_under_hydra() -> bool:
    """Local. Whether MPICH's launcher has started this process itself."""
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().startswith("hydra")
    except OSError:
        return False


def is_multiprocessing_child() -> bool:
    """Local. Whether `multiprocessing` started this process: such a child must never start MPI.

    A spawn or forkserver child that initialises MPI kills the job (MPICH) or segfaults its parent (Open MPI).
    """
    # Such a child has loaded it. To load it here would cost every other program 5 ms.
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def lost_connection() -> str:
    """Local. The connection to the launcher that this process should have inherited and has not; empty if all is well.

    A process that a rank starts inherits the environment, but not the open files. MPI would end it without a reason.
    """
    descriptor = number(os.environ.get("PMI_FD"))
    if descriptor is None or Path(f"/proc/self/fd/{descriptor}").exists() or not Path("/proc/self/fd").exists():
        return ""
    return f"PMI_FD={descriptor}"


def number(text: str | None) -> int | None:
    """Local. The number that is the text of a variable; None where it is none, or longer than any count."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def program() -> list[str]:
    """Local. The words that start this program alone: `python train.py`."""
    script = sys.argv[0] if sys.argv else ""
    name = script if script.endswith(".py") and not Path(script).is_absolute() else Path(script).name
    return ["python", name if name.endswith(".py") else "script.py"]


def mpirun_line(ranks: int) -> str:
    """Local. The command that starts this program on a number of ranks: `mpirun -n 4 python train.py`."""
    return " ".join(["mpirun", "-n", str(ranks), *program()])
