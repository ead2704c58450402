"""The finding of a look at the ranks of this host, and the report of a rank that waits at the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpidist.failures.peers import LISTED
from mpidist.failures.startup.ranks import Starting
from mpidist.failures.waits import may_end_at_start

# The name of this rank's call while MPI itself starts.
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
        late: Lines about the first ranks that have not arrived, or are stopped, and a line about the others.
        is_mixed: Whether one of the ranks runs no Python, and so never arrives.
        first: The process of the first rank that waits, 0 if none was seen.
        unseen: Number of ranks that this rank cannot see.
    """

    made: int
    pause: float
    late: Sequence[str]
    is_mixed: bool
    first: int
    unseen: int


# The finding for a communicator that the program has made: the environment does not show which ranks belong to it.
UNKNOWN = HostFinding(0, 0.0, (), is_mixed=False, first=0, unseen=1)


def find(here: Sequence[Starting], size: int, made: int, pause: float) -> HostFinding:
    """Local. The finding of a look.

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
    """Local. Describe the ranks that have not arrived, or are stopped.

    Args:
        finding: The finding about the ranks of this host.
        size: Number of ranks in the call.
        call: The name of this rank's call.
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
    """Whether this process detects that it runs in a container."""
    return os.getpid() == 1 or any(f"{name}_CONTAINER" in os.environ for name in ("APPTAINER", "SINGULARITY"))


class StartWait(NamedTuple):
    """A wait for the other ranks at the start.

    Attributes:
        size: Number of ranks in the call.
        call: The name of this rank's call.
        is_over: Whether the time limit has passed.
    """

    size: int
    call: str
    is_over: bool


def judge(
    wait: StartWait, look: Callable[[], HostFinding | None], take_turn: Callable[[], None]
) -> tuple[str | None, bool]:
    """Local. Decide whether this rank reports the ranks that have not arrived, and whether it ends.

    Args:
        wait: The wait of this rank.
        look: A function that returns the finding; None if there is none yet.
        take_turn: A function that waits until a rank that is not the first one may report.

    Returns:
        Lines about the other ranks, empty if another rank reports, None if there is no finding yet; and whether this
        rank ends.
    """
    finding, me = look(), os.getpid()
    if finding is None:
        return None, False
    first, ends = finding.first, _ends(wait, finding)
    if ends and (finding.unseen or first not in (0, me)):
        # The first rank reports. It may have done so and ended, unseen by this rank: the launcher then ends this one.
        take_turn()
        finding, first = look() or finding, me
        ends = _ends(wait, finding)
    return describe(finding, wait.size, wait.call) if first in (0, me) else "", ends


def _ends(wait: StartWait, finding: HostFinding) -> bool:
    # While MPI starts, a rank of any program may still arrive.
    return may_end_at_start() and (wait.is_over or (finding.is_mixed and wait.call != STARTING))
