"""The window by sockets: Unix sockets within a host, TCP between hosts.

The end of a connection shows the death of a rank; MPI is called only at the begin and the end. Gets and puts need their
target's help: it serves them in the calls of its window. A rank opens a connection to another one when it first sends
something; it carries this rank's requests and their answers, and another one those of the other rank. Each two ranks on
different hosts also have an idle connection, since kernels send keepalive probes only on idle connections.
"""

from __future__ import annotations

import logging
import pickle
import selectors
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.gathering import gather
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.windows.lost_ranks import Losses
from mpidist.comm.windows.row_requests import answer, questions
from mpidist.comm.windows.sockets.connection import NOTHING, BrokenConnectionError, Connection, Kind
from mpidist.comm.windows.sockets.handshake import LIMIT_SECONDS
from mpidist.comm.windows.sockets.listener import Door, Opened, open_door
from mpidist.comm.windows.sockets.newcomers import Introduction
from mpidist.comm.windows.window import (
    MAX_MESSAGE_BYTES,
    Window,
    checked_message,
    part_of_heap,
    require_open,
    require_rank,
    rows_of_heap,
)
from mpidist.failures.deaths import WATCH, Process
from mpidist.options import WindowOptions

logger = logging.getLogger("mpidist")

# The time after the last message in which it polls; then it sleeps in the kernel.
SPIN_SECONDS = 2e-4
# The largest first message of a rank that has joined.
_MAX_HELLO_BYTES = 1 << 16
# Seconds between two checks for deaths, while this rank waits for an answer.
_LOOK_SECONDS = 0.05


