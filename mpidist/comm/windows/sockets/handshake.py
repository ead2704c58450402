"""The handshake of two ranks that open a connection: each proves that it knows the window's secret.

The secret itself is never sent here: the ranks get it over MPI, and processes that join later from a file of the
user's. Each side sends random bytes, and the other one answers with an HMAC-SHA256 of both sides' bytes and ranks.
Nothing that a stranger sends is unpickled, and a stranger that sends nothing is disconnected after a time. The traffic
afterwards is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time

SECRET_BYTES = 32
# The time limit of a handshake: strangers may send nothing.
LIMIT_SECONDS = 2.0

# The rank of a process that asks for one, and a number of ranks among which are all that may join.
NEWCOMER = (1 << 32) - 1
ANY_RANK = 1 << 32

_MAGIC = b"mpidist1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
# The magic number, the rank that calls, the rank that it calls, random bytes.
_HELLO = struct.Struct(f"<8sII{_NONCE_BYTES}s")
_ADMITTED = b"\x01"
# man 7 unix: process, user, group.
_CREDENTIALS = struct.Struct("3i")


class RefusedError(Exception):
    """The other end of a connection is no rank of the window, or does not answer; the text says why."""


def greet(link: socket.socket, secret: bytes, rank: int, other: int, seconds: float = LIMIT_SECONDS) -> None:
    """Local. Prove this rank's identity to a rank that it has called, and check the identity of that rank.

    Args:
        link: A connected socket. It is left with a time limit of its own.
        secret: The secret of the window.
        rank: This rank.
        other: The rank at the other end.
        seconds: The limit for all of it.

    Raises:
        RefusedError: The other end knows no secret, refuses this rank, or does not answer in time.
    """
    end = time.monotonic() + seconds
    _check_user(link)
    mine = secrets.token_bytes(_NONCE_BYTES)
    send(link, _HELLO.pack(_MAGIC, rank, other, mine), end)
    answer = receive(link, _NONCE_BYTES + _PROOF_BYTES, end)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"called", rank, other, mine, theirs)):
        raise RefusedError("it does not know the secret of the window")
    send(link, _proof(secret, b"calls", rank, other, mine, theirs), end)
    if receive(link, len(_ADMITTED), end) != _ADMITTED:
        raise RefusedError("it does not admit this rank")


def admit(link: socket.socket, secret: bytes, rank: int, size: int, seconds: float = LIMIT_SECONDS) -> int:
    """Local. Check the identity of a caller.

    Args:
        link: A connected socket. It is left with a time limit of its own.
        secret: The secret of the window.
        rank: This rank.
        size: The number of ranks; `ANY_RANK` where others may join.
        seconds: The limit for all of it.

    Returns:
        The rank that has called.

    Raises:
        RefusedError: The caller does not have the secret, calls another rank, or does not answer in time.
    """
    end = time.monotonic() + seconds
    _check_user(link)
    magic, other, called, theirs = _HELLO.unpack(receive(link, _HELLO.size, end))
    if magic != _MAGIC or other >= size or called != rank:
        raise RefusedError("it is no rank of the window, or looks for another one")
    mine = secrets.token_bytes(_NONCE_BYTES)
    send(link, mine + _proof(secret, b"called", other, rank, theirs, mine), end)
    if not hmac.compare_digest(receive(link, _PROOF_BYTES, end), _proof(secret, b"calls", other, rank, theirs, mine)):
        raise RefusedError("it does not know the secret of the window")
    send(link, _ADMITTED, end)
    return int(other)


def _proof(secret: bytes, side: bytes, caller: int, called: int, callers: bytes, calleds: bytes) -> bytes:
    # The side: else a stranger could send back what it was sent.
    text = side + struct.pack("<II", caller, called) + callers + calleds
    return hmac.new(secret, text, hashlib.sha256).digest()


def _check_user(link: socket.socket) -> None:
    if link.family == socket.AF_UNIX:
        data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(data)[1]
        if user != os.geteuid():
            raise RefusedError(f"it belongs to user {user}, and this rank to user {os.geteuid()}")


def send(link: socket.socket, data: bytes, end: float) -> None:
    """Local. Send all of some bytes.

    Args:
        link: A connection.
        data: The bytes.
        end: The latest moment, by `time.monotonic`.

    Raises:
        RefusedError: The other end has closed the connection, or reads too slowly.
    """
    try:
        link.settimeout(max(end - time.monotonic(), 1e-3))
        link.sendall(data)
    except OSError as error:
        raise RefusedError(f"it is gone ({error})") from None


def receive(link: socket.socket, count: int, end: float | None) -> bytes:
    """Local. Receive some bytes.

    Args:
        link: A connection.
        count: The number of bytes.
        end: The latest moment, by `time.monotonic`; None for any time.

    Raises:
        RefusedError: The other end has closed the connection, or does not send them in time.
    """
    data = b""
    while len(data) < count:
        try:
            link.settimeout(None if end is None else max(end - time.monotonic(), 1e-3))
            part = link.recv(count - len(data))
        except TimeoutError:
            raise RefusedError(f"it sent {len(data)} bytes of {count}, and then nothing") from None
        except OSError as error:
            raise RefusedError(f"it is gone ({error})") from None
        if not part:
            raise RefusedError(f"it ended after {len(data)} bytes of {count}")
        data += part
    return data
