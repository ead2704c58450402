"""Searches for the largest numbers of all ranks, which do not keep them waiting."""

from __future__ import annotations

import pytest

from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi(min_size=2)


def test_several_searches_may_be_under_way(communicator: Communicator) -> None:
    with communicator.split(0) as ranks:
        rank, last = ranks.rank, ranks.size - 1
        first, second = ranks.open_max(), ranks.open_max()
        ends = [first([rank, -rank]), second([10 * rank, 1, 2])]
        assert [end() for end in ends] == [[last, 0], [10 * last, 1, 2]]
        ends = [first([rank, -rank]), second([10 * rank, 1, 2])]
        assert [end() for end in reversed(ends)] == [[10 * last, 1, 2], [last, 0]]


def test_a_search_that_is_dropped_writes_into_no_other_memory(communicator: Communicator) -> None:
    """MPI ends it later. That it wrote into memory in use again ended most runs by a segmentation fault."""
    with communicator.split(0) as ranks:
        for number in range(20):
            begin = ranks.open_max()
            begin([0, number])()
            begin([0, number])
            del begin
            value = number, "text" * number, list(range(number))
            assert ranks.all_gather_object(value) == [value] * ranks.size
