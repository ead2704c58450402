"""The schedule by which ranks compare calls: the first ones, and then each so many-th."""

from __future__ import annotations

import itertools

from mpidist.comm.calls.schedule import EVERY_CALL, USUAL, Schedule, schedule_of


def test_the_first_calls_and_then_each_so_many_th() -> None:
    assert [number for number in range(1, 20) if Schedule(3, 5).has(number)] == [1, 2, 3, 5, 10, 15]


def test_the_usual_one_is_dense_at_first_and_never_ends() -> None:
    compared = [number for number in range(1, 2000) if USUAL.has(number)]
    assert compared[: USUAL.first] == [*range(1, USUAL.first + 1)]
    assert all(2**power in compared for power in range(11))
    assert max(later - before for before, later in itertools.pairwise(compared)) == USUAL.every


def test_a_check_is_of_every_call() -> None:
    assert schedule_of(check=True) is EVERY_CALL
    assert all(schedule_of(check=True).has(number) for number in range(1, 100))
    assert schedule_of(check=False) is USUAL
