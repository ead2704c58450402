"""Windows: what is put is read, messages keep their order, and every way does the same."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, cast

import numpy as np
import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.windows.ways import OVERRIDE
from mpidist.comm.windows.window import Window, open_window
from mpidist.errors import DeadRankError, MismatchError
from mpidist.options import WindowOptions
from mpidist.testing.plugin import fake_nodes

pytestmark = [pytest.mark.mpi, pytest.mark.timeout_seconds(120)]

HEAP = 17 << 20
WAYS = ("RMA", "RMA between nodes", "SOCKETS", "SOCKETS between hosts")
# A message has to come within this time, also where the machine does much else.
SOON = 60.0


def opened(way: str, communicator: Communicator, heap_bytes: int) -> Window:
    """A window. Between nodes and hosts each rank counts as one."""
    name, _, between = way.partition(" between ")
    if communicator.size > 1 and between == "nodes":
        module: Any = importlib.import_module("mpidist.comm.windows.rma.window")
        nodes: Window = module.RmaWindow(fake_nodes(communicator, 1), heap_bytes, WindowOptions())
        return nodes
    with pytest.MonkeyPatch.context() as patch:
        if between == "hosts":
            patch.setattr("mpidist.comm.windows.sockets.listener.place", lambda: (str(communicator.rank), ""))
            patch.setattr("mpidist.comm.windows.sockets.listener.interfaces", lambda: ("127.0.0.1/8",))
        return open_window(communicator, heap_bytes, WindowOptions(way=name))


@pytest.fixture(params=WAYS)
def window(request: pytest.FixtureRequest, communicator: Communicator) -> Iterator[Window]:
    """Every rank offers a heap but the last one, unless it is alone."""
    offers = communicator.rank < max(communicator.size - 1, 1)
    with opened(request.param, communicator, HEAP if offers else 0) as window:
        window.memory[:] = 0
        communicator.barrier()
        yield window


def serve(window: Window, communicator: Communicator) -> None:
    """Collective. Wait for all ranks, and help those that still read, write and send."""
    if communicator.size > 1:
        barrier = communicator.mpi.Ibarrier()
        while not barrier.Test():
            assert window.poll(0.001) is None


def served(test: Callable[..., None]) -> Callable[..., None]:
    """A test at whose end each rank helps the others until all are there."""

    @functools.wraps(test)
    def run(window: Window, communicator: Communicator, **others: object) -> None:
        if "communicator" in inspect.signature(test).parameters:
            others["communicator"] = communicator
        test(window=window, **others)
        serve(window, communicator)

    parameters = inspect.signature(test).parameters
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what pytest reads
        [*(one for name, one in parameters.items() if name != "communicator"),
         inspect.Parameter("communicator", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    return run


def mark_inside(function: CodeType, mark: Path) -> threading.Thread:
    """A thread that makes a file as soon as this one is inside a function."""
    here = threading.get_ident()

    def look() -> None:
        while not mark.exists():
            frame = sys._current_frames().get(here)
            while frame is not None and frame.f_code is not function:
                frame = frame.f_back
            if frame is None:
                time.sleep(0.001)
            else:
                mark.touch()

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def awaited(window: Window) -> tuple[int, bytes]:
    """The next message, which has to come."""
    found = window.poll(SOON)
    assert found is not None, "no message came"
    return found


def pattern(size: int, seed: int) -> np.ndarray:
    """Bytes that differ from place to place, and between ranks."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_it_says_who_is_there(window: Window, communicator: Communicator) -> None:
    last = communicator.size - 1
    assert (window.rank, window.size) == (communicator.rank, communicator.size)
    assert window.heap_sizes == tuple(0 if rank == last and last else HEAP for rank in range(communicator.size))
    assert window.memory.dtype == np.uint8
    assert window.memory.shape == (window.heap_sizes[window.rank],)
    assert window.lost() == frozenset()


@served
def test_what_is_put_is_read_back(window: Window) -> None:
    """Each rank in turn, into the first rank's heap, at odd offsets; the others poll."""
    if window.rank:
        assert awaited(window) == (window.rank - 1, b"your turn")
    for size in (0, 1, 3, 8, 4096, 65_537, 1 << 20, (16 << 20) + 5):
        given, back = pattern(size, window.rank), np.ones(size, np.uint8)
        window.put(0, 7 + window.rank, given)
        window.flush(0)
        window.get(0, 7 + window.rank, back)
        window.flush(0)
        np.testing.assert_array_equal(back, given)
    if window.rank + 1 < window.size:
        window.ring(window.rank + 1, b"your turn")


