"""A server in one process, message by message: its variables, slots that grow, rounds, and what waits for a cut."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpidist.comm.windows.window import SoloWindow
from mpidist.failures.peers import Key
from mpidist.optimizers.families.sgd import SGD
from mpidist.parameter_server.heap import pages
from mpidist.parameter_server.heap.dense import BEGUN, VERSION, HeapVariable
from mpidist.parameter_server.heap.layout import FIRST_BYTES, Slots
from mpidist.parameter_server.heap.new_variables import NewVariable
from mpidist.parameter_server.heap.push_slot import Pushed, is_free
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import (
    Applied,
    Commit,
    CommitPart,
    CommitStep,
    Discard,
    Message,
    Prepared,
    Push,
    Round,
    Send,
    SnapshotDone,
    SnapshotRequest,
)
from mpidist.parameter_server.server.server import VariableServer
from mpidist.parameter_server.server.snapshot import ElementRange
from mpidist.parameter_server.worker.running_closure import OwnUpdates
from mpidist.variables.kinds.served import ServedPlace
from mpidist.variables.variable import Read

# Of them the last one has no process: what it sends is put in by the test.
COORDINATOR, WORKER = 0, 1
SLOT_BYTES = 3 * FIRST_BYTES
SLOTS = Slots((COORDINATOR, WORKER), SLOT_BYTES)
SIZE = 6


class Coordinator:
    """A role that keeps what servers say."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def take(self, sender: int, message: Message) -> None:
        """Hear one of them."""
        assert sender == COORDINATOR
        self.heard.append(message)


class Server:
    """A server with its coordinator, and with pushes of workers."""

    def __init__(self, copy_bytes: int = 0) -> None:
        window = SoloWindow(SLOTS.end + (1 << 16))
        window.memory[:] = 0xFF
        self.station = Station(window, str, lambda rank: Key("", rank, ""), frozenset())
        self.coordinator = Coordinator()
        self.holder = VariableServer(self.station, COORDINATOR, SLOTS, copy_bytes)
        self.station.route((Applied, SnapshotDone, Prepared), self.coordinator.take)
        self.memory = window.memory

    def place(self, number: int, at: int = 0, *, table_rows: int = 0) -> ServedPlace:
        """A place behind the slots."""
        first = SLOTS.end + 1024 * at + 64
        second = first if table_rows else first + 256
        begin = SLOTS.end + 1024 * at
        return ServedPlace(number, 0, begin, (first, second), (SIZE, 1), "float64", table_rows, first + 512)

    def make(self, place: ServedPlace, fill: float = 0.0) -> HeapVariable:
        """Make a variable."""
        self.station.call(0, "create", [NewVariable(place, f"variable {place.number}", fill)])
        return self.holder._variables[place.number]

    def pushed(self, worker: int, slot: int) -> Pushed:
        """An empty push."""
        return Pushed(self.station, 0, SLOTS.offset(worker, slot), SLOT_BYTES)

    def push(self, worker: int, closure: int, slot: int, *changes: tuple[str, int, float], step: int = -1) -> None:
        """Have a worker push changes by one number each."""
        pushed = self.pushed(worker, slot)
        for kind, variable, value in changes:
            pushed.add(kind, variable, np.full(SIZE, value), step=step if kind == "step" else -1)
        pushed.close()
        self.holder.take(worker, Push(closure, 1, slot, 0, True))

    def take(self, *messages: Message) -> None:
        """Take messages of the coordinator."""
        for message in messages:
            take = self.holder.take_other if isinstance(message, Discard) else self.holder.take
            take(COORDINATOR, message)

    def listen(self) -> list[Message]:
        """What the coordinator hears until nothing is on its way."""
        while self.station.step():
            pass
        heard, self.coordinator.heard = self.coordinator.heard, []
        return heard


