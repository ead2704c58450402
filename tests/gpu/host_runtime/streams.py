"""Streams, events and memory of simulated GPUs: every stream is lazy, so its work runs as late as CUDA may run it.

Whoever forgets to wait sees what was in memory before. Streams and events belong to a GPU, and may be used only while
it is current, as CUDA demands. In `memory.kept_closed()` the memory of GPUs is closed to the host except while
work of a stream runs: whoever touches it, as MPI would that is not CUDA-aware, ends with a segmentation fault.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COUNT = int(os.environ.get("MPIDIST_TEST_GPUS", "4"))
LOCK = threading.RLock()
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Thread(threading.local):
    """CUDA's current GPU is one per thread, and a new thread begins on number 0."""

    device = 0


thread = _Thread()


class Stream:
    """Work that was given and has not run yet."""

    def __init__(self, handle: int, *, is_blocking: bool) -> None:
        self.handle = handle
        self.device = thread.device
        self.is_blocking = is_blocking
        self.waiting: deque[Callable[[], object]] = deque()
        self.given = 0

    def add(self, work: Callable[[], object]) -> None:
        """Give work."""
        with LOCK:
            self.given += 1
            self.waiting.append(work)

    def run(self, until: int | None = None) -> None:
        """Do the work that was given first, up to a number."""
        with LOCK, opened_memory(), _without_collector():
            until = self.given if until is None else until
            while self.waiting and self.given - len(self.waiting) < until:
                self.waiting.popleft()()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep finalizers out, which wait for copies: within a work they would do later work before this one is done."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_handles = iter(range(1000, 1 << 60, 8))
streams: dict[int, Stream] = {}
_null: dict[int, Stream] = {}
_events: dict[int, tuple[int, Stream | None, int]] = {}


def new_handle() -> int:
    """Return an address that nothing else has."""
    with LOCK:
        return next(_handles)


def new_stream(*, is_blocking: bool) -> int:
    """Make a stream on the current GPU."""
    handle = new_handle()
    streams[handle] = Stream(handle, is_blocking=is_blocking)
    return handle


def stream_of(handle: int) -> Stream:
    """Return a stream of the current GPU by its address."""
    if handle == 0:
        with LOCK:
            if thread.device not in _null:
                _null[thread.device] = Stream(0, is_blocking=True)
            return _null[thread.device]
    stream = streams[handle]
    if stream.device != thread.device:
        raise RuntimeError(f"a stream of GPU {stream.device} is used while GPU {thread.device} is current")
    return stream


def enqueue(handle: int, work: Callable[[], object]) -> None:
    """Give work to a stream. The null stream waits for the blocking ones of its GPU, and these for it."""
    with LOCK:
        stream = stream_of(handle)
        if handle == 0:
            earlier = [
                (other, other.given) for other in streams.values()
                if other.is_blocking and other.device == stream.device
            ]
        elif stream.is_blocking:
            null = stream_of(0)
            earlier = [(null, null.given)]
        else:
            earlier = []

        def run() -> None:
            for other, place in earlier:
                other.run(place)
            work()

        stream.add(run if earlier else work)


def run_all() -> None:
    """Do all work of the current GPU."""
    with LOCK:
        for stream in [*streams.values(), *_null.values()]:
            if stream.device == thread.device:
                stream.run()


def new_event() -> int:
    """Make an event on the current GPU."""
    handle = new_handle()
    _events[handle] = (thread.device, None, 0)
    return handle


def record(event: int, handle: int) -> None:
    """Note the place in a stream."""
    device, _, _ = _events[event]
    stream = stream_of(handle)
    if device != stream.device:
        raise RuntimeError(f"an event of GPU {device} is recorded on a stream of GPU {stream.device}")
    with LOCK:
        # The place of the null stream includes what the blocking ones were given before.
        enqueue(handle, lambda: None)
        _events[event] = (device, stream, stream.given)


def wait_for(event: int) -> None:
    """Do the work before an event's place."""
    _, stream, place = _events[event]
    if stream is not None:
        stream.run(place)


def is_done(event: int) -> bool:
    """Whether the work before an event's place is done."""
    _, stream, place = _events[event]
    return stream is None or stream.given - len(stream.waiting) >= place


def make_wait(handle: int, event: int) -> None:
    """Let a stream's later work wait for an event's present place."""
    _, stream, place = _events[event]
    if stream is not None:
        enqueue(handle, lambda: stream.run(place))


class _Memory:
    """Blocks of whole pages, by their first addresses."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.blocks: dict[int, tuple[int, int]] = {}
        self.depth = 0
        # Whether the host may touch it. To close it takes a call of the system for each block and each work.
        self.is_open = True

    def allocate(self, size: int) -> int:
        """Allocate memory of the current GPU. It holds nonsense."""
        length = max(1, -(-size // _PAGE)) * _PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no {size} bytes for a simulated GPU")
        ctypes.memset(address, 0xA5, size)
        with LOCK:
            bisect.insort(self.starts, address)
            self.blocks[address] = (length, thread.device)
            if not self.depth and not self.is_open:
                self._set(address, is_open=False)
        return int(address)

    def free(self, address: int) -> None:
        """Free memory, after all work."""
        with LOCK:
            run_all()
            length, _ = self.blocks.pop(address)
            self.starts.remove(address)
            _libc.munmap(address, length)

    def device_of(self, address: int) -> int | None:
        """Return the GPU whose memory has the address."""
        with LOCK:
            place = bisect.bisect_right(self.starts, address) - 1
            if place < 0:
                return None
            length, device = self.blocks[self.starts[place]]
            return device if address < self.starts[place] + length else None

    @contextmanager
    def kept_closed(self) -> Iterator[None]:
        """End the process if the host, or MPI, touches the memory of GPUs."""
        with LOCK:
            self.is_open = False
            self.open(is_open=False)
        try:
            yield
        finally:
            with LOCK:
                self.is_open = True
                self.open(is_open=True)

    def open(self, *, is_open: bool) -> None:
        """Open all memory to the host, or close it."""
        for address in self.starts:
            self._set(address, is_open=is_open)

    def _set(self, address: int, *, is_open: bool) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if is_open else 0
        if _libc.mprotect(address, self.blocks[address][0], protection):
            raise OSError(ctypes.get_errno(), "mprotect")


memory = _Memory()
pinned: dict[int, int] = {}


@contextmanager
def opened_memory() -> Iterator[None]:
    """Let this thread touch the memory of GPUs. Others that touch it meanwhile are not noticed."""
    with LOCK:
        memory.depth += 1
        if memory.depth == 1 and not memory.is_open:
            memory.open(is_open=True)
        try:
            yield
        finally:
            memory.depth -= 1
            if memory.depth == 0 and not memory.is_open:
                memory.open(is_open=False)


def is_pageable(address: int) -> bool:
    """Whether an address lies in ordinary memory of the host."""
    is_pinned = any(begin <= address < begin + size for begin, size in list(pinned.items()))
    return not is_pinned and memory.device_of(address) is None
