"""Batches that are sent to a GPU: copied through pinned memory on a CUDA stream of their own.

A thread reads batches into rooms; a room is pinned memory for one batch. When the program takes a batch, the copy of
the next batch begins, so that it runs while the GPU computes the program's next step. Four things must not happen:

- The program computes with a batch that has not arrived. So the program's stream waits for the copy.
- The thread fills a room again while the GPU still copies from it. So the thread waits for the copy.
- A copy writes to memory that an earlier kernel still reads. So arrays are allocated on the program's stream, and a
  copy begins after all work that this stream was given before.
- Memory is freed while a copy still uses it. So a reader that ends waits for its last copy: CuPy's pools give a room,
  or the memory of a batch that was not taken, to the next caller.
"""

from __future__ import annotations

import importlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist import tree
from mpidist.arrays import AnyArray
from mpidist.comm.gpu.staging_copier import DONE, StagingCopier, Ticket
from mpidist.data.reading.element import ArraySpec
from mpidist.data.reading.prefetch import Prefetcher


@dataclass
class _Room:
    """Pinned memory for one batch, and the last copy that was made from it."""

    memory: AnyArray
    copy: Ticket = DONE


@dataclass(frozen=True)
class _Staged:
    """A batch in host memory.

    The leaves with the numbers in `places` are in the room, one after another; `leaves` has their `ArraySpec`s.
    """

    leaves: list[Any]
    places: list[int]
    spec: Any
    room: _Room


@dataclass(frozen=True)
class _Sent:
    """A batch on the GPU, or being copied there."""

    batch: Any
    copy: Ticket


@dataclass
class _UnderWay:
    """The remains of a reader: batches that were not taken, and the last copy that has begun."""

    ahead: list[_Sent] = field(default_factory=list)
    copy: Ticket = DONE


class DeviceReader(Iterator[Any]):
    """Elements as arrays on the current GPU; the next element is copied while the program uses the last one.

    Local. NumPy arrays and numbers become CuPy arrays. Dtypes that CuPy lacks (texts, dates, bfloat16) stay in host
    memory, and CuPy arrays stay what they are. The arrays belong to the stream that is current at `next`.

    Args:
        elements: The iterator to read; it must not call MPI.
        depth: Number of elements to read ahead in a thread, besides the one being copied; 0 reads and copies in `next`.
        xp: The module `cupy`.
    """

    def __init__(self, elements: Iterator[Any], depth: int, xp: Any) -> None:
        cuda: Any = importlib.import_module("mpidist.comm.gpu.cuda")
        index = cuda.current_device()
        self._xp = xp
        self._copier: StagingCopier = cuda.PinnedCopier(xp.empty(0, np.uint8))
        self._free: deque[_Room] = deque()
        # Neither the thread nor the finalizer may refer to this object: a forgotten reader could never be collected.
        staged = _stage_all(elements, self._copier, self._free, lambda: cuda.use_device(index))
        self._prefetcher = Prefetcher(staged, depth) if depth > 0 else None
        self._take = (staged if self._prefetcher is None else self._prefetcher).__next__
        self._under_way = _UnderWay()
        self._ahead = self._under_way.ahead
        self._finalizer = weakref.finalize(self, _drop, self._under_way, self._copier)
        # Not at exit: CUDA may have shut down by then, and the memory is not used again.
        self._finalizer.atexit = False

    def read(self) -> Any:
        """Local. The next element; raises StopIteration at the end."""
        sent = self._ahead.pop() if self._ahead else self._send(self._take())
        # `end` makes the program's stream wait for all copies begun so far: call it before the next copy begins, or
        # the step would wait for the copy that is meant to run beside it.
        self._copier.end()
        ready = None if self._prefetcher is None else self._prefetcher.take_ready()
        if ready is not None:
            self._ahead.append(self._send(ready))
        return sent.batch

    def __next__(self) -> Any:
        """The next element."""
        return self.read()

    def close(self) -> None:
        """Local. End the thread, if there is one, and wait for the last copy. A second call does nothing."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        _drop(self._under_way, self._copier)

    def _send(self, staged: _Staged) -> _Sent:
        leaves = list(staged.leaves)
        for place in staged.places:
            leaves[place] = self._xp.empty(leaves[place].shape, leaves[place].dtype)
        self._copier.begin()
        targets = [leaves[place].reshape(-1).view(np.uint8) for place in staged.places if leaves[place].size]
        self._under_way.copy = staged.room.copy = self._copier.copy_from_room(staged.room.memory, targets)
        self._free.append(staged.room)
        return _Sent(tree.unflatten(staged.spec, leaves), staged.room.copy)


def is_for_gpu(leaf: Any) -> bool:
    """Local. Whether the leaf is a NumPy array or number of a dtype that CuPy has, too."""
    return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc" and leaf.dtype.char not in "gG"


def _stage_all(
    elements: Iterator[Any], copier: StagingCopier, free: deque[_Room], use_device: Callable[[], object]
) -> Iterator[_Staged]:
    # CUDA's current device is one per thread, and a new thread begins on GPU 0. Pinned memory belongs to the context
    # of a GPU, so the thread must first choose the program's.
    use_device()
    for element in elements:
        yield _stage(element, copier, free)


def _stage(element: Any, copier: StagingCopier, free: deque[_Room]) -> _Staged:
    """Copy the arrays for the GPU into a room, one after another."""
    leaves, spec = tree.flatten(element)
    places = [place for place, leaf in enumerate(leaves) if is_for_gpu(leaf)]
    for place in places:
        array = np.asarray(leaves[place])
        leaves[place] = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    byte_count = sum(leaves[place].nbytes for place in places)
    room = free.popleft() if free else _Room(copier.allocate(max(1, byte_count)))
    copier.wait(room.copy)
    if room.memory.size < byte_count:
        room.memory = copier.allocate(byte_count)
    at = 0
    for place in places:
        array = leaves[place]
        if array.size:
            room.memory[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += array.nbytes
        leaves[place] = ArraySpec(array.shape, array.dtype)
    return _Staged(leaves, places, spec, room)


def _drop(under_way: _UnderWay, copier: StagingCopier) -> None:
    # Wait first: until the copies are done, their rooms and the memory that they write to must not be freed.
    copy, under_way.copy = under_way.copy, DONE
    if copy is not DONE:
        copier.wait(copy)
    under_way.ahead.clear()
