"""Lifelines: connections between ranks on different hosts that carry nothing, and end when a rank dies.

One-sided calls of MPI do not say that a rank on another host has died, and may wait for it without end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import weakref

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.windows.lost_ranks import Losses
from mpidist.comm.windows.sockets.listener import THREAD, Door, open_door
from mpidist.options import WindowOptions

logger = logging.getLogger("mpidist")

# The message of a rank that has dropped its window.
_LEAVE = b"L"
# The time in which the other ranks get it.
_LEAVE_SECONDS = 1.0


class Lifelines:
    """Collective. The lifelines of a rank, to all ranks on other hosts.

    Args:
        communicator: The ranks. Several hosts are among them.
        options: The ports, and the limit of a host that sends nothing.
        losses: The record in which deaths are noted, at any moment.

    Raises:
        OSError: No port is free on a host; on every rank.
    """

    def __init__(self, communicator: Communicator, options: WindowOptions, losses: Losses) -> None:
        door, addresses = open_door(communicator, options)
        here = addresses[communicator.rank].place
        far = [rank for rank, address in enumerate(addresses) if address.place != here]
        # The thread keeps the watch, and not this object: its end ends the thread.
        self._watch = watch = _Watch(door, losses, len(far))
        self.close = weakref.finalize(self, watch.close)
        watch.thread.start()
        # The lower one of two ranks opens the connection.
        for rank in far:
            if rank > communicator.rank:
                door.call(rank)
        if not watch.is_ready.wait(options.silence_seconds):
            logger.warning("window: rank %d cannot detect the death of ranks that it cannot reach", communicator.rank)

    def leave(self) -> None:
        """Local. Notify the other ranks that this one ends its window, and is alive."""
        self._watch.leave()


class _Watch:
    """The thread that detects deaths, also while the program's own is in a call of MPI that never returns.

    Attributes:
        thread: The thread, which begins to watch when it is started.
        is_ready: An event that is set when all ranks are connected.
    """

    def __init__(self, door: Door, losses: Losses, count: int) -> None:
        self._door = door
        self._losses = losses
        self._count = count
        self._is_leaving = False
        # Set when the last connection has ended.
        self._is_empty = threading.Event()
        self.is_ready = threading.Event()
        if not count:
            self.is_ready.set()
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(door.bell, select.EPOLLIN)
        self._poll.register(self._end, select.EPOLLIN)
        # For each descriptor the rank at the other end and the connection.
        self._links: dict[int, tuple[int, socket.socket]] = {}
        self.thread = threading.Thread(target=self._work, name=THREAD, daemon=True)

    def leave(self) -> None:
        """Local. See `Lifelines.leave`."""
        self._is_leaving = True
        for _, link in list(self._links.values()):
            # Else the rank is dead, or leaves, too.
            with contextlib.suppress(OSError):
                link.send(_LEAVE)
                link.shutdown(socket.SHUT_WR)
        # Closing a connection with unread data resets it, and the other end would lose the last message.
        if self._links:
            self._is_empty.wait(_LEAVE_SECONDS)

    def close(self) -> None:
        """Local. End the thread and the connections."""
        os.eventfd_write(self._end, 1)
        self.thread.join()
        self._poll.close()
        os.close(self._end)
        for _, link in self._links.values():
            link.close()
        self._links.clear()
        self._door.close()

    def _work(self) -> None:
        while True:
            for number, _ in self._poll.poll():
                if number == self._end:
                    return
                if number == self._door.bell:
                    self._take_opened()
                else:
                    self._hear(number)

    def _take_opened(self) -> None:
        while (opened := self._door.take()) is not None:
            if opened.link is None:
                continue
            self._links[opened.link.fileno()] = (opened.rank, opened.link)
            self._poll.register(opened.link, select.EPOLLIN)
        if len(self._links) == self._count:
            self.is_ready.set()

    def _hear(self, number: int) -> None:
        rank, link = self._links[number]
        broken: OSError | None = None
        try:
            said = link.recv(1)
        except OSError as error:
            # The other host has said nothing for too long, or the rank has left something unread.
            said, broken = b"", error
        self._poll.unregister(link)
        del self._links[number]
        link.close()
        if not self._links:
            self._is_empty.set()
        if said == _LEAVE:
            self._losses.leave(rank)
        elif not self._is_leaving:
            self._losses.note(rank, broken)
