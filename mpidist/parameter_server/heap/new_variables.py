"""Descriptions of new variables, by which servers make them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpidist.parameter_server.heap.rows import block_count
from mpidist.variables.kinds.served import ServedPlace
from mpidist.variables.making.initial import Placed


class Drawn(NamedTuple):
    """An initial value that its server makes in pieces, in place: no process holds another copy.

    Attributes:
        function: The function that returns the pieces.
        shape: The shape of the value.
        offset: The place of its first element in the whole variable, of which it may be a shard.
        dtype: The dtype of the value.
    """

    function: Placed
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: np.dtype[Any]


class NewVariable(NamedTuple):
    """A variable that its server is to make.

    Attributes:
        place: The place of the variable.
        name: A name for display and errors.
        fill: The number for all elements.
        value: The bytes of another value, or the way to make it.
    """

    place: ServedPlace
    name: str
    fill: complex = 0.0
    value: bytes | Drawn | None = None


def end_of(place: ServedPlace) -> int:
    """Local. The first byte of the heap after a variable."""
    if place.block_rows:
        return place.versions + 8 * block_count(place)
    return place.buffers[1] + place.bytes
