"""What a rank shows of a call that an error leaves which all ranks raise: others may still compare that call."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.comm.calls.order import CallOrder
from mpidist.comm.calls.signature_page import PAGE_BYTES, CallPage
from mpidist.errors import MismatchError, mark_shared
from mpidist.options import ReduceOp
from tests.unit.recorder.test_recorder import open_recorder


def make_ranks() -> list[CallOrder]:
    """Two ranks of a node, in one process."""
    memory = memoryview(bytearray(2 * PAGE_BYTES))
    orders = [CallOrder(open_recorder(1).open(7, ["a", "b"], rank), ()) for rank in range(2)]
    for rank, order in enumerate(orders):
        order.show(CallPage(memory, range(2), rank), None, None)
    return orders


@pytest.mark.parametrize("error", [OverflowError("too large"), MismatchError("other calls")], ids=["numbers", "calls"])
def test_a_late_rank_compares_a_call_that_another_one_has_left(error: Exception) -> None:
    """Each finds by itself that its sum does not fit. Where calls differ, all of them are beyond their comparison."""
    fast, slow = make_ranks()
    for order in (fast, slow):
        order.enter("all_reduce", ReduceOp.SUM, np.ones(3))
        order.show_call()
    fast.fail(mark_shared(error))
    if isinstance(error, OverflowError):
        slow.leave()
    else:
        slow.fail(error)
    assert fast.mark == slow.mark
    assert (fast.mark == 0) == isinstance(error, MismatchError)
    for order in (fast, slow):
        order.enter("barrier", None, None)
        order.show_call()
    for order in (fast, slow):
        order.leave()


@pytest.mark.parametrize("error", [OverflowError("infinite state"), ValueError("no")], ids=["state", "argument"])
def test_a_late_rank_compares_the_last_call_of_a_step_that_has_failed_elsewhere(error: Exception) -> None:
    """Each rank finds by itself, behind a call, that the step fails: one may be before the end of that call."""
    fast, slow = make_ranks()
    for order in (fast, slow):
        order.during("apply_gradients")
        order.enter("all_reduce", ReduceOp.SUM, np.ones(3))
        order.show_call()
    fast.leave()
    fast.fail(mark_shared(error))
    slow.leave()
    slow.fail(error)
    assert fast.mark == slow.mark
    for order in (fast, slow):
        order.enter("barrier", None, None)
        order.show_call()
    for order in (fast, slow):
        order.leave()