@pytest.mark.parametrize("table_rows", [0, 2])
def test_a_variable_in_the_memory_of_a_dropped_one_begins_anew(table_rows: int) -> None:
    """Who reads it would else take it for the version that it knows, or wait for the end of a change."""
    server = Server()
    place = server.place(1, table_rows=table_rows)
    variable = server.make(place)
    for number in range(3):
        variable.buffers[variable.begin()][...] = number
        variable.show()
    variable.begin()
    server.take(Discard("memory", 1))
    again = server.make(place._replace(number=2))
    assert (again.words[VERSION], again.words[BEGUN]) == (0, 0)
    assert all((buffer == 0).all() for buffer in again.buffers)
    if table_rows:
        assert again.versions.tolist() == [0] * (SIZE // table_rows)  # type: ignore[attr-defined]  # of a table


@pytest.mark.parametrize("size", [99, 100, 101, 200, 250])
def test_memory_is_zero_however_many_calls_of_the_kernel_it_takes(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(pages, "_CALL_BYTES", 100)
    heap = np.full(300, 7, np.uint8)
    pages.HeapMemory(heap).reserve(30, size, "a variable")
    assert heap.tolist() == [7] * 30 + [0] * size + [7] * (270 - size)


def test_a_push_that_needs_more_memory_twice_keeps_what_it_has_written() -> None:
    server = Server()
    server.make(server.place(1))
    pushed = server.pushed(WORKER, 0)
    sizes = FIRST_BYTES // 8 - 100, FIRST_BYTES // 8, FIRST_BYTES // 8 - 200
    places = [pushed.add("add", 1, np.full(size, size, "float64")) for size in sizes]
    pushed.close()
    for place, size in zip(places, sizes, strict=True):
        assert (server.memory[place : place + 8 * size].view("float64") == size).all()


def test_a_slot_that_grows_leaves_the_next_one_alone() -> None:
    """Its memory is doubled, but it ends with the slot."""
    server = Server()
    variable = server.make(server.place(1))
    server.push(WORKER, 1, 1, ("add", 1, 5.0))
    large = server.pushed(WORKER, 0)
    for _ in range(2):
        large.add("add", 1, np.ones(FIRST_BYTES // 8))
    server.take(Commit(1, WORKER, 1, 1, ()))
    assert variable.current.tolist() == [5.0] * SIZE


def test_a_push_may_fill_its_slot_and_not_more() -> None:
    server = Server()
    server.make(server.place(1))
    for size in range(SLOT_BYTES // 8 - 40, SLOT_BYTES // 8):
        pushed = server.pushed(WORKER, 0)
        server.memory[SLOTS.offset(WORKER, 1) :] = 9
        with contextlib.suppress(MemoryError):
            pushed.add("add", 1, np.ones(size))
            pushed.close()
        assert (server.memory[SLOTS.offset(WORKER, 1) :] == 9).all()


def test_a_worker_waits_for_each_of_its_updates() -> None:
    """The second one is applied after the first one, and what it has changed is read then."""
    server = Server()
    variable = server.make(server.place(1))
    offsets = [SLOTS.offset(WORKER, slot) for slot in range(2)]
    own = OwnUpdates(server.station, (0,), lambda: False)
    for slot in range(2):
        server.push(WORKER, 1 + slot, slot, ("add", 1, 1.0))
        own.note(0, offsets[slot])
    for number in (1, 2):
        server.station.send(Send(0, Commit(number, WORKER, number, 1, ())))
    own.wait(0)
    assert variable.current.tolist() == [2.0] * SIZE
    assert all(is_free(server.station.window, 0, offset) for offset in offsets)


def plan(server: Server, optimizer: int, *numbers: int) -> None:
    """Make an optimizer without state that updates these variables."""
    made = SGD(1.0)
    server.station.call(0, "plan", optimizer, made.kernel, made.options, dict.fromkeys(numbers, ()))


def test_a_round_of_two_workers_frees_the_slots_of_both_and_counts_who_gives_nothing() -> None:
    server = Server()
    first, second = (server.make(server.place(number, number)) for number in (1, 2))
    plan(server, 7, 1, 2)
    server.push(COORDINATOR, 1, 1, ("step", 1, -4.0), ("add", 2, 10.0), step=0)
    server.push(WORKER, 2, 0, ("step", 1, -2.0), ("step", 2, -6.0), step=0)
    parts = CommitPart(COORDINATOR, 1, 1, (0,)), CommitPart(WORKER, 2, 1, (0,))
    assert server.listen() == [Prepared(1, 1), Prepared(2, 1)]
    server.take(Round(1, parts, (CommitStep(7, 0, 1.0),), (2,)))
    assert server.listen() == [Applied(1, 1), Applied(2, 1)]
    assert first.current.tolist() == [3.0] * SIZE
    assert second.current.tolist() == [13.0] * SIZE
    # The same slots again.
    for worker, slot in ((COORDINATOR, 1), (WORKER, 0)):
        assert is_free(server.station.window, 0, SLOTS.offset(worker, slot))
        server.push(worker, 3 + worker, slot, ("step", 1, -1.0), step=0)
    parts = CommitPart(COORDINATOR, 3, 1, (0,)), CommitPart(WORKER, 4, 1, (0,))
    server.take(Round(2, parts, (CommitStep(7, 1, 1.0),), (2,)))
    assert first.current.tolist() == [4.0] * SIZE


def test_a_function_of_two_steps_has_the_rate_of_each() -> None:
    server = Server()
    variable = server.make(server.place(1))
    plan(server, 7, 1)
    pushed = server.pushed(WORKER, 0)
    for step in range(2):
        pushed.add("step", 1, np.full(SIZE, -1.0), step=step)
    pushed.close()
    server.holder.take(WORKER, Push(1, 1, 0, 0, True))
    server.take(Commit(1, WORKER, 1, 1, (CommitStep(7, 0, 1.0), CommitStep(7, 1, 10.0))))
    assert variable.current.tolist() == [11.0] * SIZE


# Held while a share is not to go on.
disk = threading.Lock()


@pytest.fixture(autouse=True)
def _open_disk() -> Iterator[None]:
    """A test that fails leaves nothing for the next one to wait for."""
    yield
    if disk.locked():
        end_of_saver()


class OneVariable(NamedTuple):
    """A share that returns what it reads of a variable."""

    number: int = 1

    def blocks(self) -> dict[ElementRange, int]:
        """See `Share.blocks`."""
        return {ElementRange(self.number, 0, SIZE): 8 * SIZE}

    def write(self, read: Callable[[int], Read]) -> list[float]:
        """See `Share.write`."""
        with disk:
            return [float(one) for one in read(self.number)(0, SIZE)]


def end_of_saver() -> None:
    """Open the disk, and wait until the thread that saves is over."""
    disk.release()
    for thread in threading.enumerate():
        if thread.name == "mpidist-saver":
            thread.join()


def saved(message: Message) -> Any:
    assert isinstance(message, SnapshotDone)
    return pickle.loads(message.outcome)


def begin_snapshot(server: Server, number: int) -> None:
    """Begin to save; the disk is held."""
    disk.acquire()
    server.take(SnapshotRequest(number, pickle.dumps(OneVariable())))


def test_an_update_that_waits_for_a_cut_is_applied_without_a_further_message() -> None:
    """The server looks for the end of the cut by itself: nobody else may have something to say."""
    server = Server()
    variable = server.make(server.place(1))
    server.push(WORKER, 1, 0, ("add", 1, 1.0))
    assert server.listen() == [Prepared(1, 1)]
    begin_snapshot(server, 0)
    server.take(Commit(1, WORKER, 1, 1, ()))
    assert server.listen() == []
    assert variable.current.tolist() == [0.0] * SIZE
    end_of_saver()
    applied, done = server.listen()
    assert (applied, saved(done)) == (Applied(1, 1), [0.0] * SIZE)
    assert variable.current.tolist() == [1.0] * SIZE


def test_an_update_that_waits_is_not_lost_when_the_cut_ends_while_the_server_looks(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    variable = server.make(server.place(1))
    server.push(WORKER, 1, 0, ("add", 1, 1.0))
    server.push(WORKER, 2, 1, ("add", 1, 1.0))
    begin_snapshot(server, 0)
    server.take(Commit(1, WORKER, 1, 1, ()))
    saver = server.holder._saver
    assert saver is not None
    look = saver.next

    def look_and_end(changed_by: Any) -> Any:
        found = look(changed_by)
        if disk.locked():
            assert found is None
            end_of_saver()
        return found

    monkeypatch.setattr(saver, "next", look_and_end)
    server.take(Commit(2, WORKER, 2, 1, ()))
    heard = server.listen()
    assert [one for one in heard if isinstance(one, Applied)] == [Applied(1, 1), Applied(2, 1)]
    assert variable.current.tolist() == [2.0] * SIZE


def test_a_second_cut_saves_what_came_after_the_first() -> None:
    server = Server(copy_bytes=8 * SIZE)
    server.make(server.place(1))
    outcomes = []
    for number in range(3):
        begin_snapshot(server, number)
        # With its copy, while the cut is not saved.
        server.push(WORKER, 1 + number, number % 2, ("add", 1, 1.0))
        server.take(Commit(1 + number, WORKER, 1 + number, 1, ()))
        assert Applied(1 + number, 1) in server.listen()
        end_of_saver()
        outcomes += [saved(one) for one in server.listen()]
    assert outcomes == [[float(number)] * SIZE for number in range(3)]
