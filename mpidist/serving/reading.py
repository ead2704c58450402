"""Reading a served variable: one version of it, however fast it changes."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.serving.station import Station
from mpidist.variables.served import Place

# A server that changes a variable twice while it is read does so often: then it makes a copy itself.
_TRIES = 2
# A server that is waited for is to do this.
READ = "let a variable be read"
_WAIT_SECONDS = 0.001


class Value(NamedTuple):
    """A variable as it was read.

    Attributes:
        version: Which of its versions this is; None if that is not known.
        array: The value, of the variable's shape. It is overwritten only while nobody else holds it.
    """

    version: int | None
    array: AnyArray


def read_whole(station: Station, place: Place, known: Value | None = None, *, is_relaxed: bool = False) -> Value:
    """Local. A version of a variable, whole, in an array that the caller does not change.

    Args:
        station: Of this process.
        place: Of the variable.
        known: What was read before. It is good for an unchanged variable, and else its memory is used again where
            nobody else holds it: new memory costs more than the copy.
        is_relaxed: Whether the array may hold a part of the version after it.

    Raises:
        DeadRankError: The server is dead.
    """
    window, words = station.window, np.empty(2, np.uint64)
    with station.awaited((place.server,), READ):
        value: AnyArray | None = None
        for _ in range(_TRIES):
            window.get(place.server, place.header, words)
            window.flush(place.server)
            version = int(words[0])
            if known is not None and known.version == version:
                return known
            if value is None:
                value = known.array if known is not None and _is_sole(known) else np.empty(place.shape, place.dtype)
            window.get(place.server, place.buffers[version % 2], value.reshape(-1))
            window.flush(place.server)
            if is_relaxed:
                return Value(None, value)
            window.get(place.server, place.header, words)
            window.flush(place.server)
            # The version after the next one is made in the buffer that was read; of a table, the next one.
            if int(words[1]) < version + (1 if place.block_rows else 2):
                return Value(version, value)
            # What is known may have been overwritten.
            known = None
    while (given := station.call(place.server, "snapshot", place.number)) is None:
        # It is a table that is being restored.
        station.step(_WAIT_SECONDS)
    return Value(None, given.reshape(place.shape))


def _references(value: Value) -> int:
    return sys.getrefcount(value.array)


# How Python counts the reference of the value alone differs between its versions.
_SOLE = _references(Value(None, np.empty(0)))


def _is_sole(value: Value) -> bool:
    """Whether nobody else holds the array, or a view of it."""
    return _references(value) <= _SOLE
