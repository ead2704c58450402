"""Objects of all ranks, small and large ones in one exchange, and the detection of another call."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from mpi4py import MPI

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.object_exchange import gather_objects
from mpidist.recorder.calls import INNER, NEXT, STATE

pytestmark = pytest.mark.mpi(min_size=2)


def test_values_of_all_sizes_arrive(communicator: Communicator) -> None:
    """Around the length up to which a value travels in a record, on some ranks or on all."""
    size = communicator.size
    for length in [*range(470, 540), 70_000]:
        for large in ({0}, {size - 1}, set(range(size))):
            values = [bytes([rank + 1]) * (length if rank in large else 3) for rank in range(size)]
            met, told = gather_objects(communicator.mpi, values[communicator.rank], -5, communicator.rank)
            assert told == values
            assert met.is_one_call
            assert met.numbers == (0, size - 1)


def test_equal_values_are_not_sent(communicator: Communicator) -> None:
    gathers: list[str] = []

    class Noting:
        size = communicator.size

        def __getattr__(self, name: str) -> object:
            gathers.append(name)
            return getattr(communicator.mpi, name)

    value: list[object] = [1, 2.5, "x" * 1000]
    _, told = gather_objects(Noting(), value)
    assert told == [value] * communicator.size
    # Nobody else sees what this rank changes in its own.
    assert told[0] is not value
    assert gathers == ["Allreduce"]
    _, told = gather_objects(Noting(), [*value, communicator.rank == 0])
    assert told == [[*value, rank == 0] for rank in range(communicator.size)]
    assert gathers[2:] == ["Allgather", "Allgatherv"]


def test_the_first_rank_alone_gets_values(communicator: Communicator) -> None:
    for length in (0, 3, 70_000):
        told = communicator.gather_object(bytes([communicator.rank]) * length)
        expected = [bytes([rank]) * length for rank in range(communicator.size)]
        assert told == (expected if communicator.rank == 0 else [])


def test_a_byte_more_or_another_order_is_another_value(communicator: Communicator) -> None:
    for mine, others in ((b"", b"\0"), (b"ab" * 61, b"ba" * 61), (b"a" * 61 + b"b", b"b" + b"a" * 61), (1, True)):
        _, told = gather_objects(communicator.mpi, mine if communicator.rank == 0 else others)
        assert list(map(repr, told)) == [repr(mine), *[repr(others)] * (communicator.size - 1)]


def test_no_value_is_read_where_codes_differ(communicator: Communicator) -> None:
    met, told = gather_objects(communicator.mpi, "x" * 1000, code=communicator.rank)
    assert not met.is_one_call
    assert told == []
    assert gather_objects(communicator.mpi, communicator.rank)[-1] == list(range(communicator.size))


def test_what_another_call_sends_is_not_read(communicator: Communicator) -> None:
    if communicator.rank == 0:
        other = np.zeros(9, np.int64)
        communicator.mpi.Allreduce(np.zeros(9, np.int64), other, MPI.MAX)
    else:
        with pytest.raises(pickle.UnpicklingError, match="numbers without their mark"):
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
