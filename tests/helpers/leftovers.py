"""Files of node memory that somebody has left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np

from mpidist.comm.calls.order import CallOrder
from mpidist.failures.interrupts import INTERRUPTS

# Another job on this host may be making node memory right now: its files have a name for milliseconds only, so those
# that keep theirs for so long are left behind.
_SECONDS = 5.0
# As in `mpidist/checkpoint/memory/place.py`, which ranks of tests need not load.
_COPIES = "mpidist-copies-"


def files_left_behind() -> list[Path]:
    """Local. The files of the library that stay in /dev/shm.

    Without copies of checkpoints: those of another test stay as long as its `mpidist run`.
    """
    begin, found = time.monotonic(), _named()
    while found and time.monotonic() - begin < _SECONDS:
        time.sleep(0.05)
        found &= _named()
    return sorted(found)


def _named() -> set[Path]:
    return {path for path in Path("/dev/shm").glob("mpidist-*") if not path.name.startswith(_COPIES)}


def mapped_node_memory() -> set[str]:
    """Local. The pieces of node memory that this process has mapped; MPI libraries have files of other names."""
    return {path for path in _mapped(without=_pages_of_calls()) if _is_node_memory(path)}


def held_node_memory() -> int:
    """Local. How often this process holds node memory: by a mapping, or by a descriptor."""
    descriptors = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(_is_node_memory(path) for path in [*descriptors, *_mapped()])


def _mapped(without: Collection[int] = ()) -> list[str]:
    # Of a thousand lines those of a few are looked at: tests ask twice each.
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    lines = [line for line in lines if int(line.partition("-")[0], 16) not in without]
    return [slash + rest for _, slash, rest in (line.partition("/") for line in lines)]


def open_orders() -> list[CallOrder]:
    """Local. The order of calls of each communicator of this process."""
    return [order for reference in INTERRUPTS.orders if isinstance(order := reference(), CallOrder)]


def _pages_of_calls() -> set[int]:
    """The addresses of the pages of communicators, which go with these."""
    pages = [order.page.memory for order in open_orders() if order.page is not None]
    return {np.frombuffer(page, np.uint8).__array_interface__["data"][0] for page in pages}


def _is_node_memory(path: str) -> bool:
    return path.startswith(("/dev/shm/#", "/dev/shm/mpidist-"))
