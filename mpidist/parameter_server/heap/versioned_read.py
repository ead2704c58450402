"""Reading a served variable: one version of it, however fast it changes."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import NamedTuple, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.windows.window import Window
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.variables.kinds.served import ServedPlace

# A server that changes a variable twice while it is read does so often: then it makes a copy itself.
_TRIES = 2
# A server that is waited for is to do this.
READ = "let a variable be read"
_WAIT_SECONDS = 0.001


class Value(NamedTuple):
    """A variable as it was read.

    Attributes:
        version: The number of the version; None if it is not known.
        array: The value, of the variable's shape. It is overwritten only while there is no other reference to it.
    """

    version: int | None
    array: AnyArray


def read_whole(station: Station, place: ServedPlace, known: Value | None = None, *, is_relaxed: bool = False) -> Value:
    """Local. A version of a variable, whole, in an array that the caller does not change.

    Args:
        station: The station of this process.
        place: The place of the variable.
        known: The last value read. It is returned for an unchanged variable; else its memory is reused where
            there is no other reference to it: new memory costs more than the copy.
        is_relaxed: Whether the array may hold a part of the version after it.

    Raises:
        DeadRankError: The server is dead.
    """
    memory = known.array if known is not None and is_sole(known) else None
    with station.awaited((place.server,), READ):
        try:
            next(read_in_pieces(station.window, place, known, memory, is_relaxed=is_relaxed))
        except StopIteration as end:
            if end.value is not None:
                return cast(Value, end.value)
    while (given := station.call(place.server, "copy", place.number)) is None:
        # It is a table that is being restored.
        station.step(_WAIT_SECONDS)
    return Value(None, given.reshape(place.shape))


def read_in_pieces(
    window: Window, place: ServedPlace, known: Value | None, memory: AnyArray | None = None, *,
    is_relaxed: bool = False, piece_bytes: int | None = None,
) -> Generator[None, None, Value | None]:
    """Local. As `read_whole`, with pauses in which the window is free for others.

    Args:
        window: The window to the server.
        place: The place of the variable.
        known: The last value read; returned for an unchanged variable.
        memory: The memory for the value; by default new memory.
        is_relaxed: See `read_whole`.
        piece_bytes: The number of bytes between two pauses; default: no pause.

    Returns:
        None if the variable changes too fast.

    Raises:
        DeadRankError: The server is dead.
    """
    words = np.empty(2, np.uint64)
    for _ in range(_TRIES):
        window.get(place.server, place.header, words)
        window.flush(place.server)
        version = int(words[0])
        if known is not None and known.version == version:
            return known
        value = memory = np.empty(place.shape, place.dtype) if memory is None else memory
        flat, begin = value.reshape(-1), place.buffers[version % 2]
        step = max(1, flat.size if piece_bytes is None else piece_bytes // flat.itemsize)
        for at in range(0, flat.size, step):
            if at:
                yield
            window.get(place.server, begin + at * flat.itemsize, flat[at : at + step])
            window.flush(place.server)
        if is_relaxed:
            return Value(None, value)
        window.get(place.server, place.header, words)
        window.flush(place.server)
        # The version after the next one is made in the buffer that was read; of a table, the next one.
        if int(words[1]) < version + (1 if place.block_rows else 2):
            return Value(version, value)
        # The known version may have been overwritten.
        known = None
    return None


def _references(value: Value) -> int:
    return sys.getrefcount(value.array)


# How Python counts the reference of the value alone differs between its versions.
_SOLE = _references(Value(None, np.empty(0)))


def is_sole(value: Value) -> bool:
    """Local. Whether there is no other reference to the array, or to a view of it."""
    return _references(value) <= _SOLE
