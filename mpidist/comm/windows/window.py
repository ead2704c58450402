"""The window: memory of some ranks that all ranks of a group read and write, and messages between two of them.

Nothing in it is collective but its beginning and its end, so that it continues after the death of a rank.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Protocol, cast

import numpy as np

from mpidist.arguments import described, whole
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.gathering import gather
from mpidist.comm.group import agreement
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.comm.windows.ways import OVERRIDE, asked_for, choose, host_count
from mpidist.options import WindowOptions, WindowWay

logger = logging.getLogger("mpidist")

# The limit of a message. Larger data is sent through a heap.
MAX_MESSAGE_BYTES = 1 << 30
_LAST_ROW = (1 << 63) - 1


class Window(Resource, Protocol):
    """Heaps of some ranks, which all ranks of a group read and write one-sidedly, and messages between two ranks.

    One thread at a time may use it. After a death it serves the ranks that are left: nothing waits for a rank that is
    known to be dead. `close` is Collective as long as all ranks are alive, and Local afterwards. Other ranks' gets and
    puts may need this rank's help: it helps in every call, and in `poll` in particular.

    Attributes:
        rank: This process's rank, 0 to `size` - 1.
        size: Number of ranks.
        heap_sizes: The number of bytes in each rank's heap; 0 for a rank that offers none.
        memory: This rank's heap: uint8, writable, of shape `(heap_sizes[rank],)`. Its first content is undefined. No
            view of it may be used after `close`.
        is_for_threads: Whether it may be used by one thread and then by another.
        closed: The text of the error after its end.
    """

    rank: int
    size: int
    heap_sizes: tuple[int, ...]
    memory: AnyArray
    is_for_threads: bool = True
    closed: str = "this window is closed: open another one, on all ranks"

    def explain_end(self, text: str) -> None:
        """Local. Set the text of the error for calls after the end."""
        self.closed = text

    def get(self, rank: int, offset: int, into: AnyArray) -> None:
        """Local. Begin to read a rank's heap.

        Args:
            rank: The owner of the heap; this rank's own is allowed.
            offset: The first byte.
            into: The array to read into: a writable, C-contiguous NumPy array of any numeric dtype. Its values
                are valid after `flush`.

        Raises:
            ValueError: There is no such rank, its heap has fewer bytes; `into` is read-only or not contiguous.
            TypeError: `into` is no NumPy array, or one of Python objects.
            DeadRankError: The rank is lost.
            RuntimeError: The window is closed.
        """
        ...

    def get_rows(self, rank: int, offset: int, numbers: AnyArray, into: AnyArray) -> None:
        """Local. Begin to read rows of an array in a rank's heap: one call, and one message at most, for all of them.

        What calls of it read of one rank is read in the order of the calls. It is not ordered with `get` and `put`.

        Args:
            rank: The owner of the heap; this rank's own is allowed.
            offset: The first byte of row 0.
            numbers: The numbers of the rows, int64 of shape (n,), in any order; one may occur several times.
            into: See `get`; its shape is (n, ...): `into[i]` gets row `numbers[i]`. Its shape says how long a row is.

        Raises:
            Exception: See `get`; ValueError and TypeError also for `numbers`.
        """
        ...

    def put(self, rank: int, offset: int, array: AnyArray) -> None:
        """Local. Begin to write into a rank's heap.

        Args:
            rank: The owner of the heap; this rank's own is allowed.
            offset: The first byte.
            array: The array to write, C-contiguous, of any numeric dtype. It must not change until `flush`.

        Raises:
            Exception: See `get`.
        """
        ...

    def flush(self, rank: int) -> None:
        """Local. Complete gets and puts: `into` arrays hold the values, and that rank can read what was put.

        Args:
            rank: The owner of the heap that was read and written.

        Raises:
            ValueError: There is no such rank.
            DeadRankError: The rank has died meanwhile: what was read and written is undefined.
            RuntimeError: The window is closed.
        """
        ...

    def ring(self, rank: int, message: bytes) -> None:
        """Local. Send a message. It does not wait for the receiver, and nothing is sent to a lost rank.

        Messages of one rank to another arrive in their order. The receiver can read what this rank has flushed before.
        A large message continues while this rank is in calls of the window.

        Args:
            rank: The receiver; this rank itself is allowed.
            message: The message, at most 1 GiB.

        Raises:
            ValueError: There is no such rank, or the message is too large.
            TypeError: `message` is not of bytes.
            RuntimeError: The window is closed.
        """
        ...

    def poll(self, seconds: float = 0.0) -> tuple[int, bytes] | None:
        """Local. The next message, and progress for the gets, puts and messages of this rank and others.

        Args:
            seconds: The time limit for a message. For a moment after the last message it spins, then it sleeps, ever
                longer up to 10 ms where the kernel does not wake it.

        Returns:
            The sender and the message, or None if none has come.

        Raises:
            RuntimeError: The window is closed.
        """
        ...

    def is_near(self, rank: int) -> bool:
        """Local. Whether a rank's heap is memory of this node, which is read without that rank's help."""
        del rank
        return False

    def lost(self) -> frozenset[int]:
        """Local. The ranks that are known to be dead, as the kernel, a connection or MPI has said."""
        ...

    def forget(self, rank: int) -> None:
        """Local. Leave a lost rank out: nothing that it has sent is delivered from now on, and nothing is sent to it.

        Args:
            rank: The rank, which may still be alive.
        """
        ...


class SoloWindow(Window):
    """The window of one rank.

    Args:
        heap_bytes: The size of its heap.
    """

    def __init__(self, heap_bytes: int) -> None:
        self.rank = 0
        self.size = 1
        self.heap_sizes: tuple[int, ...] = (heap_bytes,)
        self.memory: AnyArray = np.empty(heap_bytes, np.uint8)
        self._messages: list[bytes] = []

    def get(self, rank: int, offset: int, into: AnyArray) -> None:
        """Local. See `Window.get`."""
        view = part_of_heap(self, rank, offset, into, writes=True)
        view[:] = self.memory[offset : offset + view.size]

    def get_rows(self, rank: int, offset: int, numbers: AnyArray, into: AnyArray) -> None:
        """Local. See `Window.get_rows`."""
        gather(self.memory, offset, numbers, rows_of_heap(self, rank, offset, numbers, into))

    def put(self, rank: int, offset: int, array: AnyArray) -> None:
        """Local. See `Window.put`."""
        view = part_of_heap(self, rank, offset, array)
        self.memory[offset : offset + view.size] = view

    def flush(self, rank: int) -> None:
        """Local. See `Window.flush`."""
        require_rank(self, rank)

    def ring(self, rank: int, message: bytes) -> None:
        """Local. See `Window.ring`."""
        self._messages.append(checked_message(self, rank, message))

    def poll(self, seconds: float = 0.0) -> tuple[int, bytes] | None:
        """Local. See `Window.poll`. No other rank could send a message, so it does not wait."""
        del seconds
        require_open(self)
        return (0, self._messages.pop(0)) if self._messages else None

    def lost(self) -> frozenset[int]:
        """Local. No rank is lost."""
        return frozenset()

    def forget(self, rank: int) -> None:
        """Local. Do nothing: this rank is alive."""
        require_rank(self, rank)

    def _end(self, *, is_collective: bool) -> None:
        del is_collective
        self.memory = np.empty(0, np.uint8)


def require_open(window: Window) -> None:
    """Local. Raise RuntimeError if the window is closed."""
    if window.is_closed:
        raise RuntimeError(window.closed)


def require_rank(window: Window, rank: int) -> None:
    """Local. Raise unless the window is open and has such a rank; see `Window.flush`."""
    # Most calls pass the first look: these checks are made at each transfer.
    if type(rank) is int and 0 <= rank < window.size and not window.is_closed:
        return
    require_open(window)
    if whole("rank", rank) not in range(window.size):
        raise ValueError(f"`rank` must be between 0 and {window.size - 1}, the ranks of the window, got {rank}")


def part_of_heap(window: Window, rank: int, offset: int, array: AnyArray, *, writes: bool = False) -> AnyArray:
    """Local. The bytes of an array that is to be read from a heap, or written there.

    Args:
        window: The window.
        rank: The owner of the heap.
        offset: The first byte in the heap.
        array: The array.
        writes: Whether the array is written to.

    Returns:
        The array's memory as uint8, of one axis.

    Raises:
        Exception: See `Window.get`.
    """
    require_rank(window, rank)
    _require_array("into" if writes else "array", array, writes=writes)
    _require_bytes(window, rank, offset, whole("offset", offset) + array.nbytes)
    return as_bytes(array)


def rows_of_heap(window: Window, rank: int, offset: int, numbers: AnyArray, into: AnyArray) -> AnyArray:
    """Local. The bytes into which rows of a heap are to be read.

    Args:
        window: The window.
        rank: The owner of the heap.
        offset: The first byte of row 0.
        numbers: The numbers of the rows.
        into: The array.

    Returns:
        The array's memory as uint8, of shape (n, row bytes).

    Raises:
        Exception: See `Window.get_rows`.
    """
    require_rank(window, rank)
    _require_array("into", into, writes=True)
    if not isinstance(numbers, np.ndarray) or numbers.dtype != np.int64:
        raise TypeError(f"`numbers` must be a NumPy array of int64, got {described(numbers)}")
    if numbers.ndim != 1 or into.shape[:1] != numbers.shape:
        raise ValueError(
            f"`numbers` must have one dimension, and `into` a row for each of them, got shapes {numbers.shape} and "
            f"{into.shape}"
        )
    if not numbers.size:
        _require_bytes(window, rank, offset, whole("offset", offset))
        return as_bytes(into).reshape(0, 0)
    row_bytes = into.nbytes // len(numbers)
    # A negative number is a huge one without its sign.
    last = int(np.maximum.reduce(numbers.view(np.uint64)))
    if last > _LAST_ROW:
        raise ValueError(f"`numbers` must not be negative, got {int(numbers.min())}")
    _require_bytes(window, rank, offset, whole("offset", offset) + (last + 1) * row_bytes)
    return as_bytes(into).reshape(len(numbers), row_bytes)


def _require_array(name: str, array: AnyArray, *, writes: bool) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        got = f"one of dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"`{name}` must be a NumPy array of numbers, in host memory, got {got}")
    if not array.flags.c_contiguous or (writes and not array.flags.writeable):
        wanted, got = ("writable", "a read-only one") if array.flags.c_contiguous else ("C-contiguous", "one with gaps")
        raise ValueError(f"`{name}` must be a {wanted} array, got {got} of shape {array.shape}: give a copy of it")


def _require_bytes(window: Window, rank: int, first: int, end: int) -> None:
    if not 0 <= first <= end <= window.heap_sizes[rank]:
        raise ValueError(
            f"bytes {first} to {end} are not in the heap of rank {rank}, which has {window.heap_sizes[rank]} bytes"
        )


def checked_message(window: Window, rank: int, message: object) -> bytes:
    """Local. A message as bytes that do not change; raises as `Window.ring`."""
    require_rank(window, rank)
    if type(message) is bytes and len(message) <= MAX_MESSAGE_BYTES:
        return message
    if not isinstance(message, (bytes, bytearray, memoryview)):
        raise TypeError(f"`message` must be bytes, got {type(message).__name__}")
    if memoryview(message).nbytes > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message has at most {MAX_MESSAGE_BYTES} bytes, got {memoryview(message).nbytes}: put what is larger "
            "into a heap"
        )
    return bytes(message)


# Loaded by name, since the first one starts MPI.
WAYS = {
    WindowWay.RMA: ("mpidist.comm.windows.rma.window", "RmaWindow"),
    WindowWay.SOCKETS: ("mpidist.comm.windows.sockets.window", "SocketWindow"),
}


def open_window(
    communicator: Communicator, heap_bytes: int = 0, options: WindowOptions | None = None, admits_later: bool = False
) -> Window:
    """Collective. Open a window over the ranks of a communicator.

    Args:
        communicator: The ranks. The window has a communicator of its own, and this one is free for anything else.
        heap_bytes: The size of the heap that this rank offers; ranks may differ.
        options: The transport, and its limits; the same on all ranks. `MPIDIST_WINDOW` takes precedence.
        admits_later: Whether processes may join that are not in the communicator, by sockets; the same on all ranks.

    Returns:
        The window; the caller closes it.

    Raises:
        ValueError: `heap_bytes` is negative, or the environment names no transport, or MPI where others may join; on
            every rank.
        MismatchError: The transports differ between ranks.
        OSError: A host's shared memory has no room for the heaps of its ranks, or no port is
            free; on every rank.
    """
    given = options or WindowOptions()
    wanted, size = agreement.together(
        communicator, "opening a window",
        lambda: (asked_for(given, admits_later=admits_later), whole("heap_bytes", heap_bytes, least=0)),
    )
    agreement.same_on_all(
        communicator, "the way of a window, and its options", (wanted.name, given.ports, given.silence_seconds),
        f"Give the same options, and the same {OVERRIDE} in the environment, on all ranks.",
    )
    if communicator.size == 1:
        return SoloWindow(size)
    way, why = choose(wanted, communicator)
    if communicator.rank == 0:
        logger.info("window %s: %s; %d ranks on %d hosts", way.name, why, communicator.size, host_count(communicator))
    module, name = WAYS[way]
    kind: Any = getattr(importlib.import_module(module), name)
    own = communicator.split(0, communicator.rank)
    try:
        return cast(Window, kind(own, size, given, **{"admits_later": True} if admits_later else {}))
    except Exception:
        # They raise on all ranks.
        own.close()
        raise
