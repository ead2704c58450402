"""Leaks: communicators, threads, files and node memory that a test leaves to the next one."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from mpidist.comm.group import resource
from tests.helpers.leftovers import mapped_node_memory, open_orders

# One of each for the whole process.
_THREADS_OF_THE_PROCESS = ("mpidist-communication", "mpidist-deaths", "mpidist-watchdog")
# By the names of their classes: tqdm's thread, which has a name of its own in later versions only; and the threads that
# Python has not started, of which it never hears the end: XLA's pool calls back on them.
_OF_OTHERS = ("TMonitor", "_DummyThread")
# A pool that is shut down lets its threads end by themselves.
_ENDING_SECONDS = 2.0
# A collection of garbage takes longer than most tests: node memory is judged once in so many tests, and has leaked if
# it outlives so many collections.
_COLLECTED_EVERY = 25
_COLLECTIONS = 2
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


def held(node_memory: frozenset[str] | None = None) -> Holdings:
    """Local. What this process holds now.

    Args:
        node_memory: That which is mapped, where it is known.
    """
    threads = frozenset(
        one for one in threading.enumerate()
        if one.name not in _THREADS_OF_THE_PROCESS and type(one).__name__ not in _OF_OTHERS
    )
    files = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        # MPI libraries open sockets and files of their own when they like.
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")) and not _is_device(path):
            files.add(f"{number}: {path}")
    if node_memory is None:
        node_memory = frozenset(mapped_node_memory())
    return Holdings(resource.held() - KEPT, threads, frozenset(files), node_memory)


def clear_broken_calls() -> list[str]:
    """Local. A line for each call that was left in the middle. The next test may use its communicator."""
    lines = []
    for order in open_orders():
        if order.broken:
            lines.append(order.broken)
            order.broken = ""
    return lines


class LeakCheck:
    """Looks at what each test leaves behind."""

    def __init__(self) -> None:
        # Pieces of node memory: the test that made each, and how many collections of garbage it has outlived.
        self._suspects: dict[str, tuple[str, int]] = {}
        self._before = held()
        # What was mapped at the end of the last test, and how much.
        self._mapped = self._before.node_memory, _mapped_pages()
        self._tests = self._modules = 0

    def begin(self) -> None:
        """Local. Look before a test."""
        if self._modules != len(sys.modules):
            # What modules hold stays: collections of garbage need not look at it. With PyTorch and JAX each of them
            # took 0.2 s, more than most tests.
            self._modules = len(sys.modules)
            gc.collect()
            gc.freeze()
        # To read the list of mappings takes longer than all the rest, and between two tests little is mapped.
        node_memory, pages = self._mapped
        self._before = held(node_memory if _mapped_pages() == pages else None)

    def end(self, test: str, *, keeps_memory: bool) -> list[str]:
        """Local. Look after a test; returns a line for each thing that it, or an earlier test, has left behind.

        Args:
            test: The name of the test.
            keeps_memory: Whether the test makes node memory for later tests.
        """
        self._tests += 1
        pages = _mapped_pages()
        now = held()
        self._mapped = now.node_memory, pages
        if not keeps_memory:
            for piece in now.node_memory - self._before.node_memory:
                self._suspects[piece] = (test, 0)
        lines = []
        if any(_more(now, self._before)[:-1]):
            gc.collect()
            more = _more(_held_at_end(self._before.threads), self._before)[:-1]
            lines += [f"{kind} {sorted(map(str, one))}" for kind, one in zip(Holdings._fields, more) if one]  # noqa: B905
        if self._suspects and self._tests % _COLLECTED_EVERY == 0:
            lines += self._judge()
        return lines

    def _judge(self) -> list[str]:
        # Strategies refer to themselves, and go with the next collection. Records of the log and exceptions that pytest
        # keeps for a while may hold one longer.
        gc.collect()
        there = held().node_memory
        if any(piece in there and collections >= _COLLECTIONS for piece, (_, collections) in self._suspects.items()):
            # What refers to itself and was still held when modules were frozen is no longer looked at.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            there = held().node_memory
        lines = []
        for piece, (origin, collections) in list(self._suspects.items()):
            if piece in there and collections < _COLLECTIONS:
                self._suspects[piece] = (origin, collections + 1)
                continue
            del self._suspects[piece]
            if piece in there:
                lines.append(f"node_memory {piece!r} by {origin}")
        return lines


def _held_at_end(before: frozenset[threading.Thread]) -> Holdings:
    """What is there when threads have ended, or should have: one look, since a new one may begin between two."""
    end = time.monotonic() + _ENDING_SECONDS
    # Not `join`, which refuses a thread that another one is about to start. New ones count: two signals are heard by
    # two threads, and the second may begin when the first has ended.
    while (now := held()).threads - before and time.monotonic() < end:
        time.sleep(0.01)
    return now


def _mapped_pages() -> int:
    """Of all memory that is mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0])


def _more(now: Holdings, before: Holdings) -> list[frozenset[object]]:
    return [frozenset(one - then) for one, then in zip(now, before, strict=True)]


def _is_device(path: str) -> bool:
    return Path(path).is_char_device()
