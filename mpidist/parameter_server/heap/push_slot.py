"""Pushes: the changes of a closure on one server, written into a slot of its heap, and read there at the commit."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.windows.window import Window
from mpidist.parameter_server.heap.layout import ALIGNMENT, FIRST_BYTES
from mpidist.parameter_server.protocol.endpoint import Station

# A slot begins with the place and the size of the table of its changes, which follows the arrays. The server sets
# the place to 0 when the changes are applied.
_HEAD_BYTES = 16
# Changes within this many bytes of a slot are written at once, with their table: most closures need no more.
_GATHERED_BYTES = 1 << 15
# A server that is waited for is to do this.
_TAKE = "take an update"


class Change(NamedTuple):
    """A change of one variable.

    Attributes:
        kind: "assign", "add", "sub", "step", or a kind of `Scatter.scatter` after `rows.SCATTER`.
        variable: The number of the variable.
        begin: The first byte of the array in the slot.
        dtype: The dtype of the array.
        size: The number of elements of the array.
        step: The place of the step among those of the closure; -1 for another kind.
        factor: The factor of the gradient.
    """

    kind: str
    variable: int
    begin: int
    dtype: str
    size: int
    step: int = -1
    factor: float = 1.0


class Pushed:
    """The changes of one attempt on one server.

    Args:
        station: The station of this process.
        server: The rank of the server.
        offset: The offset of the slot.
        slot_bytes: The size of the slot in bytes.
    """

    def __init__(self, station: Station, server: int, offset: int, slot_bytes: int) -> None:
        self._station = station
        self._server = server
        self._offset = offset
        self._slot_bytes = slot_bytes
        self._end = _HEAD_BYTES
        self._changes: list[Change] = []
        # The error of a change that could not be written: the function may have handled it.
        self._error: MemoryError | None = None
        # The beginning of the slot, as long as nothing is written there.
        self._gathered: AnyArray | None = None if slot_bytes < _GATHERED_BYTES else np.empty(_GATHERED_BYTES, np.uint8)

    def add(self, kind: str, variable: int, array: AnyArray, *, step: int = -1, factor: float = 1.0) -> int:
        """Local. Write a change; the array may be changed afterwards. Returns its place in the heap.

        Args:
            kind: See `Change`.
            variable: The number of the variable.
            array: The array of its dtype.
            step: See `Change`.
            factor: See `Change`.

        Raises:
            MemoryError: The slot is too small, or the server has no memory for it (HeapFullError).
        """
        array = np.ascontiguousarray(array)
        begin = -(-self._end // ALIGNMENT) * ALIGNMENT
        end = begin + array.nbytes
        try:
            self._require(end)
        except MemoryError as error:
            self._error = error
            raise
        if self._gathered is not None and end <= _GATHERED_BYTES:
            self._gathered[begin:end] = as_bytes(array)
        else:
            self.write()
            self._put((begin, array.reshape(-1)))
        self._end = end
        # The text of a dtype of ml_dtypes, which is not one of NumPy's own, says only how many bytes it has.
        dtype = array.dtype.name if array.dtype.isbuiltin == 2 else array.dtype.str
        self._changes.append(Change(kind, variable, begin, dtype, array.size, step, factor))
        return self._offset + begin

    def write(self) -> None:
        """Local. Write the changes so far, so that they can be read. Later ones are written one by one."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None and self._end > _HEAD_BYTES:
            self._put((_HEAD_BYTES, gathered[_HEAD_BYTES : self._end]))

    def close(self) -> None:
        """Local. Write the table of changes, so that the server can read all of them.

        Raises:
            MemoryError: There was no memory for one of the changes, or for the table. Others that belong to it, such as
                the rest of an optimizer's step, must not count alone.
        """
        if self._error is not None:
            raise self._error
        table = np.frombuffer(pickle.dumps([tuple(change) for change in self._changes]), np.uint8)
        head, end = np.array([self._end, table.size], np.uint64), self._end + table.size
        self._require(end)
        if self._gathered is not None and end <= _GATHERED_BYTES:
            self._gathered[:_HEAD_BYTES] = as_bytes(head)
            self._gathered[self._end : end] = table
            self._put((0, self._gathered[:end]))
        else:
            self.write()
            self._put((0, head), (self._end, table))

    def _put(self, *parts: tuple[int, AnyArray]) -> None:
        window = self._station.window
        with self._station.awaited((self._server,), _TAKE):
            for begin, array in parts:
                window.put(self._server, self._offset + begin, array)
            window.flush(self._server)

    def _require(self, byte_count: int) -> None:
        if byte_count > self._slot_bytes:
            raise MemoryError(
                f"a closure, or the coordinator, pushes {byte_count} bytes or more to one server, and a slot of its "
                f"heap has {self._slot_bytes}: give ServerOptions(slot_bytes={2 * byte_count}) or a larger heap_bytes"
            )
        key = self._server, self._offset
        have = self._station.reserved.get(key, FIRST_BYTES)
        if byte_count > have:
            # Seldom: a slot keeps its memory.
            wish = min(max(byte_count, 2 * have), self._slot_bytes)
            got = self._station.call(self._server, "reserve", self._offset + have, byte_count - have, wish - have)
            self._station.reserved[key] = have + got


def is_free(window: Window, server: int, offset: int) -> bool:
    """Local. Whether a server has applied the content of a slot.

    Args:
        window: The window to the server.
        server: The rank of the server.
        offset: The offset of the slot.
    """
    place = np.empty(1, np.uint64)
    window.get(server, offset, place)
    window.flush(server)
    return not place[0]


def free_slot(memory: AnyArray, offset: int) -> None:
    """Local. Note in a slot that its content is applied.

    Args:
        memory: The heap.
        offset: The offset of the slot.
    """
    memory[offset : offset + 8] = 0


def read_pushed(memory: AnyArray, offset: int) -> Iterator[tuple[Change, AnyArray]]:
    """Local. The changes in a slot, in their order, with their arrays, which may be overwritten.

    Args:
        memory: The heap.
        offset: The offset of the slot.
    """
    begin, size = memory[offset : offset + _HEAD_BYTES].view(np.uint64).tolist()
    table: list[tuple[Any, ...]] = pickle.loads(memory[offset + begin : offset + begin + size].tobytes())
    for entry in table:
        change = Change(*entry)
        dtype = named_dtype(change.dtype)
        start = offset + change.begin
        yield change, memory[start : start + change.size * dtype.itemsize].view(dtype)
