"""Objects of all ranks, small and large ones in one exchange, and the detection of another call."""

from __future__ import annotations

import pickle

import pytest

from mpidist.comm.communicator import Communicator
from mpidist.comm.object_exchange import gather_objects

pytestmark = pytest.mark.mpi(min_size=2)


def test_values_of_all_sizes_arrive(communicator: Communicator) -> None:
    """Around the length up to which a value travels with its header, on some ranks or on all."""
    size = communicator.size
    for length in [*range(180, 260), 70_000]:
        for large in ({0}, {size - 1}, set(range(size))):
            values = [bytes([rank + 1]) * (length if rank in large else 3) for rank in range(size)]
            codes, told = gather_objects(communicator.mpi, values[communicator.rank], code=-5)
            assert told == values
            assert codes == [-5] * size


def test_no_value_is_read_where_codes_differ(communicator: Communicator) -> None:
    codes, told = gather_objects(communicator.mpi, "x" * 1000, code=communicator.rank)
    assert codes == list(range(communicator.size))
    assert told == []
    assert gather_objects(communicator.mpi, communicator.rank)[1] == list(range(communicator.size))


def test_what_another_call_sends_is_not_read(communicator: Communicator) -> None:
    other = bytearray(256 * communicator.size)
    if communicator.rank == 0:
        communicator.mpi.Allgather(bytes(256), other)
    else:
        with pytest.raises(pickle.UnpicklingError, match="a record without its mark"):
            gather_objects(communicator.mpi, 1)
