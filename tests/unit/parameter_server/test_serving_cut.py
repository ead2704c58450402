"""Updates at a server while a cut is saved, and the thread that saves it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from mpidist.parameter_server.heap.dense import HeapVariable
from mpidist.parameter_server.protocol.messages import Commit
from mpidist.parameter_server.server.snapshot import ElementRange, Saver, TableRows, Unsaved
from mpidist.parameter_server.server.staging import Apply, ApplyRound, Free, Save
from mpidist.variables.kinds.served import ServedPlace
from mpidist.variables.variable import Read

FIRST, SECOND, OTHER = ElementRange(1, 0, 4), ElementRange(1, 4, 8), ElementRange(2, 0, 4)
BLOCKS = {FIRST: 32, SECOND: 32, OTHER: 32}


def update(variable: int) -> Apply:
    """An update of one variable."""
    return Apply(Commit(1, 5, variable, 1, ()), 0, 1)


def changed_by(apply: Apply | ApplyRound) -> set[int]:
    assert isinstance(apply, Apply)
    return {apply.commit.closure}


def unsaved_of(limit: int, *waiting: Apply | Free) -> Unsaved:
    unsaved = Unsaved(limit)
    unsaved.begin(BLOCKS)
    unsaved.waiting += waiting
    return unsaved


def test_an_update_copies_what_it_changes_once() -> None:
    unsaved = unsaved_of(64, update(1), update(1))
    assert unsaved.next(changed_by) == (update(1), [FIRST, SECOND])
    assert unsaved.next(changed_by) == (update(1), [])
    assert unsaved.next(changed_by) is None
    assert (unsaved.live, unsaved.copied) == ({OTHER: 32}, {FIRST: 32, SECOND: 32})


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_rows_touch_the_blocks_in_which_they_have_elements(width: int) -> None:
    for rows in ([], [0], [3], [1, 4], [0, 2, 5]):
        elements = {row * width + at for row in rows for at in range(width)}
        for low in range(6 * width):
            for high in range(low + 1, 6 * width + 1):
                touched = TableRows(1, [row * width for row in rows], width).touch(ElementRange(1, low, high))
                assert touched == any(low <= element < high for element in elements)
    assert not TableRows(1, [0], width).touch(ElementRange(2, 0, 9))


def test_an_update_of_rows_copies_their_blocks_alone() -> None:
    unsaved = unsaved_of(32, update(1), update(1), update(1))
    assert unsaved.next(lambda _: [TableRows(1, [5], 2)]) == (update(1), [SECOND])
    assert unsaved.next(lambda _: [TableRows(1, [4, 6], 2)]) == (update(1), [])
    assert unsaved.next(lambda _: [TableRows(1, [3], 2)]) is None, "there is no room for the first block"
    unsaved.saved(SECOND)
    assert unsaved.next(lambda _: [2, TableRows(2, [0], 2)]) == (update(1), [OTHER])


def test_what_is_saved_is_not_copied() -> None:
    unsaved = unsaved_of(32, update(1))
    unsaved.saved(FIRST)
    assert unsaved.next(changed_by) == (update(1), [SECOND])


def test_an_update_waits_for_room_and_all_behind_it_too() -> None:
    unsaved = unsaved_of(63, update(1), Free(5, 1), update(3))
    assert unsaved.next(changed_by) is None
    unsaved.saved(OTHER)
    assert unsaved.next(changed_by) is None
    unsaved.saved(SECOND)
    assert unsaved.next(changed_by) == (update(1), [FIRST])
    assert unsaved.next(changed_by) == (Free(5, 1), [])
    assert unsaved.next(changed_by) == (update(3), [])


def test_without_room_an_update_waits_for_its_own_variable_only() -> None:
    unsaved = unsaved_of(0, update(2))
    unsaved.saved(OTHER)
    assert unsaved.next(changed_by) == (update(2), [])


def test_two_cuts_at_a_time_are_refused() -> None:
    unsaved = unsaved_of(0)
    with pytest.raises(RuntimeError, match="a snapshot begins while 3 blocks of another one are not saved"):
        unsaved.begin(BLOCKS)
    unsaved.end()
    unsaved.begin(BLOCKS)


# Held while a share is not to go on.
disk = threading.Lock()


class KeepingShare(NamedTuple):
    """Returns the blocks that it reads."""

    numbers: tuple[int, ...] = (1,)

    def blocks(self) -> dict[ElementRange, int]:
        return {ElementRange(number, low, low + 4): 32 for number in self.numbers for low in (0, 4)}

    def write(self, read: Callable[[int], Read]) -> list[list[float]]:
        with disk:
            return [read(block.variable)(block.low, block.high).tolist() for block in self.blocks()]


class FailingShare(KeepingShare):
    """Does not end."""

    def write(self, read: Callable[[int], Read]) -> list[list[float]]:
        read(1)(0, 4)
        raise LookupError(f"of the share: {self.numbers}")


class StoppedShare(KeepingShare):
    """Reads nothing."""

    def write(self, read: Callable[[int], Read]) -> list[list[float]]:
        del read
        with disk:
            raise LookupError("before it reads")


def variables() -> dict[int, HeapVariable]:
    memory = np.zeros(1024, np.uint8)
    return {1: HeapVariable(memory, ServedPlace(1, 0, 0, (64, 64), (8,), "float64"))}


def end_of(saver: Saver) -> object:
    while saver.done is None:
        time.sleep(0.001)
    assert saver.done.number == 7
    value: object = pickle.loads(saver.done.outcome)
    assert isinstance(value, Exception) is bool(saver.done.traceback)
    return value


def test_the_thread_saves_what_was_there_before_an_update() -> None:
    held, unsaved = variables(), Unsaved(64)
    with disk:
        saver = Saver(Save(7, pickle.dumps(KeepingShare())), held, unsaved)
        unsaved.waiting += [update(1)]
        assert saver.next(changed_by) == update(1)
        held[1].buffers[0][...] = 1
    assert end_of(saver) == [[0.0] * 4, [0.0] * 4]
    assert unsaved == Unsaved(64)


def test_what_fails_leaves_nothing_to_wait_for() -> None:
    unsaved = Unsaved(0)
    saver = Saver(Save(7, pickle.dumps(FailingShare())), variables(), unsaved)
    unsaved.waiting += [update(1)]
    assert repr(end_of(saver)) == "LookupError('of the share: (1,)')"
    assert saver.next(changed_by) == update(1)


def test_a_cut_that_fails_with_copies_leaves_room_for_the_next_one() -> None:
    held, unsaved = variables(), Unsaved(64)
    for number in range(2):
        with disk:
            saver = Saver(Save(7, pickle.dumps(StoppedShare())), held, unsaved)
            unsaved.waiting += [update(1)]
            assert saver.next(changed_by) == update(1), f"cut {number}"
        assert repr(end_of(saver)) == "LookupError('before it reads')"
        assert unsaved == Unsaved(64)
    saver = Saver(Save(7, pickle.dumps(KeepingShare())), held, unsaved)
    assert end_of(saver) == [[0.0] * 4, [0.0] * 4]


def test_what_is_not_there_cannot_be_saved() -> None:
    saver = Saver(Save(7, pickle.dumps(KeepingShare((1, 2)))), variables(), Unsaved(0))
    assert repr(end_of(saver)) == "KeyError(2)"


def test_nothing_is_saved_at_once() -> None:
    assert end_of(Saver(Save(7, b""), {}, Unsaved(0))) is None
