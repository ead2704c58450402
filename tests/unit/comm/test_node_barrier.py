"""A barrier of a node where another rank fails: in front of it, and behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpidist.comm.calls.order import CallOrder
from mpidist.comm.calls.signature_page import PAGE_BYTES, CallPage
from mpidist.comm.memory.node_barrier import NodeBarrier
from mpidist.errors import RankError
from mpidist.recorder.calls import PLACE_WORDS, Calls, new_words


def wait(*, has_come: bool) -> None:
    """Wait for another rank, which fails meanwhile.

    Args:
        has_come: It has come to the barrier, and gone on, before it has failed.
    """
    memory = memoryview(bytearray(2 * PAGE_BYTES))
    own, other = CallPage(memory, (0, 1), 0), CallPage(memory, (0, 1), 1)

    def fail() -> None:
        # Called while the barrier waits, between its looks at the other's word and at the page.
        if has_come:
            own.words[other.own_barrier] = own.words[own.own_barrier]
        other.call_out()

    order = CallOrder(Calls(1, ("here", "there"), 0, new_words(PLACE_WORDS)), [])
    node: Any = SimpleNamespace(size=2, mpi=SimpleNamespace(Iprobe=fail))
    barrier = NodeBarrier(node, own, order, 1)
    order.show(own, barrier, None)
    barrier()


def test_who_waits_for_a_rank_that_has_failed_comes_out() -> None:
    with pytest.raises(RankError, match="is abandoned: another rank has failed"):
        wait(has_come=False)


def test_who_waits_for_nobody_any_more_goes_on() -> None:
    """A step whose last barrier this is counts on every rank."""
    wait(has_come=True)
