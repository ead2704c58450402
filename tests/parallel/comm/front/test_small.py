"""Small sums: what is kept from call to call changes no bit, no type, and no array of an earlier call."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpidist.comm.choice.selection import choose
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp
from tests.parallel.layouts import lay_out

SHAPES = [(), (3,), (2, 3), (4096,), (4097,)]


@pytest.mark.parametrize("way", ["AUTO", "NODE", "MPI", "RING"])
@pytest.mark.parametrize("layout", ["node", "pairs"])
def test_small_calls_in_turns_are_those_in_place(communicator: Communicator, way: str, layout: str) -> None:
    if way == "NODE" and communicator.size == 1:
        pytest.skip("a single rank shares no memory")
    with choose(lay_out(communicator, layout), CommunicationOptions(implementation=way)) as collective:
        random = np.random.default_rng(communicator.rank)
        kept = []
        for dtype, op in itertools.product("fl", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MEAN]):
            for turn, shape in itertools.product(range(2), SHAPES):
                array = np.asarray(100 * random.random(shape)).astype(dtype)
                # A view whose elements do not lie side by side is the same call.
                given = np.repeat(array, 2, axis=0)[::2] if turn == 1 and shape else array
                got = [collective.all_reduce(given, op) for _ in range(2)]
                in_place = array.copy() if op is not ReduceOp.MEAN or dtype == "f" else None
                if in_place is not None:
                    collective.all_reduce(in_place, op, in_place=True)
                    kept.append((in_place, *got))
                for one in got:
                    assert type(one) is np.ndarray
                    assert one.shape == shape
                    assert one.flags.writeable
                np.testing.assert_array_equal(given, array)
        for wanted, *results in kept:
            for one in results:
                assert one.dtype == wanted.dtype
                np.testing.assert_array_equal(one, wanted)


@pytest.mark.mpi(min_size=2)
def test_after_the_end_a_small_call_is_refused(communicator: Communicator) -> None:
    collective = choose(communicator, CommunicationOptions())
    one = np.ones(())
    for _ in range(20):
        assert collective.all_reduce(one) == communicator.size
    collective.close()
    with pytest.raises(RuntimeError, match="this collective is closed"):
        collective.all_reduce(one)
