"""Processes that join a window later: one rank takes their requests, and gives each a rank.

A process that has proved in the handshake that it has the secret identifies itself. It is served here by a thread of
its own until it gets an answer: it blocks no other rank, even if it dies.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections import deque
from typing import NamedTuple

from mpidist.comm.windows.sockets.addresses import Address, call
from mpidist.comm.windows.sockets.handshake import LIMIT_SECONDS, RefusedError, receive, send
from mpidist.failures.deaths import Process

# The header of a request, and that of an answer: whether it is a rank, and its length. Versions must agree.
_LENGTH = struct.Struct("<Q")
_ANSWER = struct.Struct("<BQ")
_MAX_REQUEST_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 26


class Newcomer(NamedTuple):
    """A process that wants to join, as it describes itself.

    Attributes:
        process: Its process.
        address: The address at which it waits for connections.
        version: The version of mpidist.
        python: The version of Python, "3.12": functions are sent as its code.
    """

    process: Process
    address: Address
    version: str
    python: str


class Introduction(NamedTuple):
    """A rank that has joined, as others must know it.

    Attributes:
        rank: The rank that it was given, which no other process had.
        process: Its process.
        address: The address at which it waits for connections.
        replaces: The ranks that had its place before. Nothing that they do counts from now on.
    """

    rank: int
    process: Process
    address: Address
    replaces: tuple[int, ...]


class Request:
    """A process that waits for an answer.

    Args:
        newcomer: The process.
    """

    def __init__(self, newcomer: Newcomer) -> None:
        self.newcomer = newcomer
        self._answers: queue.SimpleQueue[tuple[Introduction | None, bytes]] = queue.SimpleQueue()

    def welcome(self, introduction: Introduction, data: bytes) -> None:
        """Local. Admit it. It is lost to this rank's window when its connection ends, from now on.

        Args:
            introduction: The place with which it joins.
            data: The data that it needs.
        """
        self._answers.put((introduction, data))

    def refuse(self, reason: str) -> None:
        """Local. Refuse the process.

        Args:
            reason: A sentence for its user.
        """
        self._answers.put((None, reason.encode()))

    def wait(self) -> tuple[Introduction | None, bytes]:
        """Local. Wait for the answer."""
        return self._answers.get()


class Desk:
    """The requests of one rank's window, in the order in which they came.

    Args:
        here: The address of this rank: it calls each process that asks once from there, and refuses it if that fails.
            None: it does not call.
    """

    def __init__(self, here: Address | None = None) -> None:
        self._here = here
        self._waiting: deque[Request] = deque()
        # For `_is_closed` and `_waiting`: a request that comes while this closes is refused by `close` or by `serve`.
        # It would wait without end otherwise.
        self._lock = threading.Lock()
        self._is_closed = False

    def first(self) -> Request | None:
        """Local. The request that has waited longest, which stays; None without any."""
        return self._waiting[0] if self._waiting else None

    def pop(self) -> None:
        """Local. Take the first request away: it has its answer."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft()

    def close(self) -> None:
        """Local. Refuse all processes that wait, and all that call later."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for request in waiting:
            request.refuse(_ENDED)

    def serve(self, link: socket.socket) -> Introduction | None:
        """Local. Take a request, wait until it is decided, and answer. Called in a thread of the door's.

        Args:
            link: The connection to a process that has proved that it knows the secret.

        Returns:
            The introduction with which it joins; None if it was refused.

        Raises:
            RefusedError: The process does not identify itself.
        """
        end = time.monotonic() + LIMIT_SECONDS
        (length,) = _LENGTH.unpack(receive(link, _LENGTH.size, end))
        if length > _MAX_REQUEST_BYTES:
            raise RefusedError(f"its request has {length} bytes, more than a worker sends")
        request = Request(_read(receive(link, length, end)))
        reason = self._why_out_of_reach(request.newcomer)
        with self._lock:
            if self._is_closed or reason:
                request.refuse(reason or _ENDED)
            else:
                self._waiting.append(request)
        introduction, data = request.wait()
        try:
            send(link, _ANSWER.pack(introduction is not None, len(data)) + data, time.monotonic() + LIMIT_SECONDS)
        except RefusedError:
            # It has died meanwhile: the end of this connection will show that.
            return introduction
        return introduction

    def _why_out_of_reach(self, newcomer: Newcomer) -> str:
        """The reason why others would wait for this process without end; empty if they need not."""
        if self._here is None:
            return ""
        try:
            call(newcomer.address, self._here, LIMIT_SECONDS).close()
        except OSError as error:
            interfaces = ", ".join(one.partition("/")[0] for one in newcomer.address.interfaces) or "no address"
            return (
                f"the chief cannot reach process {newcomer.process.number} on {newcomer.process.host} at port "
                f"{newcomer.address.port} of {interfaces} ({error}), and all ranks connect to one another. Open these "
                "ports between the hosts (`WindowOptions(ports=...)` limits the ports), or start the worker on another "
                "host"
            )
        return ""


_ENDED = "the job is ending"


def ask(link: socket.socket, newcomer: Newcomer) -> bytes:
    """Local. Ask the rank that has a desk for a rank, and wait for the answer as long as that takes.

    Args:
        link: The connection to that rank, after `greet`.
        newcomer: This process.

    Returns:
        The data that `Request.welcome` was given.

    Raises:
        RefusedError: The rank refuses this process, or has ended.
    """
    text = json.dumps(newcomer._replace(address=newcomer.address.to_json())).encode()  # type: ignore[arg-type]
    send(link, _LENGTH.pack(len(text)) + text, time.monotonic() + LIMIT_SECONDS)
    is_welcome, length = _ANSWER.unpack(receive(link, _ANSWER.size, None))
    if length > _MAX_ANSWER_BYTES:
        raise RefusedError(f"its answer has {length} bytes, more than a chief sends")
    data = receive(link, length, time.monotonic() + LIMIT_SECONDS)
    if not is_welcome:
        raise RefusedError(data.decode(errors="replace"))
    return data


def _read(data: bytes) -> Newcomer:
    try:
        process, address, version, python = json.loads(data)
        return Newcomer(Process(*process), Address.from_json(address), str(version), str(python))
    except (ValueError, TypeError, KeyError) as error:
        raise RefusedError(f"its request is malformed: {error!r}") from None
