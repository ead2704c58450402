"""The exchange of Python objects between all ranks, which sends few bytes if the objects are the same on all ranks.

First the ranks combine a checksum and the length of their pickled objects. Most objects must be the same on all ranks,
so most exchanges end there, with as many bytes on 65,536 ranks as on two. If objects differ, each rank gets those of
all ranks.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pickle
from array import array
from typing import Any, TypeVar

T = TypeVar("T")

# Objects up to this length are sent in records as long as the longest object; the padding after an object is not read.
_RECORD_BYTES = 512
# The largest prime below 2**62. An object's checksum, its bytes modulo this, fits an integer of MPI.
_PRIME = (1 << 62) - 57
# The largest size that is compared: the checksum of 1 MB takes 1 ms, and sending 1 MB takes less.
_COMPARED_BYTES = 1 << 20


def checksum_of(data: bytes, rank: int) -> int:
    """Local. An integer that differs between ranks whose data differ, and between all ranks whose data are long.

    Args:
        data: This rank's object, pickled.
        rank: This rank.
    """
    return int.from_bytes(data, "little") % _PRIME if len(data) <= _COMPARED_BYTES else ~rank


def gather_objects(mpi: Any, value: T) -> list[T]:
    """Collective. The ranks' values. All may be the same object, so the caller must not change it.

    Args:
        mpi: An mpi4py intracommunicator.
        value: The picklable value of this rank.
    """
    mpi4py = _mpi4py()
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    checksum = checksum_of(data, mpi.rank)
    largest = array("q", (checksum, -checksum, len(data)))
    mpi.Allreduce(mpi4py.IN_PLACE, [largest, 3, mpi4py.INT64_T], mpi4py.MAX)
    return [value] * mpi.size if largest[0] == -largest[1] else gather_data(mpi, data, largest[2])


def gather_data(mpi: Any, data: bytes, longest: int) -> list[Any]:
    """Collective. The objects of all ranks.

    Args:
        mpi: An mpi4py intracommunicator.
        data: This rank's object, pickled.
        longest: The largest length of a rank's data.
    """
    size = mpi.size
    if longest <= _RECORD_BYTES:
        records = bytearray(longest * size)
        # mpi4py's `allgather` would make two calls of MPI.
        mpi.Allgather(data.ljust(longest, b"."), records)
        return [pickle.loads(records[begin : begin + longest]) for begin in range(0, len(records), longest)]
    # The data of one rank may be far longer than the data of the others, so records of one length would be too long.
    lengths = array("q", bytes(8 * size))
    mpi.Allgather(array("q", (len(data),)), lengths)
    everyone = memoryview(bytearray(sum(lengths)))
    mpi.Allgatherv(data, [everyone, lengths.tolist()])
    ends = itertools.accumulate(lengths)
    return [pickle.loads(everyone[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


@functools.cache
def _mpi4py() -> Any:
    # Loaded by name: the module is already imported, since `mpi` is one of its objects.
    return importlib.import_module("mpi4py.MPI")
