"""Leaks: communicators, threads, files and node memory that a test leaves to the next one."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import NamedTuple

from mpidist.comm import resource
from tests.leftovers import mapped_node_memory

# One of each for the whole process.
_THREADS_OF_THE_PROCESS = ("mpidist-communication", "mpidist-deaths")
# Node memory has leaked if it is still there so many tests later.
_TESTS_LATER = 3
# Communicators that tests keep for later tests: their identities.
KEPT: set[resource.Identity] = set()


class Holdings(NamedTuple):
    """What this process holds.

    Attributes:
        claims: To communicators and windows, of MPI and NCCL.
        threads: Those that live.
        files: Paths of open files.
        node_memory: Pieces that are mapped.
    """

    claims: frozenset[resource.Identity]
    threads: frozenset[threading.Thread]
    files: frozenset[str]
    node_memory: frozenset[str]


def held() -> Holdings:
    """Local. What this process holds now."""
    threads = frozenset(one for one in threading.enumerate() if one.name not in _THREADS_OF_THE_PROCESS)
    files = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        # MPI libraries open sockets and files of their own when they like.
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")) and not _is_device(path):
            files.add(f"{number}: {path}")
    return Holdings(resource.held() - KEPT, threads, frozenset(files), frozenset(mapped_node_memory()))


class LeakCheck:
    """Looks at what each test leaves behind."""

    def __init__(self) -> None:
        self._suspects: dict[str, tuple[str, int]] = {}
        self._before = held()

    def begin(self) -> None:
        """Local. Look before a test."""
        self._before = held()

    def end(self, test: str) -> list[str]:
        """Local. Look after a test; returns a line for each thing that it, or an earlier test, has left behind.

        Args:
            test: The name of the test.
        """
        if not self._suspects and not any(_more(held(), self._before)):
            return []
        gc.collect()
        now = held()
        lines = [
            f"{kind} {sorted(map(str, more))} of this test"
            for kind, more in zip(Holdings._fields, _more(now, self._before), strict=True)
            if more and kind != "node_memory"
        ]
        # Records of the log and exceptions that pytest keeps for a while may hold a strategy, and so its memory.
        for piece in now.node_memory - self._before.node_memory:
            self._suspects[piece] = (test, 0)
        for piece, (origin, age) in list(self._suspects.items()):
            if piece not in now.node_memory:
                del self._suspects[piece]
            elif age == _TESTS_LATER:
                lines.append(f"node_memory {piece!r} of {origin}")
                del self._suspects[piece]
            else:
                self._suspects[piece] = (origin, age + 1)
        return lines


def _more(now: Holdings, before: Holdings) -> list[frozenset[object]]:
    return [frozenset(one - then) for one, then in zip(now, before, strict=True)]


def _is_device(path: str) -> bool:
    return Path(path).is_char_device()
