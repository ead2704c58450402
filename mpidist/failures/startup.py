"""The start of a job: which ranks of this host have come to the library, and what the others run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpidist import launch

# The name of the file of a page (`man 2 memfd_create`): a process that has one has come to the library.
PAGE_NAME = "mpidist-page"
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
# Apptainer's own process, which is between the launcher and a rank in a container.
_STARTERS = ("starter", "starter-suid")


class Starting(NamedTuple):
    """A rank of this host.

    Attributes:
        rank: Its rank in the job.
        process: Its process.
        command: What it runs.
        is_stopped: Whether a signal has stopped it.
        has_come: Whether it has opened its page.
        is_python: Whether it runs Python.
    """

    rank: int
    process: int
    command: str
    is_stopped: bool
    has_come: bool
    is_python: bool


def ranks_here(size: int) -> list[Starting]:
    """Local. The ranks of this job that run on this host, in their order.

    Args:
        size: The number of ranks of the job.
    """
    found: dict[int, Starting] = {}
    launcher = _launcher(os.getppid())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, state, parent = _status(folder)
            if name in _STARTERS or _launcher(parent) != launcher:
                continue
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            place = launch.read(dict(word.split("=", 1) for word in words if "=" in word))
            if place is None or place.size != size:
                continue
            command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
            has_come = any(PAGE_NAME in file for file in _files(folder / "fd"))
            # After its files: a process that ends loses this one first, and a page that is gone means nothing then.
            program = os.path.basename(os.readlink(folder / "exe"))
        except OSError:
            # It has ended, or is another user's.
            continue
        found[place.rank] = Starting(
            place.rank, int(folder.name), command, state in "Tt", has_come, program.startswith("python")
        )
    return [found[rank] for rank in sorted(found)]


def _status(folder: Path) -> tuple[str, str, int]:
    """The name of a process, its state and its parent."""
    before, _, after = (folder / "stat").read_text().rpartition(")")
    state, parent = after.split()[:2]
    return before.partition("(")[2], state, int(parent)


def _launcher(parent: int) -> int:
    """The process that has started a rank: its parent, or that of Apptainer's process around its container."""
    with contextlib.suppress(OSError):
        while (status := _status(Path(f"/proc/{parent}")))[0] in _STARTERS:
            parent = status[2]
    return parent


def _is_in_container() -> bool:
    """Whether this process can tell that it runs in a container."""
    return os.getpid() == 1 or any(f"{name}_CONTAINER" in os.environ for name in ("APPTAINER", "SINGULARITY"))


def _files(folder: Path) -> list[str]:
    files = []
    # Files come and go, that of this listing among them.
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):
                files.append(os.readlink(link))
    return files


def describe(size: int, call: str) -> tuple[str, bool, int, int]:
    """Local. Describe the ranks that have not come, or are stopped.

    Args:
        size: The number of ranks that are waited for.
        call: What this rank is in. Any program may come to `STARTING` at last.

    Returns:
        Lines about them, whether one of them never can come, the first process that waits, and how many ranks cannot be
        seen from here.
    """
    place = launch.read()
    if place is None or place.size != size:
        return "all ranks of the communicator that was passed must open it, too", False, 0, size - 1
    here = ranks_here(size)
    lines = [
        f"rank {one.rank} (process {one.process}) {_what_it_does(one)}: {one.command[:200]}"
        for one in here if one.is_stopped or not one.has_come
    ]
    elsewhere = size - len(here)
    if elsewhere:
        lines.append(
            f"{elsewhere} of {size} ranks cannot be seen from here: they are on other hosts or in containers, have not "
            "been started, or have ended"
        )
    never = call != STARTING and any(not one.is_python for one in here)
    first = next((one.process for one in here if one.has_come and not one.is_stopped), 0)
    advice = [_STARTING_ADVICE if call == STARTING else _ADVICE] if lines else []
    if call == STARTING and _is_in_container() and all(one.has_come and not one.is_stopped for one in here):
        advice = [_CONTAINER_ADVICE]
    return "\n".join([*(lines or ["all ranks have arrived"]), *advice]), never, first, elsewhere


def may_end() -> bool:
    """Local. Whether a rank that waits at the start may end: nothing else could end the job there."""
    return os.environ.get("MPIDIST_ABORT") != "0"


def judge(size: int, call: str, process: int, wait: Callable[[], None], *, is_over: bool) -> tuple[str, bool]:
    """Local. Decide whether this rank reports those that have not come, and whether it ends.

    Args:
        size: The number of ranks that are waited for.
        call: What this rank is in.
        process: This process.
        wait: Waits until a rank that is not the first one may speak.
        is_over: Whether the time is over.

    Returns:
        Lines about the others, empty where another rank speaks; whether this rank ends.
    """
    lines, never, first, unseen = describe(size, call)
    if may_end() and (never or is_over) and (unseen or first not in (0, process)):
        # The first one speaks. It may have done so, ended, and be unseen: the launcher ends this rank soon, too.
        wait()
        lines, never, _, _ = describe(size, call)
        first = process
    return lines if first in (0, process) else "", may_end() and (never or is_over)


def _what_it_does(one: Starting) -> str:
    if one.is_stopped:
        return f"is stopped, `kill -CONT {one.process}` resumes it"
    return "has not reached mpidist yet" if one.is_python else "runs another program"