@served
def test_every_dtype_and_shape_moves_as_bytes(window: Window) -> None:
    for number, dtype in enumerate(["int8", "float16", "float32", "complex128", "datetime64[s]", "bool", "S3"]):
        given = np.arange(6).reshape(2, 1, 3).astype("int64").astype(dtype)
        back, scalar = np.zeros_like(given), np.zeros((), "float64")
        at = 1 + 200 * (window.rank + window.size * number)
        window.put(0, at, given)
        window.put(0, at + 150, np.array(2.5))
        window.flush(0)
        window.get(0, at, back)
        window.get(0, at + 150, scalar)
        window.flush(0)
        np.testing.assert_array_equal(back, given)
        assert scalar[()] == 2.5


@served
def test_many_gets_and_puts_are_completed_by_one_flush(window: Window) -> None:
    first = 1000 * window.rank
    given = pattern(1000, window.rank)
    for at in range(0, 1000, 10):
        window.put(0, first + at, given[at : at + 10])
    window.flush(0)
    back = np.zeros(1000, np.uint8)
    for at in range(990, -1, -10):
        window.get(0, first + at, back[at : at + 10])
    window.flush(0)
    np.testing.assert_array_equal(back, given)


@served
def test_rows_are_read_by_their_numbers(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank in turn, in any order, some of them twice; also in several questions."""
    if window.rank:
        assert awaited(window) == (window.rank - 1, b"your turn")
    rng = np.random.default_rng(window.rank)
    for offset, dtype, width, piece in ((64, "float32", 3, 1 << 20), (7, "uint8", 5, 40), (128, "uint64", 1, 8)):
        monkeypatch.setattr("mpidist.comm.windows.row_requests._PIECE_BYTES", piece)
        rows = rng.integers(0, 100, (50, width)).astype(dtype)
        window.put(0, offset, rows)
        window.flush(0)
        numbers = rng.integers(0, 50, 70)
        back, after = np.zeros((70, width), dtype), np.zeros(1, np.uint8)
        window.get_rows(0, offset, numbers, back)
        window.get_rows(0, offset, numbers[:0], back[:0])
        window.get_rows(0, offset, numbers, np.zeros((70, 0)))
        window.get(0, offset, after)
        window.flush(0)
        np.testing.assert_array_equal(back, rows[numbers])
        assert after[0] == rows.view(np.uint8).flat[0]
    if window.rank + 1 < window.size:
        window.ring(window.rank + 1, b"your turn")


@served
def test_many_rows_are_one_call(window: Window) -> None:
    if window.rank:
        assert awaited(window) == (window.rank - 1, b"your turn")
    given = pattern(1 << 20, window.rank).reshape(-1, 64)
    window.put(0, 0, given)
    numbers, back = np.arange(len(given))[::-2].copy(), np.zeros((len(given) // 2, 64), np.uint8)
    window.flush(0)
    window.get_rows(0, 0, numbers, back)
    window.flush(0)
    np.testing.assert_array_equal(back, given[::-2])
    if window.rank + 1 < window.size:
        window.ring(window.rank + 1, b"your turn")


@pytest.mark.mpi(min_size=2)
def test_rows_are_read_in_the_order_of_the_calls(window: Window, communicator: Communicator) -> None:
    """A version that is the same before and after them is theirs, though the first rank changes them all the time."""
    version, rows = window.memory[:8].view(np.uint64), window.memory[64 : 64 + (1 << 20)].view(np.uint64)
    if window.rank == 0:
        told = None
        while told is None:
            version += 1
            for low in range(0, len(rows), len(rows) // 4):
                rows[low : low + len(rows) // 4] += 1
                told = told or window.poll()
            version += 1
            told = told or window.poll(0.001)
    elif window.rank == window.size - 1:
        seen: set[int] = set()
        whole = 0
        found, numbers, zero = np.zeros((4, 1024), np.uint64), np.array([100, 3, 3, 50]), np.zeros(1, np.int64)
        before, after = np.ones(1, np.uint64), np.ones(1, np.uint64)
        while whole < 20 or len(seen) < 2:
            window.get_rows(0, 0, zero, before)
            window.get_rows(0, 64, numbers, found)
            window.get_rows(0, 0, zero, after)
            window.flush(0)
            seen.add(int(after[0]))
            if before[0] == after[0] and not before[0] % 2:
                whole += 1
                assert (found == before[0] // 2).all()
        window.ring(0, b"enough")
    serve(window, communicator)


@served
def test_an_array_that_nobody_else_has_is_kept_until_the_flush(window: Window) -> None:
    for number in range(20):
        given = np.full(50_000, 10 * window.rank + number, np.uint8)
        window.put(0, 50_000 * (window.rank * 20 + number), given)
        kept = weakref.ref(given)
        del given
        # Sockets may have sent it already.
        assert kept() is not None or not type(window).__name__.startswith("Rma")
    window.flush(0)
    assert kept() is None
    back = np.empty((20, 50_000), np.uint8)
    window.get(0, 50_000 * window.rank * 20, back)
    window.flush(0)
    assert (back == 10 * window.rank + np.arange(20)[:, None]).all()


@served
def test_messages_of_a_rank_keep_their_order(window: Window) -> None:
    """Large ones among small ones: a small one does not overtake."""
    sizes = [0, 1, 100, 1 << 20, 3, 70_000, 5, 1 << 20, 2]
    for number, size in enumerate(sizes):
        for rank in range(window.size):
            window.ring(rank, bytes([window.rank, number]) + pattern(size, number).tobytes())
    came: dict[int, int] = dict.fromkeys(range(window.size), 0)
    while sum(came.values()) < len(sizes) * window.size:
        sender, message = awaited(window)
        number = came[sender]
        assert message[:2] == bytes([sender, number])
        assert message[2:] == pattern(sizes[number], number).tobytes()
        came[sender] += 1
    assert window.poll() is None


@served
def test_many_ranks_ring_one(window: Window) -> None:
    count = 300
    for number in range(count):
        window.ring(0, number.to_bytes(4, "little") * (1 + number % 7))
    if window.rank == 0:
        came: dict[int, int] = dict.fromkeys(range(window.size), 0)
        for _ in range(count * window.size):
            sender, message = awaited(window)
            number = came[sender]
            assert message == number.to_bytes(4, "little") * (1 + number % 7)
            came[sender] += 1


@served
def test_a_put_is_seen_after_the_ring(window: Window) -> None:
    """The receiver of a message reads in its own memory what was put before; and back."""
    rounds = 50
    if window.rank == 0:
        for _ in range(rounds * (window.size - 1)):
            sender, message = awaited(window)
            at = 100_000 * sender
            assert (window.memory[at : at + 50_001] == message[0]).all()
            window.memory[at : at + 50_001] = 255 - message[0]
            window.ring(sender, message)
    else:
        back = np.zeros(50_001, np.uint8)
        for number in range(rounds):
            window.put(0, 100_000 * window.rank, np.full(50_001, number, np.uint8))
            window.flush(0)
            window.ring(0, bytes([number]))
            assert awaited(window) == (0, bytes([number]))
            window.get(0, 100_000 * window.rank, back)
            window.flush(0)
            assert (back == 255 - number).all()


@served
def test_a_ring_does_not_wait_for_the_receiver(window: Window) -> None:
    """Everybody sends 4 MB to everybody before anybody receives."""
    for rank in range(window.size):
        window.ring(rank, bytes(4 << 20))
    assert sorted(awaited(window)[0] for _ in range(window.size)) == list(range(window.size))


def test_a_poll_ends_with_its_time(window: Window, communicator: Communicator) -> None:
    begin = time.monotonic()
    assert window.poll() is None
    assert window.poll(0.2) is None
    # One rank that is alone knows that nothing can come.
    assert communicator.size == 1 or time.monotonic() - begin >= 0.2


def test_a_poll_returns_when_a_message_comes(
    window: Window, communicator: Communicator, mpi_tmp_path: Path
) -> None:
    """One that returns with its time only would be ended by the limit of this test."""
    marks = [mpi_tmp_path / f"{rank}" for rank in range(1, window.size)]
    if window.rank:
        thread = mark_inside(type(window).poll.__code__, marks[window.rank - 1])
        assert window.poll(100 * SOON) == (0, b"now")
        thread.join()
    else:
        while not all(mark.exists() for mark in marks):
            assert window.poll(0.001) is None
        for rank in range(window.size):
            window.ring(rank, b"now")
        assert window.poll(100 * SOON) == (0, b"now")
    serve(window, communicator)


# Of functions, in a poll of 2 s. Naps become longer up to 10 ms: there are some 600 of them, and 8 calls for each.
MOST_CALLS = 10_000


def test_waiting_costs_little(window: Window, communicator: Communicator) -> None:
    """An idle server does little, and so do its other threads."""
    window.poll(0.1)
    # What the others still did with the window is over.
    serve(window, communicator)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        assert window.poll(2.0) is None
    finally:
        sys.setprofile(None)
    assert calls < MOST_CALLS
    # Under load a thread may have to work for others for once. One that never rests would be ended by the limit of this
    # test.
    used = 1.0
    while used >= 0.3:
        begin = time.process_time()
        assert window.poll(1.0) is None
        used = time.process_time() - begin


WRONG: tuple[tuple[Callable[[Window], None], type[Exception], str], ...] = (
    (lambda w: w.get(w.size, 0, np.zeros(1)), ValueError, r"`rank` must be between 0 and \d, .* got \d"),
    (lambda w: w.ring(-1, b""), ValueError, r"`rank` must be between 0 and \d, .* got -1"),
    (lambda w: w.flush(cast(Any, "0")), TypeError, r"`rank` must be an integer, got '0'"),
    (lambda w: w.put(0, HEAP - 7, np.zeros(1)), ValueError,
     rf"bytes {HEAP - 7} to {HEAP + 1} are not in the heap of rank 0, which has {HEAP} bytes"),
    (lambda w: w.put(0, -1, np.zeros(1)), ValueError, r"bytes -1 to 7 are not in the heap"),
    (lambda w: w.get(0, cast(Any, 0.5), np.zeros(1)), TypeError, r"`offset` must be an integer, got 0.5"),
    (lambda w: w.put(0, 0, cast(Any, [1.0])), TypeError, r"`array` must be a NumPy array of numbers, .* got list"),
    (lambda w: w.put(0, 0, np.array([None])), TypeError, r"`array` must be .* got one of dtype object"),
    (lambda w: w.get(0, 0, np.zeros((4, 4))[:, :2]), ValueError, r"`into` must be a C-contiguous array"),
    (lambda w: w.get(0, 0, np.broadcast_to(np.zeros(1), 1)), ValueError, r"`into` must be a writable array"),
    (lambda w: w.get_rows(w.size, 0, np.zeros(1, int), np.zeros((1, 1))), ValueError, "`rank` must be between 0"),
    (lambda w: w.get_rows(0, 0, cast(Any, [0]), np.zeros((1, 1))), TypeError, r"`numbers` must be .* int64, got \[0\]"),
    (lambda w: w.get_rows(0, 0, np.zeros(1, np.int32), np.zeros((1, 1))), TypeError, "`numbers` must be .* int32"),
    (lambda w: w.get_rows(0, 0, np.zeros(2, int), np.zeros((1, 1))), ValueError, r"got shapes \(2,\) and \(1, 1\)"),
    (lambda w: w.get_rows(0, 0, np.zeros((1, 1), int), np.zeros((1, 1))), ValueError, "`numbers` must have one dim"),
    (lambda w: w.get_rows(0, 0, np.array([2, -1]), np.zeros((2, 1))), ValueError, "must not be negative, got -1"),
    (lambda w: w.get_rows(0, 8, np.array([0, HEAP // 8 - 1]), np.zeros((2, 1))), ValueError,
     rf"bytes 8 to {HEAP + 8} are not in the heap of rank 0, which has {HEAP} bytes"),
    (lambda w: w.get_rows(0, -8, np.zeros(0, int), np.zeros((0, 1))), ValueError, "bytes -8 to -8 are not in the heap"),
    (lambda w: w.get_rows(0, 0, np.zeros(2, int), np.zeros((2, 4))[:, :2]), ValueError, "`into` must be a C-contig"),
    (lambda w: w.get_rows(0, cast(Any, 0.5), np.zeros(1, int), np.zeros((1, 1))), TypeError, "`offset` must be an int"),
    (lambda w: w.ring(0, cast(Any, "text")), TypeError, r"`message` must be bytes, got str"),
)


def test_wrong_arguments_are_refused(window: Window) -> None:
    for call, error, text in WRONG:
        with pytest.raises(error, match=text):
            call(window)


def test_a_rank_without_a_heap_says_so(window: Window) -> None:
    if window.size > 1:
        with pytest.raises(ValueError, match=rf"not in the heap of rank {window.size - 1}, which has 0 bytes"):
            window.put(window.size - 1, 0, np.zeros(1))


def test_a_message_has_a_limit(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpidist.comm.windows.window.MAX_MESSAGE_BYTES", 1000)
    window.ring(window.rank, bytes(1000))
    assert awaited(window) == (window.rank, bytes(1000))
    with pytest.raises(ValueError, match="a message has at most 1000 bytes, got 1001"):
        window.ring(window.rank, bytes(1001))


@pytest.mark.mpi(min_size=2)
def test_nothing_is_sent_to_a_forgotten_rank_or_taken_from_it(window: Window, communicator: Communicator) -> None:
    """A rank that was thought dead speaks again."""
    if window.rank == 0:
        window.forget(1)
        window.ring(1, b"not sent")
        with pytest.raises(DeadRankError, match=r"rank 1 of \d \(process \d+ on \S+\) was declared lost"):
            window.put(1, 0, np.zeros(0))
        with pytest.raises(DeadRankError, match="rank 1 of"):
            window.flush(1)
        assert window.lost() == frozenset()
    communicator.barrier()
    if window.rank == 1:
        window.ring(0, b"a zombie's")
        if type(window).__name__ == "SocketWindow":
            # What MPI puts cannot be refused: who forgets a rank never uses its slot again.
            window.put(0, 0, np.ones(100))
            with pytest.raises(DeadRankError, match=r"rank 0 of \d \(process \d+ on \S+\) has left"):
                window.flush(0)
        assert window.poll(0.3) is None
    if window.rank == 0:
        assert window.poll(0.6) is None
        assert (window.memory == 0).all()
    # The window ends like others.
    window.__dict__["_losses"].__init__(window.__dict__["communicator"].processes)
    communicator.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_a_closed_window_refuses_calls(communicator: Communicator, way: str) -> None:
    window = opened(way, communicator, 100)
    window.ring(0, b"nobody reads it")
    window.close()
    window.close()
    for call in (window.poll, lambda: window.ring(0, b""), lambda: window.put(0, 0, np.zeros(1)),
                 lambda: window.get(0, 0, np.zeros(1)), lambda: window.flush(0)):
        with pytest.raises(RuntimeError, match="this window is closed: open another one"):
            call()
    assert window.memory.size == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_close_waits_for_ranks_that_still_read(communicator: Communicator, mpi_tmp_path: Path, way: str) -> None:
    """The first rank closes while the others still read its heap."""
    window = opened(way, communicator, 1 << 20)
    window.memory[:] = 9
    communicator.barrier()
    mark = mpi_tmp_path / "closes"
    if communicator.rank:
        while not mark.exists():
            time.sleep(0.001)
        back = np.zeros(1 << 20, np.uint8)
        for _ in range(5):
            window.get(0, 0, back)
            window.flush(0)
            assert (back == 9).all()
        window.close()
    else:
        thread = mark_inside(type(window).close.__code__, mark)
        window.close()
        # Of one rank alone it may be over before the thread has seen it.
        mark.touch()
        thread.join()


@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_window_disturbs_nobody(communicator: Communicator, way: str) -> None:
    for _ in range(3):
        window = opened(way, communicator, 1000)
        window.ring((communicator.rank + 1) % communicator.size, bytes(200_000))
        window.drop()
    with opened(way, communicator, 1000) as window:
        window.memory[:] = communicator.rank
        serve(window, communicator)
    assert not [one for one in threading.enumerate() if one.name == "mpidist-window"]


def test_two_windows_do_not_meet(communicator: Communicator) -> None:
    with open_window(communicator, 10) as one, open_window(communicator, 20) as other:
        one.ring(0, b"one")
        other.ring(0, b"other")
        if communicator.rank == 0:
            for _ in range(communicator.size):
                assert awaited(other)[1] == b"other"
                assert awaited(one)[1] == b"one"
        communicator.barrier()


def test_a_wrong_size_is_everybodys_error(communicator: Communicator) -> None:
    with pytest.raises(ValueError, match="`heap_bytes` must"):
        open_window(communicator, -1 if communicator.rank == communicator.size - 1 else 0)


def test_a_way_that_does_not_exist_is_everybodys_error(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if communicator.rank == communicator.size - 1:
        monkeypatch.setenv(OVERRIDE, "PIGEONS")
    with pytest.raises(ValueError, match=r"MPIDIST_WINDOW.*'PIGEONS' is not a valid WindowWay; expected one of AUTO"):
        open_window(communicator)


@pytest.mark.mpi(min_size=2)
def test_ways_that_differ_are_everybodys_error(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    if communicator.rank == 1:
        monkeypatch.setenv(OVERRIDE, "sockets")
    with pytest.raises(MismatchError, match=r"the way of a window.*'SOCKETS'.* on rank 1"):
        open_window(communicator)


@pytest.mark.mpi(min_size=2)
def test_heaps_that_do_not_fit_are_everybodys_error(communicator: Communicator) -> None:
    """No page is touched: MPICH would allocate it, and end the process at the first write."""
    with pytest.raises(OSError, match=r"the 1 heaps? of its ranks.* bytes together, and \d+ bytes are free"):
        open_window(communicator, 1 << 50 if communicator.rank == 1 else 0, WindowOptions(way="RMA"))
