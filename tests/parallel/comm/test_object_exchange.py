"""Objects of all ranks, small and large ones in one exchange, and the detection of another call."""

from __future__ import annotations

import pickle

import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.object_exchange import gather_objects
from mpidist.recorder.calls import INNER, NEXT, STATE

pytestmark = pytest.mark.mpi(min_size=2)


def test_values_of_all_sizes_arrive(communicator: Communicator) -> None:
    """Around the length up to which a value travels with its header, on some ranks or on all."""
    size = communicator.size
    for length in [*range(180, 260), 70_000]:
        for large in ({0}, {size - 1}, set(range(size))):
            values = [bytes([rank + 1]) * (length if rank in large else 3) for rank in range(size)]
            codes, numbers, told = gather_objects(communicator.mpi, values[communicator.rank], -5, communicator.rank)
            assert told == values
            assert codes == [-5] * size
            assert numbers == list(range(size))


def test_no_value_is_read_where_codes_differ(communicator: Communicator) -> None:
    codes, _, told = gather_objects(communicator.mpi, "x" * 1000, code=communicator.rank)
    assert codes == list(range(communicator.size))
    assert told == []
    assert gather_objects(communicator.mpi, communicator.rank)[-1] == list(range(communicator.size))


def test_what_another_call_sends_is_not_read(communicator: Communicator) -> None:
    other = bytearray(256 * communicator.size)
    if communicator.rank == 0:
        communicator.mpi.Allgather(bytes(256), other)
    else:
        with pytest.raises(pickle.UnpicklingError, match="a record without its mark"):
            gather_objects(communicator.mpi, 1)


def test_after_an_error_of_all_ranks_calls_are_counted_alike(communicator: Communicator) -> None:
    """Who counts other ranks' calls, as the watchdog does, would else take this one for late, for ever."""
    calls = communicator.calls
    before = calls.number
    for _ in range(communicator.rank):
        with calls.during("a call of this rank"):
            pass
    communicator.all_gather_object(None)
    assert calls.number == before + communicator.size
    shown = communicator.all_gather_object(calls.words[STATE] // NEXT)
    assert shown == [before + communicator.size] * communicator.size


def test_inner_calls_are_counted_alike_too(communicator: Communicator) -> None:
    calls = communicator.calls
    for _ in range(communicator.rank):
        with calls.during("a call of this rank"):
            pass
    with calls.during("an outer call"):
        for _ in range(3):
            communicator.all_gather_object(None)
        counted = calls.words[INNER] - calls.words[STATE]
        assert len(set(communicator.mpi.allgather(counted))) == 1
