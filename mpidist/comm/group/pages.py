"""The pages of the ranks of a node: what each shows of its calls to the others (`mpidist.recorder.rank_page`)."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist.comm.group.resource import Identity
from mpidist.comm.group.shared_file import Shown, map_to_the_end, open_shared
from mpidist.failures import job_directory
from mpidist.failures.deaths import Process
from mpidist.failures.job_directory import FarPeer
from mpidist.failures.peers import Key, Peer
from mpidist.failures.startup.ranks import PAGE_NAME
from mpidist.failures.watchdog import WATCHDOG
from mpidist.recorder.calls import START, Calls, LoneCalls
from mpidist.recorder.rank_page import PAGE_BYTES, Page
from mpidist.recorder.recorder import RECORDER


class _Own(NamedTuple):
    """The page of this process.

    Attributes:
        page: The page.
        descriptor: The descriptor of its file, open as long as the process lives: the others open the file through it.
        shown: The address of the file for other processes.
        process: The owner of the page: a forked child inherits this object.
    """

    page: Page
    descriptor: int
    shown: Shown
    process: int


@functools.cache
def _own(process: int) -> _Own | None:
    try:
        descriptor = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC)
        # Not on the file system: a page is also there where node memory is full.
        os.ftruncate(descriptor, PAGE_BYTES)
        # Stacks are appended.
        os.lseek(descriptor, 0, os.SEEK_END)
        page = Page(memoryview(mmap.mmap(descriptor, PAGE_BYTES)))
    except OSError:
        return None
    status = os.fstat(descriptor)
    shown = Shown("", f"/proc/{process}/fd/{descriptor}", (status.st_dev, status.st_ino))
    RECORDER.show(page.places)
    return _Own(page, descriptor, shown, process)


def show() -> Shown | None:
    """Local. The address of this process's page for the other ranks; None if it has none."""
    own = _own(os.getpid())
    return None if own is None else own.shown


def begin(process: Process, rank: int, size: int) -> Calls:
    """Local. Watch the start: until the first communicator exists, no rank knows the others.

    Args:
        process: This process.
        rank: This rank.
        size: The number of ranks.

    Returns:
        The calls that open a communicator.
    """
    own = _own(os.getpid())
    if own is None:
        return LoneCalls()
    here = Key(*process)
    WATCHDOG.start(here, f"rank {rank} of {size} on {here.host}", rank, own.page, own.descriptor)
    return RECORDER.open(START, [here] * size, rank)


def look(
    processes: Sequence[Process], rank: int, shown: Mapping[int, Shown], directory: str, job: str
) -> None:
    """Local. See other ranks from now on: those of this host by their pages, others by their files.

    Args:
        processes: The processes of all ranks of a communicator.
        rank: This rank.
        shown: The result of `show` on each rank of this host.
        directory: The directory for the files; empty if there is none.
        job: A name for this group of ranks, the same on all of them.
    """
    here = Key(*processes[rank])
    if _own(os.getpid()) is None:
        return
    peers: list[Peer] = []
    places = [(process.host, process.namespace) for process in processes]
    near = [other for other, place in enumerate(places) if place == places[rank]]

    def name(other: int) -> str:
        return f"rank {other} of {len(processes)} (process {processes[other].number} on {processes[other].host})"

    for other in near:
        key, way = Key(*processes[other]), shown.get(other)
        if not WATCHDOG.knows(key):
            peers.append(Peer(key, name(other), other, _open(way), way.through if way else ""))
    if directory and len(near) < len(processes):
        far = job_directory.ranks_to_see(places, rank)
        # The files of all ranks are in the directory of their first communicator.
        folder = WATCHDOG.open_file(
            job_directory.folder_of(directory, job), sees_all=len(near) + len(far) == len(processes)
        )
        room = max(0, job_directory.MOST_SEEN - sum(peer.is_far for peer in WATCHDOG.peers()))
        for other in far[:room]:
            key = Key(*processes[other])
            if not WATCHDOG.knows(key):
                peers.append(FarPeer(key, name(other), other, folder, here))
    WATCHDOG.meet(peers)


def _open(way: Shown | None) -> Page | None:
    if way is None:
        return None
    try:
        descriptor = open_shared(way, Path())
    except OSError:
        return None
    try:
        return Page(map_to_the_end(descriptor, PAGE_BYTES))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def open_calls(identity: Identity, part: int, processes: Sequence[Process], rank: int) -> Calls:
    """Local. The calls on a communicator, or on a part of it, which its ranks show each other."""
    return RECORDER.open((_digest(repr((identity, part)).encode()) >> 1) | 1, processes, rank)


def _digest(text: bytes) -> int:
    """FNV-1a of 64 bits. `hashlib` loads OpenSSL, which every rank would pay for at its start."""
    value = 0xCBF29CE484222325
    for byte in text:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value
