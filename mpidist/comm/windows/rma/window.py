"""The window by one-sided calls of MPI. Loading it starts MPI.

The heaps are one MPI window, locked once for life: after a death nothing of it is collective, and no rank holds a
lock that others need. Messages are MPI's.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from typing import Any, NamedTuple, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.gathering import gather
from mpidist.comm.group import agreement
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_communicator import MPI
from mpidist.comm.group.resource import Claim, new_identity
from mpidist.comm.windows.lost_ranks import Losses
from mpidist.comm.windows.rma.heap_space import require_room
from mpidist.comm.windows.rma.heaps import allocate, mapped
from mpidist.comm.windows.row_requests import answer, questions
from mpidist.comm.windows.sockets.lifelines import Lifelines
from mpidist.comm.windows.window import Window, checked_message, part_of_heap, require_open, require_rank, rows_of_heap
from mpidist.options import WindowOptions

# The sizes of MPI's calls are ints of 32 bits.
_PIECE_BYTES = 1 << 30
# Tags. Between nodes a get or put continues only while its target is in MPI: so its origin announces its begin and its
# end. Rows are requested there by messages, and sent.
_MESSAGE, _COMES, _GOES, _ASKS, _GIVES = range(5)
# After the last message. No `sched_yield` here: on a busy machine the others keep the core for milliseconds then, while
# a rank that resumes from a nap gets it at once.
SPIN_SECONDS = 2e-4
# Then naps, each a fiftieth of the time since the last message. An idle server took 4.4 % of a core with naps of 1 ms
# on MPICH 4.0.3, and takes 1.2 %.
_NAP_SHARE = 1 / 50
LONGEST_NAP_SECONDS = 10e-3
# Seconds between two tests whether all ranks close the window.
_LEAVE_SECONDS = 1e-4
# MPI writes into them, or reads them, until they are complete; those with a dead rank never are.
_left: list[Any] = []
# The errors by which MPI reports a death, where it does (MPI 5.0, chapter 12; before it, ULFM).
_DEATHS = frozenset(
    number for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")
    if (number := getattr(MPI, name, MPI.ERR_UNKNOWN)) != MPI.ERR_UNKNOWN
)
# Other errors may come before the report of the death that is their cause.
_NEWS_SECONDS = 1.0


class _Incoming(NamedTuple):
    """A message that MPI is receiving."""

    source: int
    tag: int
    data: bytearray
    request: MPI.Request


class RmaWindow(Window):
    """Collective. Heaps in an MPI window, and messages by MPI.

    Args:
        communicator: A communicator for the window alone; it is closed with the window.
        heap_bytes: The size of this rank's heap.
        options: The options, of which `silence_seconds` is the limit of a host that sends nothing.

    Raises:
        OSError: A host has no room for the heaps of its ranks; on every rank.
    """

    def __init__(self, communicator: Communicator, heap_bytes: int, options: WindowOptions) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self._mpi: MPI.Intracomm = communicator.mpi
        # The program may call MPI at the same time.
        self.is_for_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.heap_sizes = require_room(communicator, heap_bytes)
        self._win = win = agreement.together(
            communicator, "allocating the heaps of a window",
            functools.partial(allocate, self._mpi, heap_bytes, is_shared=communicator.node.size == self.size),
        )
        # An empty buffer has no address.
        self.memory = np.frombuffer(cast(Any, win.tomemory()), np.uint8) if heap_bytes else np.empty(0, np.uint8)
        self._sending: dict[int, deque[MPI.Request]] = {rank: deque() for rank in range(self.size)}
        # Arrays that MPI reads or writes until the next flush: a caller may have none of its own.
        self._moving: dict[int, list[AnyArray]] = {rank: [] for rank in range(self.size)}
        # In the order in which they came.
        self._arriving: list[_Incoming] = []
        # Messages that came while this rank waited for rows, and by rank where the rows go that it has asked for.
        self._messages: deque[tuple[int, bytes]] = deque()
        self._asked: dict[int, deque[AnyArray]] = {rank: deque() for rank in range(self.size)}
        identity = communicator.broadcast_object(new_identity())
        give_back = functools.partial(_free, win, self._sending, self._arriving, self._moving)
        self._claim = Claim(self, identity, self.size, give_back)
        self._losses = Losses(communicator.processes)
        hosts = {process.host for process in communicator.processes}
        self._lifelines = Lifelines(communicator, options, self._losses) if len(hosts) > 1 else None
        near = set(communicator.node.processes)
        self._far = frozenset(rank for rank, one in enumerate(communicator.processes) if one not in near)
        self._heaps = {
            rank: mapped(win, rank, size) for rank, size in enumerate(self.heap_sizes) if rank not in self._far
        }
        self._visited: set[int] = set()
        self._visitors: set[int] = set()
        self._status = MPI.Status()
        self._heard = time.monotonic()
        # No rank asks for an exclusive lock, so MPI need not check. The epoch lasts while the window is open.
        win.Lock_all(MPI.MODE_NOCHECK)
        communicator.barrier()

    def get(self, rank: int, offset: int, into: AnyArray) -> None:
        """Local. See `Window.get`."""
        view = part_of_heap(self, rank, offset, into, writes=True)
        self._visit(rank)
        try:
            for at in range(0, view.size, _PIECE_BYTES):
                self._win.Get([view[at : at + _PIECE_BYTES], MPI.BYTE], rank, offset + at)
            self._moving[rank].append(view)
        except MPI.Exception as error:
            self._heed(error)

    def get_rows(self, rank: int, offset: int, numbers: AnyArray, into: AnyArray) -> None:
        """Local. See `Window.get_rows`. On a node it is a copy at once, and elsewhere a message and its answer."""
        view = rows_of_heap(self, rank, offset, numbers, into)
        self._losses.require_alive(rank)
        heap = self._heaps.get(rank)
        if heap is not None:
            # A barrier for this processor's reads: they keep their order, and see what was flushed.
            self._win.Sync()
            gather(heap, offset, numbers, view)
            return
        for asked, part in questions(offset, numbers, view) if view.size else ():
            self._asked[rank].append(part)
            self._send(rank, asked, _ASKS)

    def put(self, rank: int, offset: int, array: AnyArray) -> None:
        """Local. See `Window.put`."""
        view = part_of_heap(self, rank, offset, array)
        self._visit(rank)
        try:
            for at in range(0, view.size, _PIECE_BYTES):
                self._win.Put([view[at : at + _PIECE_BYTES], MPI.BYTE], rank, offset + at)
            self._moving[rank].append(view)
        except MPI.Exception as error:
            self._heed(error)

    def flush(self, rank: int) -> None:
        """Local. See `Window.flush`. Between nodes MPI waits for the target, and may hang if it dies now."""
        require_rank(self, rank)
        self._losses.require_alive(rank)
        try:
            if self._moving[rank]:
                self._win.Flush(rank)
                self._moving[rank].clear()
        except MPI.Exception as error:
            self._heed(error)
        if rank in self._visited:
            self._visited.discard(rank)
            self._send(rank, b"", _GOES)
        if self._asked[rank]:
            self._wait_for_rows(rank)
        self._losses.require_alive(rank)

    def ring(self, rank: int, message: bytes) -> None:
        """Local. See `Window.ring`."""
        data = checked_message(self, rank, message)
        # The receiver of the message reads what this rank has written into its own heap.
        self._win.Sync()
        self._send(rank, data, _MESSAGE)

    def poll(self, seconds: float = 0.0) -> tuple[int, bytes] | None:
        """Local. See `Window.poll`."""
        require_open(self)
        if self._messages:
            return self._messages.popleft()
        end = None
        while True:
            found = self._receive()
            now = time.monotonic()
            if found is not None:
                self._heard = now
                # What the sender has put into this heap before its message must be visible to loads from now on.
                self._win.Sync()
                return found
            if end is None:
                end = now + seconds
                self._go_on()
            if now >= end:
                return None
            idle = now - self._heard
            if idle < SPIN_SECONDS:
                continue
            if self._visitors - self.lost():
                os.sched_yield()
            else:
                self._go_on()
                time.sleep(min(_NAP_SHARE * idle, LONGEST_NAP_SECONDS, end - now))

    def is_near(self, rank: int) -> bool:
        """Local. See `Window.is_near`."""
        return rank not in self._far

    def lost(self) -> frozenset[int]:
        """Local. See `Window.lost`."""
        return self._losses.dead()

    def forget(self, rank: int) -> None:
        """Local. See `Window.forget`."""
        require_rank(self, rank)
        self._losses.forget(rank)
        _left.append(self._sending[rank])
        self._sending[rank] = deque()
        _left.extend(one for one in self._arriving if one.source == rank)
        self._arriving[:] = [one for one in self._arriving if one.source != rank]
        self._messages = deque(one for one in self._messages if one[0] != rank)
        self._visited.discard(rank)
        self._visitors.discard(rank)

    def _wait_for_rows(self, rank: int) -> None:
        """Wait until a rank on another node has sent the requested rows; serve other ranks meanwhile."""
        begin = time.monotonic()
        while self._asked[rank] and rank not in self._losses.gone():
            found = self._receive()
            if found is not None:
                self._messages.append(found)
            waited = time.monotonic() - begin
            if waited > SPIN_SECONDS:
                self._go_on()
                time.sleep(min(_NAP_SHARE * waited, LONGEST_NAP_SECONDS))

    def _visit(self, rank: int) -> None:
        self._losses.require_alive(rank)
        if rank in self._far and rank not in self._visited:
            self._visited.add(rank)
            self._send(rank, b"", _COMES)

    def _send(self, rank: int, data: bytes | AnyArray, tag: int) -> None:
        if rank in self._losses.gone():
            return
        sending = self._sending[rank]
        try:
            # The request holds the data.
            sending.append(self._mpi.Isend([data, MPI.BYTE], rank, tag))
        except MPI.Exception as error:
            self._heed(error)
        self._go_on_with(sending)

    def _go_on(self) -> None:
        """Let MPI make progress with messages, and release those that are complete."""
        for sending in self._sending.values():
            if sending:
                self._go_on_with(sending)

    def _go_on_with(self, sending: deque[MPI.Request]) -> None:
        try:
            while sending and sending[0].Test():
                sending.popleft()
        except MPI.Exception as error:
            sending.popleft()
            self._heed(error)

    def _receive(self) -> tuple[int, bytes] | None:
        """Take one message from MPI, if there is one; return the first one that is complete, if there is one."""
        try:
            self._match()
        except MPI.Exception as error:
            self._heed(error)
        return self._complete() if self._arriving else None

    def _match(self) -> None:
        status = self._status
        # The first probe may only receive a message that the second one then finds (Open MPI 5.0): without the second
        # one a rank that naps would find it after its next nap.
        incoming = (
            self._mpi.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            or self._mpi.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        )
        if incoming is None:
            return
        # What is found and not whole yet is no reason to nap.
        self._heard = time.monotonic()
        source, tag = status.source, status.tag
        data = bytearray(status.Get_count(MPI.BYTE))
        # Never a blocking call: the sender of a large message may die in the middle of it.
        one = _Incoming(source, tag, data, incoming.Irecv([data, MPI.BYTE]))
        if tag not in (_COMES, _GOES) and source not in self._losses.forgotten:
            self._arriving.append(one)
            return
        if not one.request.Test():
            _left.append(one)
        if tag == _COMES:
            self._visitors.add(source)
        else:
            self._visitors.discard(source)

    def _complete(self) -> tuple[int, bytes] | None:
        waiting: set[int] = set()
        for one in tuple(self._arriving):
            # Messages of one rank keep their order.
            if one.source in waiting:
                continue
            try:
                is_complete = one.request.Test()
            except MPI.Exception as error:
                # The rest of it never comes.
                self._arriving.remove(one)
                self._heed(error)
                break
            if is_complete:
                self._arriving.remove(one)
                if one.tag == _MESSAGE:
                    return one.source, bytes(one.data)
                self._take_rows(one)
                continue
            waiting.add(one.source)
        return None

    def _take_rows(self, one: _Incoming) -> None:
        """Answer a rank that asks for rows, or take those that this rank has asked for."""
        if one.tag == _ASKS:
            self._send(one.source, answer(self.memory, one.data), _GIVES)
        elif self._asked[one.source]:
            self._asked[one.source].popleft()[:] = np.frombuffer(one.data, np.uint8)

    def _heed(self, error: MPI.Exception) -> None:
        """Note a death that MPI reports; raise any other error."""
        if error.Get_error_class() in _DEATHS:
            self._mpi.Ack_failed()
            failed = self._mpi.Get_failed()
            for rank in MPI.Group.Translate_ranks(failed, list(range(failed.size)), self._mpi.Get_group()):
                self._losses.note(rank)
            return
        end = time.monotonic() + _NEWS_SECONDS
        while not self.lost():
            if time.monotonic() > end:
                raise error
            time.sleep(0.01)

    def _is_whole(self) -> bool:
        return not self._losses.gone() and self.communicator.is_whole()

    def _end(self, *, is_collective: bool) -> None:
        self.memory = np.empty(0, np.uint8)
        self._heaps = {}
        if is_collective and not MPI.Is_finalized() and self._leave():
            self._claim.give_back()
            self.communicator.close()
        else:
            self._claim.drop()
            self.communicator.drop()
        if self._lifelines is not None:
            # Others may not be there yet, or never come.
            self._lifelines.leave()
            self._lifelines.close()

    def _leave(self) -> bool:
        """Collective. Wait until all ranks close the window, and no message is pending; False after a death."""
        barrier: MPI.Request | None = None
        while barrier is None or not barrier.Test():
            self._receive()
            self._go_on()
            if barrier is None and not any(self._sending.values()):
                barrier = self._mpi.Ibarrier()
            if self.lost():
                _left.append(barrier)
                return False
            time.sleep(_LEAVE_SECONDS)
        return True


def _free(
    win: MPI.Win, sending: dict[int, deque[MPI.Request]], arriving: list[_Incoming], moving: dict[int, list[AnyArray]]
) -> None:
    _left.extend(one for one in (*sending.values(), arriving) if one)
    win.Unlock_all()
    win.Free()
    moving.clear()
