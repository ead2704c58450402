"""Ranks that gather to one of them: whichever that is, the result is combined in the order of the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.comm.backends.gather_to_one import GatherToOne
from mpidist.comm.backends.messages import Messages
from mpidist.comm.group.communicator import Communicator
from mpidist.options import ReduceOp

pytestmark = pytest.mark.mpi(min_size=3)


def test_the_order_of_the_ranks_shows_in_the_bits_wherever_the_center_is(communicator: Communicator) -> None:
    """In pieces, of which the last one is shorter."""
    rank, size = communicator.rank, communicator.size
    messages = Messages(communicator, piece_bytes=16)
    # In float32 the small number is lost before the two large ones cancel out, in that order only.
    values = np.array([1, 1e8, -1e8, *[0] * (size - 3)], "float32")
    source = np.full(10, values[rank])
    expected = np.float32(0)
    for value in values:
        expected += value
    for center in range(size):
        gathering = GatherToOne(messages, range(size), center, rank)
        total = np.full(10, np.nan, "float32")
        gathering.combine(source, total, ReduceOp.SUM)
        gathering.spread(total)
        assert total.tolist() == [expected] * 10 == [0] * 10
        collected = gathering.collect(source)
        assert (collected is None) is (rank != center)
        assert collected is None or [one[0] for one in collected] == values.tolist()
