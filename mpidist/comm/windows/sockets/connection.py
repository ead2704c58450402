"""A connection between two ranks of a window: frames are sent and received without waiting.

A frame is a header and a body. The rank that has called asks, the other one answers, in the order of the questions.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections import deque
from collections.abc import Callable

# The kind of the frame, a place in the heap, the number of bytes.
_HEADER = struct.Struct("<B7xQQ")
# The number of buffers that one call of the kernel takes, at most (IOV_MAX is 1,024).
_PARTS = 64
# So much is taken from one connection before the next one has its turn.
_TURN_BYTES = 8 << 20

NOTHING = memoryview(b"")


class Kind(enum.IntEnum):
    """Kinds of frames. The first ones come from the rank that has called, the others are answers."""

    MESSAGE = 1
    GET = 2
    PUT = 3
    SYNC = 4
    LEAVE = 5
    HOLD = 6
    ASK = 7
    HELLO = 8
    DATA = 16
    SYNCED = 17


class BrokenConnectionError(Exception):
    """The connection has ended, or the other end has sent what no rank sends; the text says which."""


# Returns the memory that receives a frame's body, given its kind, place and size; raises BrokenConnectionError.
Place = Callable[["Connection", Kind, int, int], memoryview]
# Takes a frame whose body is there: its kind, place, size and body.
Take = Callable[["Connection", Kind, int, int, memoryview], None]


class Connection:
    """One end of a connection.

    Args:
        rank: The rank at the other end.
        place: See `Place`.
        take: See `Take`.

    Attributes:
        link: The socket; None as long as it is being opened.
        expected: The answers that are awaited: the memory for a get's bytes, or None for the answer to SYNC.
        is_synced: Whether the other end was asked to say that it has all that was put.
        was_used: Whether a frame has come.
        is_held: Whether this connection is only held open, and nothing is sent over it.
    """

    def __init__(self, rank: int, place: Place, take: Take) -> None:
        self.rank = rank
        self.link: socket.socket | None = None
        self.expected: deque[memoryview | None] = deque()
        self.is_synced = True
        self.was_used = False
        self.is_held = False
        self._place = place
        self._take = take
        self._queue: deque[memoryview] = deque()
        self._header = memoryview(bytearray(_HEADER.size))
        # The frame that is being received: kind, place and size; None while its header is received.
        self._frame: tuple[Kind, int, int] | None = None
        self._into = self._header
        self._got = 0

    def has_more(self) -> bool:
        """Local. Whether data waits to be sent."""
        return bool(self._queue)

    def send(self, kind: Kind, at: int = 0, size: int = 0, body: memoryview = NOTHING) -> None:
        """Local. Send a frame, as far as the kernel takes it now.

        Args:
            kind: The kind of the frame.
            at: A place in a heap.
            size: The number of bytes.
            body: The bytes after the header; they must not change until they are sent.

        Raises:
            BrokenConnectionError: The connection has ended.
        """
        self._queue.append(memoryview(_HEADER.pack(kind, at, size)))
        if body.nbytes:
            self._queue.append(body)
        self.write()

    def write(self) -> None:
        """Local. Send waiting data, as far as the kernel takes it now; errors as in `send`."""
        queue = self._queue
        while queue and self.link is not None:
            try:
                sent = self.link.sendmsg([queue[number] for number in range(min(len(queue), _PARTS))])
            except BlockingIOError:
                return
            except OSError as error:
                raise BrokenConnectionError(str(error)) from error
            while queue and sent >= queue[0].nbytes:
                sent -= queue.popleft().nbytes
            if sent:
                queue[0] = queue[0][sent:]

    def read(self) -> None:
        """Local. Process the frames that have arrived.

        Raises:
            BrokenConnectionError: The connection has ended, or received data is no frame.
        """
        taken = 0
        while self.link is not None and taken < _TURN_BYTES:
            if self._got < self._into.nbytes:
                try:
                    count = self.link.recv_into(self._into[self._got :])
                except BlockingIOError:
                    return
                except OSError as error:
                    raise BrokenConnectionError(str(error)) from error
                if not count:
                    where = "" if self._is_between() else " in the middle of a frame"
                    raise BrokenConnectionError(f"it has ended{where}")
                taken += count
                self._got += count
            if self._got == self._into.nbytes:
                self._advance()

    def divert(self) -> None:
        """Local. Discard the rest of a put that is being received."""
        if self._frame is not None and self._frame[0] is Kind.PUT:
            self._into = memoryview(bytearray(self._into.nbytes))

    def _is_between(self) -> bool:
        return self._frame is None and self._got == 0

    def _advance(self) -> None:
        if self._frame is None:
            number, at, size = _HEADER.unpack(self._header)
            try:
                kind = Kind(number)
            except ValueError:
                raise BrokenConnectionError(f"there is no frame of kind {number}") from None
            self._frame = (kind, at, size)
            self._into = self._place(self, kind, at, size)
            self._got = 0
            if self._into.nbytes:
                return
        kind, at, size = self._frame
        body, self._frame, self._into, self._got = self._into, None, self._header, 0
        self.was_used = True
        self._take(self, kind, at, size, body)
