"""The look at the ranks of this host: which of them have reached the library, and which programs the others run.

It reads some files of each process of the host, and about ten more of each rank. One rank looks for all (`looker.py`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpidist import launch
from mpidist.recorder.rank_page import PAGE_BYTES, Page

# The name of the file of a page (`man 2 memfd_create`): a process that has such a file has reached the library.
PAGE_NAME = "mpidist-page"
# Apptainer's own process, which is between the launcher and a rank in a container.
_STARTERS = ("starter", "starter-suid")


class Starting(NamedTuple):
    """A rank of this host.

    Attributes:
        rank: Its rank in the job.
        process: Its process.
        command: Its command line.
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


class _Status(NamedTuple):
    """The name of a process, its state, its parent and its start time (`man 5 proc`)."""

    name: str
    state: str
    parent: int
    started: str


def ranks_here(size: int) -> list[Starting]:
    """Local. The ranks of this job that run on this host, in their order.

    Args:
        size: The number of ranks of the job.
    """
    found: dict[int, Starting] = {}
    all_here: dict[int, _Status] = {}
    for name in os.listdir("/proc"):
        # A process that has ended has no status.
        with contextlib.suppress(OSError):
            if name.isdecimal():
                all_here[int(name)] = _status(int(name))
    launcher = _launcher(os.getppid(), all_here)
    for number, status in all_here.items():
        if status.name in _STARTERS or _launcher(status.parent, all_here) != launcher:
            continue
        folder = Path(f"/proc/{number}")
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            place = launch.read(dict(word.split("=", 1) for word in words if "=" in word))
            if place is None or place.size != size:
                continue
            command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
            has_come = _page_file(number) is not None
            # Read after the other files: a process that ends loses this link first, so then a missing page is no sign.
            program = os.path.basename(os.readlink(folder / "exe"))
        except OSError:
            # The process has ended, or belongs to another user.
            continue
        found[place.rank] = Starting(
            place.rank, number, command, status.state in "Tt", has_come, program.startswith("python")
        )
    return [found[rank] for rank in sorted(found)]


def launcher_here() -> tuple[int, str]:
    """Local. The process that has started this rank and the others of this host, and that process's start time.

    Raises:
        OSError: The process cannot be seen.
    """
    launcher = _launcher(os.getppid(), {})
    return launcher, _status(launcher).started


def page_of(process: int) -> Page | None:
    """Local. The page of another process of this user; None if it has none, or has ended."""
    try:
        path = _page_file(process)
        if path is None:
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # A page that is not complete yet is shorter, which raises ValueError.
            return Page(memoryview(mmap.mmap(descriptor, PAGE_BYTES)))
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None


def _status(number: int) -> _Status:
    before, _, after = Path(f"/proc/{number}/stat").read_text().rpartition(")")
    fields = after.split()
    return _Status(before.partition("(")[2], fields[0], int(fields[1]), fields[19])


def _launcher(parent: int, known: dict[int, _Status]) -> int:
    """The process that has started a rank: its parent, or the parent of Apptainer's process around its container."""
    with contextlib.suppress(OSError):
        while (status := known.get(parent) or _status(parent)).name in _STARTERS:
            parent = status.parent
    return parent


def _page_file(process: int) -> str | None:
    """The file of a process's page, found among its first files, since a page is opened before MPI opens many."""
    return next((file for file, target in _files(f"/proc/{process}/fd") if PAGE_NAME in target), None)


def _files(folder: str) -> Iterator[tuple[str, str]]:
    # Files may be closed meanwhile, as the descriptor of this listing is.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield f"{folder}/{name}", os.readlink(f"{folder}/{name}")
