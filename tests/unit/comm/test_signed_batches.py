"""A batch that the program has taken is part of the next call's signature, where one thread does both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from mpidist.comm.calls.order import CallOrder
from tests.unit.recorder.test_recorder import open_recorder


def mark_after(*events: str) -> int:
    """The checksum of a rank after events: the thread, and "call", "other call", "step", or the number of a batch."""
    order = CallOrder(open_recorder(1).open(7, ["a", "b"], 0), ())
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for event in events:
            name, what = event.split(" ", 1)
            (one if name == "one" else other).submit(happen, order, what).result()
    return order.mark


def happen(order: CallOrder, what: str) -> None:
    """Make a call, or take a batch."""
    if what.isdigit():
        order.note_batch(1, 0, int(what))
    elif what == "step":
        with order.during(what):
            order.sign_step(what, None, 0, sign=1, meets=True)
    else:
        order.enter(what, None, None).leave()


def test_a_batch_changes_the_next_call_and_all_behind_it() -> None:
    marks = [
        mark_after("one call", *events, "one call") for events in
        ((), ("one 1",), ("one 2",), ("one 1", "one 2"), ("one 1", "one call"), ("one call", "one 1"), ("one call",))
    ]
    assert len(set(marks)) == len(marks)
    assert mark_after("one call", "one 1", "one other call") != mark_after("one call", "one other call")


def test_of_two_threads_it_does_not_matter_who_comes_first() -> None:
    """One reads batches for another one, which makes the calls: each rank has them in an order of its own."""
    assert mark_after("one call", "one 1", "other call", "other call") == mark_after(
        "one call", "other call", "one 1", "other call"
    )
    assert mark_after("one call", "one 1", "other call", "one call") == mark_after(
        "one call", "other call", "one 1", "one call"
    )
    assert mark_after("one call", "one 1", "other step") == mark_after("one call", "other step", "one 1")
    assert mark_after("one call", "one 1", "one step") != mark_after("one call", "one step")
    assert mark_after("one call", "one 1", "other call", "other 2", "other call") != mark_after(
        "one call", "one 1", "other call", "other call"
    )
