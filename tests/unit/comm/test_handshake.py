"""The handshake of a window's ranks: who knows the secret is admitted, and nobody else, however it tries."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from mpidist.comm.windows.sockets import connection, handshake
from mpidist.comm.windows.sockets.addresses import Address, call, interfaces, listen_by_name, listen_by_port, place
from mpidist.comm.windows.sockets.connection import NOTHING, Connection, Kind
from mpidist.comm.windows.sockets.handshake import RefusedError, admit, greet

SECRET = b"s" * 32
Ends = tuple[socket.socket, socket.socket]
End = Callable[[socket.socket], object]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The end that calls, and the end that is called."""
    calls, called = socket.socketpair()
    with calls, called:
        yield calls, called


def outcome(function: Callable[[], object]) -> object:
    """What a function returns, or the text of its refusal."""
    try:
        return function()
    except RefusedError as error:
        return str(error)


def together(ends: Ends, caller: End, called: End) -> list[object]:
    """The outcomes at both ends; an end that is refused hangs up."""
    found: list[object] = [None, None]

    def run(number: int, function: End) -> None:
        found[number] = outcome(lambda: function(ends[number]))
        if isinstance(found[number], str):
            ends[number].close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((caller, called))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_know_the_secret_meet(ends: Ends) -> None:
    assert together(ends, lambda s: greet(s, SECRET, 3, 1), lambda s: admit(s, SECRET, 1, 4)) == [None, 3]


def test_a_caller_without_the_secret_is_refused(ends: Ends) -> None:
    """The rank that is called proves itself first, and the caller finds that it knows another secret."""
    found = together(ends, lambda s: greet(s, b"x" * 32, 3, 1), lambda s: admit(s, SECRET, 1, 4))
    assert found[0] == "it does not know the secret of the window"
    assert str(found[1]).startswith(("it ended after 0 bytes of 32", "it is gone"))


def test_a_caller_that_goes_on_without_the_secret_is_refused(ends: Ends) -> None:
    def stranger(link: socket.socket) -> bytes:
        link.sendall(b"mpidist1" + bytes([3, 0, 0, 0, 1, 0, 0, 0]) + bytes(32))
        link.recv(64)
        link.sendall(bytes(32))
        return link.recv(1)

    assert together(ends, stranger, lambda s: admit(s, SECRET, 1, 4)) == [
        b"", "it does not know the secret of the window"
    ]


def test_what_was_sent_cannot_be_sent_back(ends: Ends) -> None:
    """A stranger has another rank make the proof that it needs: it fits the other direction only."""

    def stranger(link: socket.socket) -> bytes:
        link.sendall(b"mpidist1" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes(32))
        link.sendall(link.recv(64)[32:])
        return link.recv(1)

    found = together(ends, stranger, lambda s: admit(s, SECRET, 1, 4))
    assert found[1] == "it does not know the secret of the window"


@pytest.mark.parametrize(("rank", "other"), [(4, 1), (3, 2), (1 << 31, 1)])
def test_ranks_that_do_not_exist_are_refused(ends: Ends, rank: int, other: int) -> None:
    found = together(ends, lambda s: greet(s, SECRET, rank, other), lambda s: admit(s, SECRET, 1, 4))
    assert found[1] == "it is no rank of the window, or looks for another one"
    assert isinstance(found[0], str)


@pytest.mark.parametrize(
    ("sent", "text"),
    [(b"", "it sent 0 bytes of 48, and then nothing"), (b"mpidi", "it sent 5 bytes of 48, and then nothing"),
     (b"GET / HTTP/1.1\r\nHost: localhost:8080\r\nAccept: */*\r\n\r\n", "it is no rank of the window")],
)
def test_who_says_nothing_or_something_else_is_refused_in_time(ends: Ends, sent: bytes, text: str) -> None:
    ends[0].sendall(sent)
    with pytest.raises(RefusedError, match=text):
        admit(ends[1], SECRET, 1, 4, seconds=0.2)


def test_who_hangs_up_is_refused(ends: Ends) -> None:
    ends[0].sendall(b"mpidist1")
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(RefusedError, match="it ended after 8 bytes of 48"):
        admit(ends[1], SECRET, 1, 4)


