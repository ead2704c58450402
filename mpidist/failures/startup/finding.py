"""The finding of a look at the ranks of this host, and what a rank that waits at the start says and does then."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpidist.failures.peers import LISTED
from mpidist.failures.startup.ranks import Starting
from mpidist.failures.waits import may_end_at_start

# What this rank is in while MPI itself starts.
STARTING = "starting MPI"
_ADVICE = (
    "mpidist works on all ranks of the job by default. In a job of several programs each program passes the "
    "communicator of its own ranks, `MultiWorkerMirroredStrategy(communicator=MPI.COMM_WORLD.Split(color))`, with "
    "mpi4py's MPI; the other programs call MPI_Comm_split, too"
)
_STARTING_ADVICE = "MPI starts when every rank of the job has reached this point"
_CONTAINER_ADVICE = (
    "This rank runs in a container: where the ranks of a host do not share /dev/shm, MPICH hangs here. Give "
    "the containers one /dev/shm and one PID namespace (Apptainer without --contain and --pid, docker run --ipc=host "
    "--pid=host), or set MPIR_CVAR_NOLOCAL=1 UCX_TLS=^shm"
)


class HostFinding(NamedTuple):
    """A finding about the ranks of this host.

    Attributes:
        made: The time of the look, in nanoseconds.
        pause: The seconds from one look to the next one.
        late: A line for each of the first ones that have not come, or are stopped, and one for the others.
        is_mixed: Whether one of the ranks runs no Python. It never comes.
        first: The first process that waits, 0 if none was seen.
        unseen: The number of ranks that cannot be seen from here.
    """

    made: int
    pause: float
    late: Sequence[str]
    is_mixed: bool
    first: int
    unseen: int


# Of a communicator of the program's, whose ranks nobody can tell by their environment.
UNKNOWN = HostFinding(0, 0.0, (), is_mixed=False, first=0, unseen=1)


def find(here: Sequence[Starting], size: int, made: int, pause: float) -> HostFinding:
    """Local. Note what counts of a look.

    Args:
        here: The ranks of this host.
        size: The number of ranks of the job.
        made: See `HostFinding`.
        pause: See `HostFinding`.
    """
    late = [one for one in here if one.is_stopped or not one.has_come]
    lines = [
        f"rank {one.rank} (process {one.process}) {_what_it_does(one)}: {one.command[:200]}" for one in late[:LISTED]
    ]
    if len(late) > LISTED:
        lines.append(f"and {len(late) - LISTED} more ranks of this host")
    first = next((one.process for one in here if one.has_come and not one.is_stopped), 0)
    return HostFinding(made, pause, lines, any(not one.is_python for one in here), first, size - len(here))


def _what_it_does(one: Starting) -> str:
    if one.is_stopped:
        return f"is stopped, `kill -CONT {one.process}` resumes it"
    return "has not reached mpidist yet" if one.is_python else "runs another program"


def describe(finding: HostFinding, size: int, call: str) -> str:
    """Local. Describe the ranks that have not come, or are stopped.

    Args:
        finding: The finding about them.
        size: The number of ranks that are waited for.
        call: What this rank is in.
    """
    if finding is UNKNOWN:
        return "all ranks of the communicator that was passed must open it, too"
    lines = list(finding.late)
    if finding.unseen:
        lines.append(
            f"{finding.unseen} of {size} ranks cannot be seen from here: they are on other hosts or in containers, "
            "have not been started, or have ended"
        )
    advice = [_STARTING_ADVICE if call == STARTING else _ADVICE] if lines else []
    if call == STARTING and _is_in_container() and not finding.late:
        advice = [_CONTAINER_ADVICE]
    return "\n".join([*(lines or ["all ranks have arrived"]), *advice])


def _is_in_container() -> bool:
    """Whether this process can tell that it runs in a container."""
    return os.getpid() == 1 or any(f"{name}_CONTAINER" in os.environ for name in ("APPTAINER", "SINGULARITY"))


class StartWait(NamedTuple):
    """A wait for the other ranks at the start.

    Attributes:
        size: The number of ranks that are waited for.
        call: What this rank is in.
        is_over: Whether the time is over.
    """

    size: int
    call: str
    is_over: bool


def judge(
    wait: StartWait, look: Callable[[], HostFinding | None], take_turn: Callable[[], None]
) -> tuple[str | None, bool]:
    """Local. Decide whether this rank reports those that have not come, and whether it ends.

    Args:
        wait: What it waits for.
        look: Gives what is found; None where that is not known yet.
        take_turn: Waits until a rank that is not the first one may speak.

    Returns:
        Lines about the others, empty where another rank speaks, None where that is not known yet; whether this rank
        ends.
    """
    finding, me = look(), os.getpid()
    if finding is None:
        return None, False
    first, ends = finding.first, _ends(wait, finding)
    if ends and (finding.unseen or first not in (0, me)):
        # The first one speaks. It may have done so, ended, and be unseen: the launcher ends this rank soon, too.
        take_turn()
        finding, first = look() or finding, me
        ends = _ends(wait, finding)
    return describe(finding, wait.size, wait.call) if first in (0, me) else "", ends


def _ends(wait: StartWait, finding: HostFinding) -> bool:
    # Any program may come to the start of MPI at last.
    return may_end_at_start() and (wait.is_over or (finding.is_mixed and wait.call != STARTING))
