"""The exchange of Python objects between all ranks, which moves few bytes where they are the same on all of them.

First the ranks combine some numbers: of their calls, and a checksum and the length of their pickled objects. Most
objects are what all ranks must have alike, so most exchanges end there, with as many bytes on 65,536 ranks as on two.
Else each rank gets the objects of all.
"""

from __future__ import annotations

import functools
import importlib
import pickle
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# Objects up to this length travel in records as long as the longest of them; what follows an object's end is not read.
_RECORD_BYTES = 512
_MARK = int.from_bytes(b"mpidist:", "big")
# The largest prime below 2**62: checksums are integers of MPI, and those of two objects are hardly ever the same.
_PRIME = (1 << 62) - 57


class Met(NamedTuple):
    """The numbers of all ranks, combined.

    Attributes:
        is_one_call: Whether all ranks are in the same call.
        numbers: The least and the largest number of a rank's call.
        least: The least value.
        largest: The largest value.
        length: The largest length.
    """

    is_one_call: bool
    numbers: tuple[int, int]
    least: int
    largest: int
    length: int


def meet(mpi: Any, code: int, number: int, value: int, length: int = 0) -> Met:
    """Collective. Combine some integers of all ranks.

    Whatever they combine by this is one call of MPI with as many bytes, so that it finds ranks in other calls.

    Args:
        mpi: An mpi4py intracommunicator.
        code: Says in which call this rank is.
        number: The number of this rank's call.
        value: An integer of 63 bits.
        length: Another one.

    Raises:
        pickle.UnpicklingError: Some rank is in another call, in which it sends something else.
    """
    mpi4py = _mpi4py()
    numbers = array("q", (_MARK, -_MARK, code, -code, number, -number, value, -value, length))
    # The largest of the negative ones is the least.
    mpi.Allreduce(mpi4py.IN_PLACE, [numbers, len(numbers), mpi4py.INT64_T], mpi4py.MAX)
    if numbers[0] != _MARK or numbers[1] != -_MARK:
        raise pickle.UnpicklingError("numbers without their mark")
    return Met(numbers[2] == -numbers[3], (-numbers[5], numbers[4]), -numbers[7], numbers[6], numbers[8])


def gather_objects(mpi: Any, value: T, code: int = 0, number: int = 0) -> tuple[Met, list[T]]:
    """Collective. The ranks' picklable values; they may be the same object, which nobody changes.

    Args:
        mpi: An mpi4py intracommunicator.
        value: This rank's.
        code: Says in which call this rank is. Where codes differ no value is sent, and none is returned.
        number: The number of this rank's call.

    Returns:
        What the ranks are in, and the values in the order of the ranks.

    Raises:
        pickle.UnpicklingError: See `meet`.
    """
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    met = meet(mpi, code, number, int.from_bytes(data, "little") % _PRIME, len(data))
    if not met.is_one_call:
        return met, []
    size = mpi.size
    if met.least == met.largest:
        return met, [pickle.loads(data)] * size
    if met.length <= _RECORD_BYTES:
        records = bytearray(met.length * size)
        # Not mpi4py's `allgather`, which makes two calls.
        mpi.Allgather(data.ljust(met.length, b"."), records)
        begins = range(0, len(records), met.length)
        return met, [pickle.loads(records[begin : begin + met.length]) for begin in begins]
    return met, [pickle.loads(one) for one in _gather_long(mpi, data)]


def gather_to_first(mpi: Any, data: bytes) -> list[Any]:
    """Collective. The ranks' objects, of which each passes the pickled bytes, on rank 0; nothing on the others."""
    if mpi.rank:
        mpi.Gather(array("q", (len(data),)), None)
        mpi.Gatherv(data, None)
        return []
    lengths = array("q", bytes(8 * mpi.size))
    mpi.Gather(array("q", (len(data),)), lengths)
    everyone = bytearray(sum(lengths))
    mpi.Gatherv(data, [everyone, lengths.tolist()])
    return list(map(pickle.loads, _parts(everyone, lengths)))


def _gather_long(mpi: Any, data: bytes) -> Iterator[memoryview]:
    """Collective. The data of all ranks, where those of one may be far longer than those of the others."""
    lengths = array("q", bytes(8 * mpi.size))
    mpi.Allgather(array("q", (len(data),)), lengths)
    everyone = bytearray(sum(lengths))
    mpi.Allgatherv(data, [everyone, lengths.tolist()])
    return _parts(everyone, lengths)


def _parts(everyone: bytearray, lengths: Iterable[int]) -> Iterator[memoryview]:
    begin = 0
    for length in lengths:
        yield memoryview(everyone)[begin : begin + length]
        begin += length


@functools.cache
def _mpi4py() -> Any:
    # Loaded by name: it is there, since `mpi` is one of its objects.
    return importlib.import_module("mpi4py.MPI")
