"""Reads of served variables while their server changes them: each gives one version, or says that it cannot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.windows.window import SoloWindow
from mpidist.failures.peers import Key
from mpidist.parameter_server.heap.dense import HeapVariable
from mpidist.parameter_server.heap.rows import read_rows
from mpidist.parameter_server.heap.table import HeapTable
from mpidist.parameter_server.heap.versioned_read import Value, read_in_pieces
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Call, Message
from mpidist.variables.kinds.served import ServedPlace

SIZE = 8
PLACE = ServedPlace(1, 0, 0, (64, 192), (SIZE,), "float64")
# Two rows have one version.
TABLE = ServedPlace(1, 0, 0, (64, 64), (SIZE, 1), "float64", 2, 192)
# Two pieces.
PIECE_BYTES = 8 * SIZE // 2


def heap() -> SoloWindow:
    window = SoloWindow(1024)
    window.memory[:] = 0
    return window


def change(variable: HeapVariable, *values: float) -> None:
    """Make versions, as their server does."""
    for value in values:
        def make(_: AnyArray, new: AnyArray, value: float = value) -> None:
            new.fill(value)

        variable.change(make)


def read_while(
    window: SoloWindow, place: ServedPlace, *changes: Callable[[], object], known: Value | None = None,
    is_relaxed: bool = False,
) -> Value | None:
    """Read in two pieces for each try; in the middle of the tries something else is done, one after the other."""
    pieces = read_in_pieces(window, place, known, is_relaxed=is_relaxed, piece_bytes=PIECE_BYTES)
    for act in changes:
        next(pieces)
        act()
    with pytest.raises(StopIteration) as end:
        next(pieces)
    value: Value | None = end.value.value
    return value


def test_a_value_is_whole_though_the_next_version_comes_while_it_is_read() -> None:
    window = heap()
    variable = HeapVariable(window.memory, PLACE)
    change(variable, 1)
    value = read_while(window, PLACE, lambda: change(variable, 2))
    assert value is not None
    assert (value.version, value.array.tolist()) == (1, [1.0] * SIZE)


def overwrite(variable: HeapVariable, value: float) -> None:
    """Begin the version after the next one in the buffer that is read; it is not shown yet."""
    change(variable, value)
    variable.buffers[variable.begin()][...] = value + 1


@pytest.mark.parametrize("overtake", [
    lambda variable: overwrite(variable, 2),
    lambda variable: change(variable, 2, 3),
    lambda variable: change(variable, 2, 3, 4),
])
def test_a_buffer_that_is_written_again_while_it_is_read_is_read_anew(
    overtake: Callable[[HeapVariable], object]
) -> None:
    window = heap()
    variable = HeapVariable(window.memory, PLACE)
    change(variable, 1)
    value = read_while(window, PLACE, lambda: overtake(variable), lambda: None)
    assert value is not None
    assert value.array.tolist() == variable.current.tolist()
    assert value.version == variable.words[0]


def test_a_variable_that_changes_too_fast_gives_no_value() -> None:
    window = heap()
    variable = HeapVariable(window.memory, PLACE)

    def twice() -> None:
        change(variable, 1, 2)

    assert read_while(window, PLACE, twice, twice) is None


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_table_that_changes_while_it_is_read_is_read_anew(is_shown: bool) -> None:
    """It has one buffer: the next version is enough."""
    window = heap()
    table = HeapTable(window.memory, TABLE)

    def restore() -> None:
        table.begin()
        table.rows[...] = 5
        if is_shown:
            table.show()

    def end() -> None:
        if not is_shown:
            table.show()

    value = read_while(window, TABLE, restore, end)
    if is_shown:
        assert value is not None
        assert (value.version, value.array.tolist()) == (1, [[5.0]] * SIZE)
    else:
        assert value is None


def test_what_is_known_is_good_for_its_own_version_only() -> None:
    window = heap()
    variable = HeapVariable(window.memory, PLACE)
    change(variable, 1)
    known = Value(1, np.full(SIZE, 7.0))
    assert read_while(window, PLACE, known=known) is known
    change(variable, 2)
    value = read_while(window, PLACE, lambda: None, known=known)
    assert value is not None
    assert value.array.tolist() == [2.0] * SIZE
    assert known.array.tolist() == [7.0] * SIZE


def test_a_relaxed_value_is_of_no_version() -> None:
    """Else the next read of an unchanged variable would give the mixture again, for a version of its own."""
    window = heap()
    variable = HeapVariable(window.memory, PLACE)
    change(variable, 1)
    value = read_while(window, PLACE, lambda: overwrite(variable, 2), is_relaxed=True)
    assert value is not None
    assert (value.version, value.array.tolist()) == (None, [1.0] * 4 + [3.0] * 4)


class BusyWindow(SoloWindow):
    """A window whose server does something in each of its questions for rows, before it answers."""

    def __init__(self) -> None:
        super().__init__(1024)
        self.memory[:] = 0
        self.acts: list[Callable[[], object]] = []
        self.asked: list[list[int]] = []

    def get_rows(self, rank: int, offset: int, numbers: AnyArray, into: AnyArray) -> None:
        """See `Window.get_rows`."""
        if offset == TABLE.buffers[0]:
            self.asked.append(numbers.tolist())
            if self.acts:
                self.acts.pop(0)()
        super().get_rows(rank, offset, numbers, into)


class Giver:
    """The role of the server: it gives rows, and says so."""

    def __init__(self, station: Station, table: HeapTable) -> None:
        self.station = station
        self.table = table
        self.given = 0

    def take(self, sender: int, message: Message) -> None:
        """Give rows."""
        assert isinstance(message, Call)
        self.given += 1
        self.table.rows[...] += 1
        self.station.answer(sender, message, lambda _, numbers: self.table.give(numbers))


def rows_of(window: BusyWindow, *acts: Callable[[HeapTable], object]) -> tuple[list[float], int]:
    """Rows 5, 0 and 3 of a table while these changes are made; and how often the server had to give some itself."""
    station = Station(window, str, lambda rank: Key("", rank, ""), frozenset())
    table = HeapTable(window.memory, TABLE)
    giver = Giver(station, table)
    station.route([(Call, "rows")], giver.take)
    window.acts = [lambda act=act: act(table) for act in acts]  # type: ignore[misc]  # one of them
    rows = read_rows(station, TABLE, np.array([5, 0, 3]))
    return rows[:, 0].tolist(), giver.given


def write(*numbers: int) -> Callable[[HeapTable], object]:
    """A change of some rows, each of which gets its number."""
    return lambda table: table.change_rows(
        np.array(numbers), lambda: table.rows.__setitem__([*numbers], np.array(numbers)[:, None])
    )


def test_rows_of_which_one_changes_are_asked_for_again_without_the_others() -> None:
    window = BusyWindow()
    # At first the other row of the version that the first row has. Row 3 is there before it changes.
    assert rows_of(window, write(4), write(5, 3), write(7)) == ([5.0, 0.0, 0.0], 0)
    assert window.asked == [[5, 0, 3], [5], [5]]


def test_rows_that_change_at_each_try_are_given_by_the_server() -> None:
    window = BusyWindow()
    assert rows_of(window, write(5), write(4), write(5)) == ([6.0, 0.0, 0.0], 1)
    assert window.asked == [[5, 0, 3], [5], [5]]


def test_rows_in_the_middle_of_a_change_are_not_whole() -> None:
    """Their version is the same before and behind the read, and odd."""
    window = BusyWindow()
    table = HeapTable(window.memory, TABLE)
    table.versions[2] = 1
    assert rows_of(window) == ([1.0, 0.0, 0.0], 1)