class Waiting(socket.socket):
    """A socket that calls a function with each time limit that it gets, before it waits."""

    def __init__(self, link: socket.socket, before: Callable[[float], object]) -> None:
        super().__init__(fileno=link.detach())
        self._before = before

    def settimeout(self, value: float | None) -> None:
        """See `socket.socket.settimeout`."""
        super().settimeout(value)
        assert value is not None
        self._before(value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of handshakes, which the test sets."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_drop_at_a_time_does_not_last_longer(ends: Ends, clock: SimpleNamespace) -> None:
    """The limit is that of the whole handshake."""
    def drip(limit: float) -> None:
        # The next drop comes in 0.1 s, to who still waits then.
        if limit > 0.1:
            clock.now += 0.1
            ends[0].send(b"m")

    with Waiting(ends[1], drip) as link, pytest.raises(RefusedError, match="it sent 3 bytes of 48, and then nothing"):
        admit(link, SECRET, 1, 4, seconds=0.35)


def test_the_second_message_has_what_is_left_of_the_time(ends: Ends, clock: SimpleNamespace) -> None:
    limits: list[float] = []

    def note(limit: float) -> None:
        limits.append(limit)
        clock.now += 3

    ends[0].sendall(b"mpidist1" + bytes([3, 0, 0, 0, 1, 0, 0, 0]) + bytes(32))
    with Waiting(ends[1], note) as link, pytest.raises(RefusedError, match="it sent 0 bytes of 32, and then nothing"):
        admit(link, SECRET, 1, 4, seconds=6.125)
    # For the hello, the answer to it, and the proof that does not come.
    assert limits == [6.125, 3.125, 0.125]


STRANGER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect(os.fsencode(sys.argv[1]).replace(b"@", bytes(1), 1))
    stranger.recv(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_another_users_process_is_refused() -> None:
    listener, name = listen_by_name()
    with listener:
        # A name without a file begins with a zero, which no argument has.
        child = subprocess.Popen([sys.executable, "-c", STRANGER, name.replace(b"\0", b"@", 1)])
        link, _ = listener.accept()
        with link, pytest.raises(RefusedError, match="it belongs to user 65534, and this rank to user 0"):
            admit(link, SECRET, 0, 2)
    child.wait(20)


def test_a_rank_is_called_where_it_waits() -> None:
    by_name, name = listen_by_name()
    by_port, port = listen_by_port(None)
    here = Address(place(), name, ("127.0.0.1/8",), port)
    elsewhere = here._replace(place=("another kernel", ""))
    with by_name, by_port:
        with call(here, here, 5) as link:
            assert link.family == socket.AF_UNIX
        with call(here, elsewhere, 5) as link:
            assert link.family == socket.AF_INET
            assert link.getpeername() == ("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        call(here, here, 5)
    with pytest.raises(ConnectionRefusedError):
        call(here, elsewhere, 5)
    with pytest.raises(OSError, match="no address outside its host"):
        call(here._replace(interfaces=()), elsewhere, 5)


def test_a_port_is_in_the_range() -> None:
    taken, port = listen_by_port(None)
    with taken:
        with pytest.raises(OSError, match=rf"a port from {port} to {port} .*all are in use on \S+\. Give more ports"):
            listen_by_port((port, port))
        other, found = listen_by_port((port, min(port + 50, 65535)))
        with other:
            assert port < found <= port + 50


def test_interfaces_have_addresses_and_networks() -> None:
    for one in interfaces():
        assert not one.startswith("127."), one
        assert "/" in one, one


@pytest.mark.parametrize("sent", [0, 3, 8])
def test_the_rest_of_a_put_of_a_rank_that_is_given_up_goes_nowhere(ends: Ends, sent: int) -> None:
    """Another rank may have its place in the heap by then."""
    heap = bytearray(8)
    taken: list[bytes] = []
    mine = Connection(1, lambda *_: NOTHING, lambda *_: None)
    theirs = Connection(
        0, lambda _, __, at, size: memoryview(heap)[at : at + size], lambda *frame: taken.append(bytes(frame[-1]))
    )
    mine.link, theirs.link = ends
    theirs.link.setblocking(False)
    # The header alone, and a part of the body.
    mine.send(Kind.PUT, 0, 8)
    mine.link.sendall(b"\x01" * sent)
    theirs.read()
    theirs.divert()
    heap[:] = b"\x02" * 8
    mine.link.sendall(b"\x01" * (8 - sent))
    theirs.read()
    assert heap == b"\x02" * 8
    assert len(taken) == 1


def pair(ends: Ends, taken: list[bytes]) -> tuple[Connection, Connection]:
    """A connection whose link is not there yet, and its other end, which keeps what comes."""
    theirs = Connection(0, lambda *_: memoryview(bytearray(_[-1])), lambda *frame: taken.append(bytes(frame[-1])))
    theirs.link = ends[1]
    for link in ends:
        link.setblocking(False)
    return Connection(1, lambda *_: NOTHING, lambda *_: None), theirs


@pytest.mark.parametrize("count", [31, 32, 33, 64, 512, 513, 3000])
def test_all_that_waits_for_a_connection_is_sent_when_it_is_there(ends: Ends, count: int) -> None:
    """More buffers than the kernel takes at a time."""
    taken: list[bytes] = []
    mine, theirs = pair(ends, taken)
    sent = [number.to_bytes(4, "little") * (1 + number % 5) for number in range(count)]
    for message in sent:
        mine.send(Kind.MESSAGE, 0, len(message), memoryview(message))
    assert mine.has_more()
    mine.link = ends[0]
    while mine.has_more():
        mine.write()
        theirs.read()
    theirs.read()
    assert taken == sent


def test_a_rank_that_sends_all_the_time_lets_others_have_their_turn(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_TURN_BYTES", 100)
    taken: list[bytes] = []
    mine, theirs = pair(ends, taken)
    mine.link = ends[0]
    for _ in range(20):
        mine.send(Kind.MESSAGE, 0, 26, memoryview(bytes(26)))
    counts = []
    while len(taken) < 20:
        theirs.read()
        counts.append(len(taken))
    # Of 50 bytes each.
    assert counts == [*range(2, 21, 2)]
