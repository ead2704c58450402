"""The recorder: what a rank does on each communicator."""

from __future__ import annotations

from threading import get_ident

import numpy as np
import pytest

from mpidist.comm.calls.order import CallOrder
from mpidist.options import ReduceOp
from mpidist.recorder.calls import (
    CODES,
    IDENTITY,
    KEPT_CALLS,
    NEXT,
    PLACE_WORDS,
    STATE,
    Calls,
    LoneCalls,
    names_of,
    noted,
)
from mpidist.recorder.recorder import Recorder


def open_recorder(places: int) -> Recorder:
    recorder = Recorder()
    recorder.show(memoryview(bytearray(8 * PLACE_WORDS * places)).cast("q"))
    return recorder


def test_a_call_is_seen_while_it_lasts() -> None:
    recorder = open_recorder(2)
    calls = recorder.open(77, ["a", "b"], 1)
    assert recorder.page[IDENTITY] == 77
    calls.enter("save")
    assert recorder.page[STATE] == NEXT + CODES["save"]
    calls.leave()
    assert recorder.page[STATE] == NEXT
    calls.enter("barrier")
    assert recorder.page[STATE] == 2 * NEXT + CODES["barrier"]


def test_the_outer_call_is_shown_and_counted() -> None:
    recorder = open_recorder(1)
    calls = recorder.open(7, ["a", "b"], 0)
    calls.enter("save")
    calls.enter("agreement")
    assert calls.inner == "agreement"
    assert recorder.page[STATE] == NEXT + CODES["save"]
    calls.leave()
    assert recorder.page[STATE] == NEXT + CODES["save"]
    calls.leave()
    assert recorder.page[STATE] == NEXT
    assert calls.inner == ""
    assert (list(calls.recent), calls.number) == (["save"], 1)


def test_a_signed_call_is_noted_as_any_other() -> None:
    recorder = open_recorder(1)
    calls = recorder.open(7, ["a", "b"], 0)
    order = CallOrder(calls, ())
    array = np.ones(3, np.float32)
    made = [("all_reduce", ReduceOp.SUM), ("all_reduce", ReduceOp.SUM), ("save", None)]
    for number, (name, op) in enumerate(made, 1):
        with order.enter(name, op, array):
            state = recorder.page[STATE]
            assert (state // NEXT, names_of(state % NEXT)) == (number, [name])
            assert (calls.name, calls.number, calls.depth, calls.thread) == (name, number, 1, get_ident())
            with order.enter("agreement", None, None):
                assert (calls.inner, calls.depth) == ("agreement", 2)
                assert recorder.page[STATE] == state
        assert (recorder.page[STATE], calls.depth, calls.inner) == (number * NEXT, 0, "")
    assert list(calls.recent) == [(name, op, array.dtype, (3,)) for name, op in made]


@pytest.mark.parametrize(
    "call", [("all_gather", None, 3, 1), ("all_reduce", ReduceOp.MAX, 3, 1), ("all_reduce", ReduceOp.SUM, 4, 1),
             ("all_reduce", ReduceOp.SUM, 3, 2)],
)
def test_another_call_of_one_name_has_another_state(call: tuple[str, ReduceOp | None, int, int]) -> None:
    states = []
    for name, op, size, owner in (("all_reduce", ReduceOp.SUM, 3, 1), call):
        recorder = open_recorder(1)
        order = CallOrder(recorder.open(7, ["a", "b"], 0), ())
        with order.enter(name, op, np.ones(size), owner):
            states.append(recorder.page[STATE])
    assert states[0] // NEXT == states[1] // NEXT
    assert states[0] != states[1]


def test_the_last_calls_are_kept() -> None:
    recorder = open_recorder(1)
    calls = recorder.open(7, ["a", "b"], 0)
    for number in range(KEPT_CALLS + 10):
        calls.enter("all_reduce", ("all_reduce", ReduceOp.SUM, np.dtype("f4"), (number,)))
        calls.leave()
    assert [call[3] for call in calls.recent] == [(number,) for number in range(10, KEPT_CALLS + 10)]
    last = KEPT_CALLS + 9
    assert calls.before(2) == [f"all_reduce SUM of float32 ({number},)" for number in (last - 2, last - 1)]
    assert len(calls.before(1000)) == KEPT_CALLS - 1


def test_a_place_is_used_again_and_a_full_page_is_no_error() -> None:
    recorder = open_recorder(1)
    first = recorder.open(1, ["a"], 0)
    second = recorder.open(2, ["a"], 0)
    first.enter("all_reduce")
    second.enter("barrier")
    second.leave()
    assert recorder.page[STATE] == NEXT + CODES["all_reduce"]
    assert recorder.opened() == [first]
    del first
    third = recorder.open(3, ["a"], 0)
    assert recorder.opened() == [third]
    assert list(recorder.page[:2]) == [3, 0]


def test_a_method_that_fails_has_left() -> None:
    class Group:
        calls: Calls = open_recorder(1).open(1, ["a", "b"], 0)

        @noted("meeting")
        def meet(self, text: str) -> None:
            assert self.calls.words[STATE] == NEXT + CODES["meeting"]
            raise ValueError(text)

    with pytest.raises(ValueError, match="as asked"):
        Group().meet("as asked")
    assert Group.calls.words[STATE] == NEXT


def test_who_is_alone_notes_nothing() -> None:
    calls = LoneCalls()
    calls.enter("all_reduce")
    assert calls.words[STATE] == 0
    calls.leave()
