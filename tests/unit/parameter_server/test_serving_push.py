"""Pushes: what lies in a slot of a heap, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.windows.window import SoloWindow
from mpidist.failures.peers import Key
from mpidist.parameter_server.heap.push_slot import Pushed, read_pushed
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Fence, Push, Send
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

SLOT, SLOT_BYTES = 4096, 1 << 20
# Beyond the first of these sizes changes are not gathered any more.
LARGE, SMALL = 1 << 14, 10


class _Counted(SoloWindow):
    """Counts how often something is written."""

    puts = 0

    def put(self, rank: int, offset: int, array: AnyArray) -> None:
        self.puts += 1
        super().put(rank, offset, array)


def pushing(slot_bytes: int = SLOT_BYTES) -> tuple[_Counted, Pushed]:
    """A window whose slot is zero, and an empty push into it."""
    window = _Counted(SLOT + SLOT_BYTES)
    window.memory[:] = 0
    station = Station(window, str, lambda rank: Key("", rank, ""), frozenset())
    station.reserved[0, SLOT] = SLOT_BYTES
    return window, Pushed(station, 0, SLOT, slot_bytes)


@pytest.mark.parametrize("sizes", [
    [SMALL], [0, SMALL, 1], [LARGE], [SMALL, LARGE], [LARGE, SMALL], [SMALL, LARGE, SMALL, SMALL], [4000, 90, 8],
])
@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, SLOT_BYTES - 8])
def test_changes_are_read_as_they_were_made(sizes: list[int], slot_bytes: int) -> None:
    window, pushed = pushing(slot_bytes)
    made = []
    for number, size in enumerate(sizes):
        array = np.arange(number, number + size, dtype="int32" if number % 2 else "float64")
        made.append((number, array.copy()))
        pushed.add("add", number, array, factor=number / 2)
        # The caller may use its array again.
        array[:] = -1
    pushed.close()
    found = [(change.variable, change.factor, array) for change, array in read_pushed(window.memory, SLOT)]
    assert [(number, factor) for number, factor, _ in found] == [(number, number / 2) for number, _ in made]
    for (_, _, got), (_, expected) in zip(found, made, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", [
    "?", "<i8", ">i4", "<f2", ">f8", "g", "<c16", "bfloat16", "float8_e5m2", "float8_e4m3fn",
])
def test_arrays_of_any_dtype_keep_it(name: str) -> None:
    """A dtype of ml_dtypes may look like a float of NumPy's. A server that cannot read a push would end the job."""
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name, name))
    window, pushed = pushing()
    pushed.add("assign", 1, np.array([0, 1, 1], "int8").astype(dtype))
    pushed.close()
    [(_, found)] = read_pushed(window.memory, SLOT)
    assert found.dtype == dtype
    assert found.astype(complex).tolist() == [0, 1, 1]


def test_a_push_of_which_a_change_had_no_room_cannot_be_closed() -> None:
    _, pushed = pushing()
    pushed.add("step", 1, np.ones(SMALL))
    for call in (lambda: pushed.add("step", 2, np.ones(SLOT_BYTES)), pushed.close):
        with pytest.raises(MemoryError, match=r"give ServerOptions\(slot_bytes="):
            call()


def test_a_small_push_is_one_put_and_nothing_of_it_is_there_before() -> None:
    window, pushed = pushing()
    pushed.add("add", 1, np.ones(SMALL))
    pushed.add("assign", 2, np.ones(SMALL))
    assert not window.memory.any()
    pushed.close()
    assert window.puts == 1
    assert [change.kind for change, _ in read_pushed(window.memory, SLOT)] == ["add", "assign"]


def test_a_change_can_be_read_before_the_push_is_whole() -> None:
    window, pushed = pushing()
    places = [pushed.add("add", 1, np.full(SMALL, 1.5)), pushed.add("add", 1, np.full(SMALL, 2.5))]
    pushed.write()
    places.append(pushed.add("add", 1, np.full(SMALL, 3.5)))
    assert [window.memory[place : place + 8].view(float)[0] for place in places] == [1.5, 2.5, 3.5]
    # Without its table the server takes nothing.
    assert not window.memory[: SLOT + 16].any()
    pushed.close()
    assert [array[0] for _, array in read_pushed(window.memory, SLOT)] == [1.5, 2.5, 3.5]


def test_a_function_reads_what_it_has_added_itself() -> None:
    strategy = ParameterServerStrategy()
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = mpidist.Variable(np.arange(4.0))

    def add() -> list[Any]:
        found = []
        for number in range(3):
            variable.assign_add(np.full(4, 10.0**number))
            found.append(variable.numpy().tolist())
        return found

    assert coordinator.schedule(add).get() == [[total + one for one in range(4)] for total in (1.0, 11.0, 111.0)]
    assert variable.numpy().tolist() == [111.0, 112.0, 113.0, 114.0]
    strategy.close()


def test_a_message_that_no_role_takes_is_refused() -> None:
    window = SoloWindow(8)
    station = Station(window, "worker {}".format, lambda rank: Key("", rank, ""), frozenset())
    station.route([Push], lambda *_: None)
    station.send(Send(0, Fence(7)))
    with pytest.raises(RuntimeError, match=r"worker 0 sends Fence\(worker=7\), for which this process has no role"):
        station.step()
