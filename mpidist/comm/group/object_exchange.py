"""The exchange of Python objects between all ranks: one collective call of MPI where they are small."""

from __future__ import annotations

import pickle
import struct
from typing import Any, TypeVar

T = TypeVar("T")

# What a rank sends first: a mark, the code of its call and its number, the length of its pickled object, and the object
# itself where it fits. The records of 2,000 ranks are 500 KB.
_RECORD_BYTES = 256
_HEADER = struct.Struct("=8sqqq")
_ROOM = _RECORD_BYTES - _HEADER.size
_MARK = b"mpidist:"


def gather_objects(mpi: Any, value: T, code: int = 0, number: int = 0) -> tuple[list[int], list[int], list[T]]:
    """Collective. The codes of the ranks' calls, their numbers, and the ranks' picklable values.

    Args:
        mpi: An mpi4py intracommunicator.
        value: This rank's.
        code: Says in which call this rank is. Where codes differ no value is read, and none is returned.
        number: The number of this rank's call.

    Returns:
        The codes, the numbers and the values, each in the order of the ranks.

    Raises:
        pickle.UnpicklingError: Some rank is in another call, in which it sends something else.
    """
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    record, records = bytearray(_RECORD_BYTES), bytearray(_RECORD_BYTES * mpi.size)
    _HEADER.pack_into(record, 0, _MARK, code, number, len(data))
    if len(data) <= _ROOM:
        record[_HEADER.size : _HEADER.size + len(data)] = data
    # Not mpi4py's `allgather`, which makes two calls.
    mpi.Allgather(record, records)
    codes: list[int] = []
    numbers: list[int] = []
    lengths: list[int] = []
    for begin in range(0, len(records), _RECORD_BYTES):
        mark, its_code, its_number, length = _HEADER.unpack_from(records, begin)
        if mark != _MARK:
            raise pickle.UnpicklingError("a record without its mark")
        numbers.append(its_number)
        codes.append(its_code)
        lengths.append(length)
    if codes.count(code) < len(codes):
        return codes, numbers, []
    more = _gather_long(mpi, data, lengths) if max(lengths) > _ROOM else b""
    values: list[T] = []
    place = 0
    for rank, length in enumerate(lengths):
        if length > _ROOM:
            values.append(pickle.loads(more[place : place + length]))
            place += length
        else:
            begin = _RECORD_BYTES * rank + _HEADER.size
            values.append(pickle.loads(records[begin : begin + length]))
    return codes, numbers, values


def _gather_long(mpi: Any, data: bytes, lengths: list[int]) -> memoryview:
    """Collective. The data of all ranks for which a record has no room, end to end."""
    counts = [length if length > _ROOM else 0 for length in lengths]
    more = bytearray(sum(counts))
    mpi.Allgatherv(data if len(data) > _ROOM else b"", [more, counts])
    return memoryview(more)
