"""Agreement, the part that does not communicate: texts, and errors as one rank alone sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.group.agreement import name_ranks, require_same, same_on_all, together
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import MismatchError, is_shared, mark_shared


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([4, 2], "ranks 2, 4"), ([7, 6], "ranks 6-7")],
)
def test_names_of_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


@given(st.sets(st.integers(0, 50), min_size=1))
def test_names_say_exactly_these_ranks(ranks: set[int]) -> None:
    said: set[int] = set()
    for span in name_ranks(list(ranks)).split(" ", 1)[1].split(", "):
        low, _, high = span.partition("-")
        said |= set(range(int(low), int(high or low) + 1))
    assert said == ranks


def test_one_rank_raises_its_own_error() -> None:
    solo = SoloCommunicator()
    mine = KeyError("mine")

    def fail() -> None:
        raise mine

    with pytest.raises(KeyError, match="mine") as caught:
        together(solo, "doing it", fail)
    assert caught.value is mine
    assert not is_shared(mine)
    assert together(solo, "doing it", lambda: 5) == 5
    same_on_all(solo, "anything", object(), "No hint.")


def test_one_rank_lets_interrupts_through() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt("by the user")

    with pytest.raises(KeyboardInterrupt, match="by the user"):
        together(SoloCommunicator(), "doing it", interrupt)


def test_differences_are_grouped_by_value() -> None:
    require_same([{"a": 1}] * 3, "the options", "No hint.")
    with pytest.raises(MismatchError, match="the shape must be the same") as caught:
        require_same([(2,), (3,), (2,), (2,), (3,)], "the shape", "Pass the same.")
    assert str(caught.value) == (
        "the shape must be the same on all ranks, got (2,) on ranks 0, 2-3; (3,) on ranks 1, 4. Pass the same."
    )
    assert isinstance(caught.value, ValueError)


def test_many_differences_are_not_all_listed() -> None:
    with pytest.raises(MismatchError, match="and 6 other values"):
        require_same(list(range(10)), "the seed", "Pass the same.")


def test_marks_are_seen_through_chains() -> None:
    inner = mark_shared(ValueError("inner"))
    assert is_shared(inner)
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    assert is_shared(outer)
    assert not is_shared(RuntimeError("other"))
    assert not is_shared(None)
