"""Objects of all ranks, small and large ones in one exchange, and the detection of another call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.object_exchange import gather_objects
from mpidist.errors import MismatchError
from mpidist.recorder.calls import INNER, NEXT, STATE

pytestmark = pytest.mark.mpi(min_size=2)


def test_values_of_all_sizes_arrive(communicator: Communicator) -> None:
    """Around the length up to which a value travels in a record, on some ranks or on all."""
    size = communicator.size
    for length in [*range(470, 540), 70_000]:
        for large in ({0}, {size - 1}, set(range(size))):
            values = [bytes([rank + 1]) * (length if rank in large else 3) for rank in range(size)]
            assert communicator.all_gather_object(values[communicator.rank]) == values
            assert gather_objects(communicator.mpi, values[communicator.rank]) == values


def test_equal_values_are_not_sent(communicator: Communicator) -> None:
    calls: list[str] = []

    class Noting:
        size, rank = communicator.size, communicator.rank

        def __getattr__(self, name: str) -> object:
            calls.append(name)
            return getattr(communicator.mpi, name)

    value: list[object] = [1, 2.5, "x" * 1000]
    assert gather_objects(Noting(), value) == [value] * communicator.size
    assert calls == ["Allreduce"]
    assert gather_objects(Noting(), [*value, communicator.rank == 0]) == [
        [*value, rank == 0] for rank in range(communicator.size)
    ]
    assert calls[2:] == ["Allgather", "Allgatherv"]
    # Comparing long values would take longer than sending them.
    calls.clear()
    long = b"x" * (1 << 20)
    assert gather_objects(Noting(), long) == [long] * communicator.size
    assert calls == ["Allreduce", "Allgather", "Allgatherv"]
    # Nobody else sees what this rank changes in its own.
    assert communicator.all_gather_object(value)[0] is not value


def test_the_first_rank_alone_gets_values(communicator: Communicator) -> None:
    for length in (0, 3, 70_000):
        flag, told = communicator.gather_object(bytes([communicator.rank]) * length, communicator.rank + length)
        assert flag == communicator.size - 1 + length
        expected = [bytes([rank]) * length for rank in range(communicator.size)]
        assert told == (expected if communicator.rank == 0 else [])


def test_a_byte_more_or_another_order_is_another_value(communicator: Communicator) -> None:
    for mine, others in ((b"", b"\0"), (b"ab" * 61, b"ba" * 61), (b"a" * 61 + b"b", b"b" + b"a" * 61), (1, True)):
        told = communicator.all_gather_object(mine if communicator.rank == 0 else others)
        assert list(map(repr, told)) == [repr(mine), *[repr(others)] * (communicator.size - 1)]


def test_no_value_is_read_where_ranks_are_in_different_calls(communicator: Communicator) -> None:
    rank = communicator.rank
    call: Callable[[int], object] = communicator.all_reduce_max if rank else communicator.all_gather_object
    with pytest.raises(MismatchError, match=r"got exchange between ranks at .*; agreement between ranks at"):
        call(rank)
    assert communicator.all_gather_object(rank) == list(range(communicator.size))


def test_what_another_call_sends_is_not_read(communicator: Communicator) -> None:
    if communicator.rank == 0:
        other = np.zeros(9, np.int64)
        communicator.mpi.Allreduce(np.zeros(9, np.int64), other, MPI.MAX)
    else:
        with pytest.raises(MismatchError):
            communicator.all_gather_object(1)
    # The ranks have made different numbers of calls.
    communicator.all_gather_object(1)


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
