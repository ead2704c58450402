"""Batches on their way to a GPU: through pinned memory, and on a stream of their own while the program computes.

A thread reads batches into rooms of pinned memory. When the program takes a batch, the copy of the next one begins, so
that it runs beside the step that the program starts then. Four things must not happen:

- The program computes with a batch that is not there yet: its stream waits for the copy.
- A room is filled again while it is copied from: the reader waits for the copy.
- A copy writes to memory that a kernel still reads: arrays are made on the program's stream, and a copy begins after
  what that stream was given before.
- Memory is given up while a copy writes to it: a batch that nobody took is waited for before it is dropped.

Untested on a GPU.
"""

from __future__ import annotations

import importlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import tree
from mpidist.arrays import AnyArray
from mpidist.comm.gpu.staging_copier import DONE, StagingCopier, Ticket
from mpidist.data.reading.element import ArraySpec
from mpidist.data.reading.prefetch import Prefetcher


@dataclass
class _Room:
    """Pinned memory of one batch, and the copy that was last made from it."""

    memory: AnyArray
    copy: Ticket = DONE


@dataclass(frozen=True)
class _Staged:
    """A batch in host memory; the leaves at `places` are in the room, one after another, and here as `ArraySpec`s."""

    leaves: list[Any]
    places: list[int]
    spec: Any
    room: _Room


@dataclass(frozen=True)
class _Sent:
    """A batch on the GPU, or on its way there."""

    batch: Any
    copy: Ticket


class DeviceReader(Iterator[Any]):
    """Elements as arrays on the current GPU, the next one on its way while one is used.

    Local. Numbers become CuPy arrays; what CuPy has no dtype for (texts, dates, bfloat16) stays in host memory, and
    CuPy's arrays stay what they are. They belong to the stream that is current at `next`.

    Args:
        elements: Reads them; must not call MPI.
        depth: How many to read ahead in a thread, beside the one on its way; 0 reads, and copies, in `next`.
        xp: CuPy.
    """

    def __init__(self, elements: Iterator[Any], depth: int, xp: Any) -> None:
        cuda: Any = importlib.import_module("mpidist.comm.gpu.cuda")
        index = cuda.current_device()
        self._xp = xp
        self._carrier: StagingCopier = cuda.PinnedCopier(xp.empty(0, np.uint8))
        self._free: deque[_Room] = deque()
        # Neither the thread nor the finalizer knows this object, so that a forgotten one is collected.
        staged = _stage_all(elements, self._carrier, self._free, lambda: cuda.use_device(index))
        self._prefetcher = Prefetcher(staged, depth) if depth > 0 else None
        self._take = (staged if self._prefetcher is None else self._prefetcher).__next__
        self._ahead: list[_Sent] = []
        self._finalizer = weakref.finalize(self, _drop, self._ahead, self._carrier)
        # At exit nobody uses the memory again.
        self._finalizer.atexit = False

    def read(self) -> Any:
        """Local. The next element; raises StopIteration at the end."""
        sent = self._ahead.pop() if self._ahead else self._send(self._take())
        # The stream waits for all that was begun, so before the next copy begins.
        self._carrier.end()
        ready = None if self._prefetcher is None else self._prefetcher.take_ready()
        if ready is not None:
            self._ahead.append(self._send(ready))
        return sent.batch

    def __next__(self) -> Any:
        """The next element."""
        return self.read()

    def close(self) -> None:
        """Local. End the thread, if there is one. Safe twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        _drop(self._ahead, self._carrier)

    def _send(self, staged: _Staged) -> _Sent:
        leaves = list(staged.leaves)
        for place in staged.places:
            leaves[place] = self._xp.empty(leaves[place].shape, leaves[place].dtype)
        self._carrier.begin()
        targets = [leaves[place].reshape(-1).view(np.uint8) for place in staged.places if leaves[place].size]
        staged.room.copy = self._carrier.copy_from_room(staged.room.memory, targets)
        self._free.append(staged.room)
        return _Sent(tree.unflatten(staged.spec, leaves), staged.room.copy)


def goes(leaf: Any) -> bool:
    """Local. Whether this is an array, or a number, of NumPy's, and CuPy has arrays of its dtype."""
    return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc" and leaf.dtype.char not in "gG"


def _stage_all(
    elements: Iterator[Any], carrier: StagingCopier, free: deque[_Room], use_device: Callable[[], object]
) -> Iterator[_Staged]:
    # A thread begins on GPU 0, whichever the program uses, and pinned memory belongs to a GPU's context.
    use_device()
    for element in elements:
        yield _stage(element, carrier, free)


def _stage(element: Any, carrier: StagingCopier, free: deque[_Room]) -> _Staged:
    """Copy what goes to the GPU into a room, one array after another."""
    leaves, spec = tree.flatten(element)
    places = [place for place, leaf in enumerate(leaves) if goes(leaf)]
    for place in places:
        array = np.asarray(leaves[place])
        leaves[place] = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    byte_count = sum(leaves[place].nbytes for place in places)
    room = free.popleft() if free else _Room(carrier.allocate(max(1, byte_count)))
    carrier.wait(room.copy)
    if room.memory.size < byte_count:
        room.memory = carrier.allocate(byte_count)
    at = 0
    for place in places:
        array = leaves[place]
        if array.size:
            room.memory[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += array.nbytes
        leaves[place] = ArraySpec(array.shape, array.dtype)
    return _Staged(leaves, places, spec, room)


def _drop(ahead: list[_Sent], carrier: StagingCopier) -> None:
    while ahead:
        # Until then the list holds the memory.
        carrier.wait(ahead[-1].copy)
        ahead.pop()
