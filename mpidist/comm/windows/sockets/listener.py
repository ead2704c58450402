"""Accepts and opens connections in background threads: an unauthenticated peer cannot block the server."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpidist.comm.group import agreement
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.windows.sockets.addresses import (
    Address,
    call,
    interfaces,
    listen_by_name,
    listen_by_port,
    place,
    watch_silence,
)
from mpidist.comm.windows.sockets.handshake import (
    ANY_RANK,
    LIMIT_SECONDS,
    NEWCOMER,
    SECRET_BYTES,
    RefusedError,
    admit,
    greet,
)
from mpidist.comm.windows.sockets.newcomers import Desk, Introduction
from mpidist.options import WindowOptions

logger = logging.getLogger("mpidist")

# So many may be at their handshake at a time: a stranger may call very often.
_CALLERS = 64
# Seconds between two calls of a rank that does not answer.
_PAUSE_SECONDS = 0.05
THREAD = "mpidist-window"


class Opened(NamedTuple):
    """A connection to a rank that has proved itself, or the end of a call.

    Attributes:
        rank: The rank at the other end.
        link: The connection; None where the rank could not be reached.
        is_ours: Whether this rank has called.
        introduction: The introduction of a process that was given its rank over this connection.
    """

    rank: int
    link: socket.socket | None
    is_ours: bool
    introduction: Introduction | None = None


class Door:
    """Waits for calls, and makes calls.

    Args:
        listeners: Sockets that wait for connections. They are closed with the door.
        secret: The secret of the window.
        rank: This rank.
        addresses: The addresses of all ranks, in their order; or by rank of those that this one calls, and of itself.
        silence_seconds: The time without data after which a host counts as unreachable.
        admits_later: Whether others may join.

    Attributes:
        secret: The constructor's argument.
        addresses: The addresses of all ranks; one that joins is added.
        desk: The desk for processes that ask for a rank; None where no rank gives any.
        bell: A descriptor that can be read when `take` has something.
    """

    def __init__(
        self, listeners: list[socket.socket], secret: bytes, rank: int,
        addresses: list[Address] | Mapping[int, Address],
        silence_seconds: float, *, admits_later: bool = False,
    ) -> None:
        self._listeners = listeners
        self.secret = secret
        self._rank = rank
        self.addresses = dict(enumerate(addresses)) if isinstance(addresses, list) else dict(addresses)
        self.desk: Desk | None = None
        self._size = ANY_RANK if admits_later else len(self.addresses)
        self._silence_seconds = silence_seconds
        self._opened: deque[Opened] = deque()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False
        # For `_is_closed`, `_busy` and `_opened`: a thread that begins, or opens a connection, while `close` runs is
        # joined by it, or finds that this is closed and closes its connection itself.
        self._lock = threading.Lock()
        self._busy: dict[threading.Thread, socket.socket | None] = {}
        self._thread = threading.Thread(target=self._wait_for_calls, name=THREAD, daemon=True)
        self._thread.start()

    def open_desk(self, desk: Desk) -> None:
        """Local. Let processes ask for a rank."""
        self.desk = desk

    def take(self) -> Opened | None:
        """Local. The next connection that was opened, or None."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        return self._opened.popleft() if self._opened else None

    def call(self, rank: int) -> None:
        """Local. Begin to call a rank; `take` returns the connection."""
        self._begin(None, self._call, rank)

    def close(self) -> None:
        """Local. Admit and call no rank any more."""
        with self._lock:
            self._is_closed = True
            busy = dict(self._busy)
        if self.desk is not None:
            self.desk.close()
        os.eventfd_write(self._end, 1)
        # It ends the wait of a thread that is in a handshake; the thread closes the connection itself.
        for link in busy.values():
            if link is not None:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        # The thread that accepts comes first: it may have entered a thread in `busy` that it has not started yet.
        for thread in (self._thread, *busy):
            thread.join()
        for one in self._opened:
            if one.link is not None:
                one.link.close()
        for listener in self._listeners:
            listener.close()
        os.close(self.bell)
        os.close(self._end)

    def _begin(self, link: socket.socket | None, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name=THREAD, daemon=True)
        with self._lock:
            if self._is_closed or (link is not None and len(self._busy) >= _CALLERS):
                if link is not None:
                    link.close()
                return
            self._busy[thread] = link
        thread.start()

    def _open(self, opened: Opened) -> None:
        with self._lock:
            self._busy.pop(threading.current_thread(), None)
            if self._is_closed:
                if opened.link is not None:
                    opened.link.close()
                return
            self._opened.append(opened)
            os.eventfd_write(self.bell, 1)

    def _wait_for_calls(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        by_number = {one.fileno(): one for one in self._listeners}
        for number in by_number:
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == self._end:
                    return
                try:
                    link, origin = by_number[number].accept()
                except OSError as error:
                    # No descriptor is free, or the caller has hung up.
                    logger.warning("window: rank %d could not admit a caller: %s", self._rank, error)
                    time.sleep(_PAUSE_SECONDS)
                    continue
                self._begin(link, self._admit, link, origin)

    def _admit(self, link: socket.socket, origin: object) -> None:
        try:
            rank = admit(link, self.secret, self._rank, self._size)
            introduction = self._introduce(link) if rank == NEWCOMER else None
        except (RefusedError, OSError) as error:
            link.close()
            with self._lock:
                self._busy.pop(threading.current_thread(), None)
            if not self._is_closed:
                where = f"{origin[0]}:{origin[1]}" if isinstance(origin, tuple) else "this host"
                logger.warning("window: rank %d has refused a caller from %s: %s", self._rank, where, error)
            return
        if rank != NEWCOMER:
            self._open(Opened(rank, self._ready(link), is_ours=False))
        elif introduction is not None:
            self._open(Opened(introduction.rank, self._ready(link), is_ours=False, introduction=introduction))
        else:
            link.close()
            with self._lock:
                self._busy.pop(threading.current_thread(), None)

    def _introduce(self, link: socket.socket) -> Introduction | None:
        if self.desk is None:
            raise RefusedError("it asks for a rank, and this rank gives none")
        return self.desk.serve(link)

    def _call(self, rank: int) -> None:
        address, here = self.addresses[rank], self.addresses[self._rank]
        end = time.monotonic() + self._silence_seconds
        refusals = 0
        while not self._is_closed:
            try:
                link = call(address, here, LIMIT_SECONDS, refusals)
            except OSError as error:
                # A rank that refuses has closed the window, or is dead.
                if time.monotonic() > end or isinstance(error, ConnectionRefusedError):
                    logger.warning("window: rank %d cannot reach rank %d: %s", self._rank, rank, error)
                    self._open(Opened(rank, None, is_ours=True))
                    return
            else:
                with self._lock:
                    self._busy[threading.current_thread()] = link
                try:
                    greet(link, self.secret, self._rank, rank)
                except RefusedError as error:
                    link.close()
                    # Its host lives. Its process may be stopped, or hold the interpreter in a long call.
                    end = time.monotonic() + self._silence_seconds
                    refusals += 1
                    logger.info("window: rank %d calls rank %d again: %s", self._rank, rank, error)
                else:
                    self._open(Opened(rank, self._ready(link), is_ours=True))
                    return
            time.sleep(_PAUSE_SECONDS)

    def _ready(self, link: socket.socket) -> socket.socket:
        watch_silence(link, self._silence_seconds)
        link.setblocking(False)
        return link


def open_door(
    communicator: Communicator, options: WindowOptions, *, admits_later: bool = False
) -> tuple[Door, list[Address]]:
    """Collective. The door of this rank, and the addresses of all. Ports are open only where others may need them.

    Args:
        communicator: The ranks.
        options: The ports, and the limit of a host that says nothing.
        admits_later: Whether others may join, from any host.

    Raises:
        OSError: No port is free on a host; on every rank.
    """
    has_others = admits_later or len(set(communicator.all_gather_object(place()))) > 1
    listeners, mine = agreement.together(
        communicator, "waiting for other ranks", functools.partial(listen, has_others, options)
    )
    if mine.port:
        logger.info(
            "window: rank %d waits for ranks on other hosts at port %d of %s", communicator.rank, mine.port,
            ", ".join(mine.interfaces) or "no address",
        )
    addresses = communicator.all_gather_object(mine)
    # By MPI, and neither by an argument nor by the environment, which others on the host can read.
    secret = communicator.broadcast_object(secrets.token_bytes(SECRET_BYTES))
    door = Door(
        listeners, secret, communicator.rank, addresses, options.silence_seconds, admits_later=admits_later
    )
    return door, addresses


def listen(has_others: bool, options: WindowOptions) -> tuple[list[socket.socket], Address]:
    """Local. Wait for connections.

    Args:
        has_others: Whether they may come from other hosts.
        options: The ports.

    Returns:
        The sockets, and their address.

    Raises:
        OSError: No port is free.
    """
    link, name = listen_by_name()
    if not has_others:
        return [link], Address(place(), name, (), 0)
    try:
        other, port = listen_by_port(options.ports)
    except OSError:
        link.close()
        raise
    return [link, other], Address(place(), name, interfaces(), port)


def send_away(listener: socket.socket) -> None:
    """Local. Close all connections so far: callers that do not expect this rank have only tested the route.

    Args:
        listener: The listener of a window that is not open yet.
    """
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()
    listener.setblocking(True)