class SocketWindow(Window):
    """Collective. Heaps in each rank's own memory, and everything by sockets.

    Args:
        communicator: A communicator for the window alone; it is closed with the window.
        heap_bytes: The size of this rank's heap.
        options: The ports, and the limit of a host that sends nothing.
        admits_later: Whether processes may join that are not in the communicator; the same on all ranks.

    Raises:
        OSError: No port is free on a host; on every rank.
    """

    def __init__(
        self, communicator: Communicator, heap_bytes: int, options: WindowOptions, *, admits_later: bool = False
    ) -> None:
        self.communicator = communicator
        heap_sizes = tuple(communicator.all_gather_object(heap_bytes))
        self._admits_later = admits_later
        door, _ = open_door(communicator, options, admits_later=admits_later)
        self._begin(communicator.rank, heap_sizes, communicator.processes, door)
        here = door.addresses[self.rank].place
        # The lower one of two ranks opens the connection.
        self._hold(rank for rank in range(self.rank + 1, self.size) if door.addresses[rank].place != here)

    def _begin(self, rank: int, heap_sizes: tuple[int, ...], processes: Sequence[Process], door: Door) -> None:
        self.rank = rank
        self.size = len(heap_sizes)
        self.heap_sizes = heap_sizes
        self.memory = np.empty(heap_sizes[rank], np.uint8)
        self._losses = Losses(processes)
        self._door = door
        # The first frame of each connection of a rank that has joined.
        self._hello = NOTHING
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door.bell, selectors.EVENT_READ)
        # The connections that this rank has opened, by rank, and all open connections.
        self._ours: dict[int, Connection] = {}
        self._open: set[Connection] = set()
        self._messages: deque[tuple[int, bytes]] = deque()
        self._heard = 0.0
        self._is_leaving = False
        self._finalizer = weakref.finalize(self, _shut, self._door, self._selector, self._open)
        self._held: set[int] = set()

    def _hold(self, ranks: Iterable[int]) -> None:
        """Begin to hold connections to ranks on other hosts."""
        self._held = set(ranks)
        for rank in self._held:
            self._door.call(rank)

    @property
    def door(self) -> Door:
        """Local. Its door."""
        return self._door

    def admit(self, introduction: Introduction) -> None:
        """Local. Add a rank that joins, unless it is known already.

        Args:
            introduction: The introduction of the rank.
        """
        rank = introduction.rank
        if rank in self._door.addresses:
            return
        self.heap_sizes += (0,) * (rank + 1 - self.size)
        self.size = max(self.size, rank + 1)
        self._losses.add(rank, introduction.process)
        self._door.addresses[rank] = introduction.address
        for one in introduction.replaces:
            self.forget(one)

    def get(self, rank: int, offset: int, into: AnyArray) -> None:
        """Local. See `Window.get`."""
        view = part_of_heap(self, rank, offset, into, writes=True)
        self._losses.require_alive(rank)
        if rank == self.rank:
            view[:] = self.memory[offset : offset + view.size]
        elif view.size:
            connection = self._connection(rank)
            connection.expected.append(view.data)
            self._send(connection, Kind.GET, offset, view.size)

    def get_rows(self, rank: int, offset: int, numbers: AnyArray, into: AnyArray) -> None:
        """Local. See `Window.get_rows`."""
        view = rows_of_heap(self, rank, offset, numbers, into)
        self._losses.require_alive(rank)
        if rank == self.rank:
            gather(self.memory, offset, numbers, view)
        elif view.size:
            connection = self._connection(rank)
            for asked, part in questions(offset, numbers, view):
                connection.expected.append(part.data)
                self._send(connection, Kind.ASK, 0, len(asked), memoryview(asked))

    def put(self, rank: int, offset: int, array: AnyArray) -> None:
        """Local. See `Window.put`."""
        view = part_of_heap(self, rank, offset, array)
        self._losses.require_alive(rank)
        if rank == self.rank:
            self.memory[offset : offset + view.size] = view
        elif view.size:
            connection = self._connection(rank)
            connection.is_synced = False
            self._send(connection, Kind.PUT, offset, view.size, view.data)

    def flush(self, rank: int) -> None:
        """Local. See `Window.flush`."""
        require_rank(self, rank)
        self._losses.require_alive(rank)
        connection = self._ours.get(rank)
        if connection is None:
            return
        if not connection.is_synced:
            connection.is_synced = True
            connection.expected.append(None)
            self._send(connection, Kind.SYNC)
        while connection.expected and rank not in self._losses.gone():
            self._turn(_LOOK_SECONDS)
        self._losses.require_alive(rank)

    def ring(self, rank: int, message: bytes) -> None:
        """Local. See `Window.ring`."""
        data = checked_message(self, rank, message)
        if rank in self._losses.gone():
            return
        if rank == self.rank:
            self._messages.append((rank, data))
            return
        self._send(self._connection(rank), Kind.MESSAGE, 0, len(data), memoryview(data))

    def poll(self, seconds: float = 0.0) -> tuple[int, bytes] | None:
        """Local. See `Window.poll`."""
        require_open(self)
        self._turn(0)
        now = time.monotonic()
        end = now + seconds
        while not self._messages and now < end:
            if now - self._heard < SPIN_SECONDS:
                self._turn(0)
            else:
                self._turn(end - now)
            now = time.monotonic()
        if not self._messages:
            return None
        self._heard = now
        return self._messages.popleft()

    def lost(self) -> frozenset[int]:
        """Local. See `Window.lost`."""
        return self._losses.dead()

    def forget(self, rank: int) -> None:
        """Local. See `Window.forget`."""
        require_rank(self, rank)
        self._losses.forget(rank)
        self._messages = deque(one for one in self._messages if one[0] != rank)
        for connection in self._open:
            if connection.rank == rank:
                # Another rank may have its place in the heap.
                connection.divert()
        # It may be alive, and wait for an answer. What it has not read yet stays there for it to read.
        for connection in [one for one in self._open if one.rank == rank and not one.is_held]:
            self._send(connection, Kind.LEAVE)

    def _connection(self, rank: int) -> Connection:
        """The connection that this rank has opened, or begins to open."""
        connection = self._ours.get(rank)
        if connection is None:
            connection = self._ours[rank] = self._new_connection(rank)
            self._door.call(rank)
            # It is there within this time where the other process is not stopped. Else what is sent waits for it.
            end = time.monotonic() + LIMIT_SECONDS
            while connection.link is None and rank not in self._losses.gone() and time.monotonic() < end:
                self._turn(_LOOK_SECONDS)
        return connection

    def _new_connection(self, rank: int) -> Connection:
        """A connection that this rank opens."""
        connection = Connection(rank, self._place, self._take)
        if self._hello:
            self._send(connection, Kind.HELLO, 0, self._hello.nbytes, self._hello)
        return connection

    def _send(
        self, connection: Connection, kind: Kind, at: int = 0, size: int = 0, body: memoryview = NOTHING
    ) -> None:
        try:
            connection.send(kind, at, size, body)
        except BrokenConnectionError as error:
            self._break(connection, error)
        if connection.has_more():
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Register the events of a connection to wait for."""
        if connection in self._open and connection.link is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_more() else 0)
            self._selector.modify(connection.link, events, connection)

    def _turn(self, seconds: float) -> None:
        """Receive, serve and send all that can continue now; wait at most the given time for that."""
        for key, events in self._selector.select(seconds):
            connection: Connection | None = key.data
            if connection is None:
                self._take_opened()
                continue
            try:
                if events & selectors.EVENT_READ:
                    connection.read()
                if events & selectors.EVENT_WRITE:
                    connection.write()
                    if not connection.has_more():
                        self._watch(connection)
            except BrokenConnectionError as error:
                self._break(connection, error)

    def _take_opened(self) -> None:
        while (opened := self._door.take()) is not None:
            self._take_one(opened)

    def _take_one(self, opened: Opened) -> None:
        if opened.introduction is not None:
            self.admit(opened.introduction)
        if opened.link is None:
            # Its host cannot be reached, or it does not listen any more.
            self._losses.cut(opened.rank)
            return
        connection = self._ours.get(opened.rank) if opened.is_ours else None
        is_held = opened.is_ours and opened.rank in self._held
        if is_held:
            connection = self._new_connection(opened.rank)
        elif connection is None:
            connection = Connection(opened.rank, self._place, self._take)
        connection.link = opened.link
        self._open.add(connection)
        self._selector.register(opened.link, selectors.EVENT_READ, connection)
        if is_held:
            self._held.remove(opened.rank)
            self._send(connection, Kind.HOLD)
        if is_held or opened.introduction is not None:
            # The rank at either end of it knows by its end that the other one is dead.
            connection.was_used = connection.is_held = True
        if opened.rank in self._losses.forgotten and not is_held:
            # It would wait for answers without end.
            self._send(connection, Kind.LEAVE)
        self._watch(connection)

    def _place(self, connection: Connection, kind: Kind, at: int, size: int) -> memoryview:
        """The memory for what follows a header; see `connection.Place`."""
        if connection.rank in self._losses.forgotten and kind in (Kind.PUT, Kind.GET):
            # It may not write here any more, whatever it believes.
            return memoryview(bytearray(size if kind is Kind.PUT else 0))
        if kind is Kind.MESSAGE and size <= MAX_MESSAGE_BYTES:
            return memoryview(bytearray(size))
        if kind is Kind.ASK and size <= MAX_MESSAGE_BYTES:
            return memoryview(bytearray(size))
        if kind is Kind.HELLO and self._admits_later and size <= _MAX_HELLO_BYTES:
            return memoryview(bytearray(size))
        if kind in (Kind.GET, Kind.PUT) and at + size <= self.memory.size:
            return self.memory.data[at : at + size] if kind is Kind.PUT else NOTHING
        if kind is Kind.DATA and connection.expected and connection.expected[0] is not None:
            if connection.expected[0].nbytes == size:
                return connection.expected[0]
        elif kind in (Kind.SYNC, Kind.LEAVE, Kind.HOLD) or (kind is Kind.SYNCED and connection.expected):
            return NOTHING
        raise BrokenConnectionError(f"a frame {kind.name} of {size} bytes at {at} does not fit")

    def _take(self, connection: Connection, kind: Kind, at: int, size: int, body: memoryview) -> None:
        """A whole frame; see `connection.Take`."""
        connection.is_held |= kind is Kind.HOLD
        if kind in (Kind.DATA, Kind.SYNCED):
            connection.expected.popleft()
        elif connection.rank in self._losses.forgotten:
            return
        elif kind is Kind.MESSAGE:
            self._messages.append((connection.rank, bytes(body)))
        elif kind is Kind.GET:
            self._send(connection, Kind.DATA, 0, size, self.memory.data[at : at + size])
        elif kind is Kind.ASK:
            try:
                # A copy: what is asked later is read later, though the kernel may take this one later still.
                rows = answer(self.memory, body)
            except ValueError as error:
                raise BrokenConnectionError(str(error)) from None
            self._send(connection, Kind.DATA, 0, rows.nbytes, rows.reshape(-1).data)
        elif kind is Kind.SYNC:
            self._send(connection, Kind.SYNCED)
        elif kind is Kind.HELLO:
            self.admit(pickle.loads(body))
        elif kind is Kind.LEAVE:
            self._losses.leave(connection.rank)

    def _break(self, connection: Connection, error: BrokenConnectionError) -> None:
        """A connection has ended: the other rank is dead, unless it has said that it leaves."""
        if connection not in self._open:
            return
        is_death = connection.was_used or connection is self._ours.get(connection.rank)
        self._close(connection)
        if connection.rank >= self.size:
            # It has joined, and ended before it has identified itself.
            return
        if is_death and not self._is_leaving and connection.rank not in self._losses.gone():
            level = logging.INFO if WATCH.is_over else logging.WARNING
            text = "window: rank %d has lost its connection to rank %d: %s"
            logger.log(level, text, self.rank, connection.rank, error)
            self._losses.cut(connection.rank, error.__cause__)

    def _close(self, connection: Connection) -> None:
        if connection.link is not None:
            self._selector.unregister(connection.link)
            connection.link.close()
        connection.link = None
        self._open.discard(connection)

    def _is_whole(self) -> bool:
        return not self._losses.gone() and self.communicator.is_whole()

    def _end(self, *, is_collective: bool) -> None:
        self.memory, heap = np.empty(0, np.uint8), self.memory
        if is_collective and self._leave(heap):
            self.communicator.close()
        else:
            self._take_opened()
            for connection in list(self._open):
                self._send(connection, Kind.LEAVE)
            self.communicator.drop()
        self._finalizer()

    def _leave(self, heap: AnyArray) -> bool:
        """Collective. Serve until all ranks close the window; False after a death."""
        self.memory, empty = heap, self.memory
        self._is_leaving = True
        barrier = self.communicator.mpi.Ibarrier()
        while not barrier.Test():
            self._turn(1e-3)
            if not self.communicator.is_whole():
                return False
        self.memory = empty
        return True


def _shut(door: Door, selector: selectors.BaseSelector, connections: set[Connection]) -> None:
    selector.close()
    for connection in connections:
        if connection.link is not None:
            connection.link.close()
    connections.clear()
    door.close()
