"""Windows by sockets among strangers: they are refused, logged, and disturb nobody. So are ranks that send nonsense."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.windows.sockets.handshake import admit
from mpidist.comm.windows.sockets.window import SocketWindow
from mpidist.comm.windows.window import open_window
from mpidist.errors import DeadRankError
from mpidist.failures.deaths import WATCH
from mpidist.options import WindowOptions

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout_seconds(120)]

SOON = 60.0
# As in `mpidist.comm.windows.sockets.connection`.
HEADER = struct.Struct("<B7xQQ")
# As in `mpidist.comm.windows.row_requests`, for one row.
ROWS = struct.Struct("<QQq")


@pytest.fixture
def window(communicator: Communicator) -> Iterator[Any]:
    """A window by sockets; it is dropped, since its ranks break it."""
    window = open_window(communicator, 1000, WindowOptions(way="SOCKETS"))
    assert isinstance(window, SocketWindow)
    window.memory[:] = 0
    communicator.barrier()
    yield window
    # A rank that has dropped its window serves nobody.
    communicator.barrier()
    window.drop()


def exchange(window: SocketWindow, communicator: Communicator) -> None:
    """Collective. Every other rank puts, rings, and gets an answer from the first one."""
    rounds = 30
    if window.rank == 0:
        for _ in range(rounds * (window.size - 1)):
            found = window.poll(SOON)
            assert found is not None
            assert window.memory[found[0]] == found[1][0]
            window.ring(*found)
    else:
        for number in range(rounds):
            window.put(0, window.rank, np.array([number], np.uint8))
            window.flush(0)
            window.ring(0, bytes([number]))
            assert window.poll(SOON) == (0, bytes([number]))
    communicator.barrier()


def strangers(window: SocketWindow, count: int) -> list[socket.socket]:
    """Connections of nobody to this rank: silent ones, and some of each other kind."""
    name = window._door._listeners[0].getsockname()
    hello = struct.pack("<8sII32s", b"mpidist1", 1, window.rank, os.urandom(32))
    links = []
    for number in range(count):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(name)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.sendall([b"", hello, b"\x80\x04" + bytes(60), hello + bytes(32)][number % 4])
            if number % 4 == 1:
                link.shutdown(socket.SHUT_WR)
        links.append(link)
    return links


def wait_for_refusals(caplog: pytest.LogCaptureFixture, count: int) -> None:
    """Wait until this rank has refused so many callers."""
    while caplog.text.count("has refused a caller from this host") < count:
        time.sleep(0.01)


def test_strangers_are_refused_and_disturb_nobody(
    window: SocketWindow, communicator: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="mpidist")
    exchange(window, communicator)
    with pytest.MonkeyPatch.context() as patch:
        # Those that say nothing stay at the door: whoever waited for them would not come to an end in this test.
        patch.setattr("mpidist.comm.windows.sockets.listener.admit", functools.partial(admit, seconds=100 * SOON))
        links = strangers(window, 40)
        exchange(window, communicator)
        for link in links:
            link.close()
        wait_for_refusals(caplog, 40)
    links = strangers(window, 40)
    for link in links:
        link.settimeout(SOON)
        with contextlib.suppress(ConnectionResetError):
            while link.recv(100):
                pass
        link.close()
    exchange(window, communicator)
    assert window.lost() == frozenset()
    wait_for_refusals(caplog, 80)
    text = caplog.text
    assert text.count(f"rank {window.rank} has refused a caller from this host: ") == 80
    for reason in ("it sent 0 bytes of 48, and then nothing", "it is no rank of the window", "not know the secret"):
        assert reason in text


def test_ranks_are_admitted_though_strangers_stand_at_the_door(
    window: SocketWindow, communicator: Communicator
) -> None:
    """More strangers than may be at their handshake at a time, before any rank calls."""
    links = [link for _ in range(3) for link in strangers(window, 40)]
    communicator.barrier()
    exchange(window, communicator)
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (HEADER.pack(99, 0, 0), "there is no frame of kind 99"),
        (HEADER.pack(1, 0, (1 << 30) + 1), r"a frame MESSAGE of 1073741825 bytes at 0 does not fit"),
        (HEADER.pack(2, 999, 2), "a frame GET of 2 bytes at 999 does not fit"),
        (HEADER.pack(3, (1 << 64) - 1, 2), "a frame PUT of 2 bytes at 18446744073709551615 does not fit"),
        (HEADER.pack(7, 0, 24) + ROWS.pack(0, 100, 10), "rows 10 to 10 of a heap that has 10"),
        (HEADER.pack(7, 0, 24) + ROWS.pack(1001, 1, 0), "rows 0 to 0 of a heap that has -1"),
        (HEADER.pack(7, 0, 8) + bytes(8), "a question of 8 bytes"),
        (HEADER.pack(16, 0, 8), "a frame DATA of 8 bytes at 0 does not fit"),
        (HEADER.pack(17, 0, 0), "a frame SYNCED of 0 bytes at 0 does not fit"),
        (HEADER.pack(1, 0, 100) + b"torn", "it has ended in the middle of a frame"),
        (b"\x01\0\0", "it has ended in the middle of a frame"),
    ],
    ids=[
        "kind", "oversize", "get", "put", "rows", "offset", "question", "data", "synced", "torn message", "torn header",
    ],
)
def test_a_rank_that_sends_nonsense_is_left_out(
    window: SocketWindow, communicator: Communicator, caplog: pytest.LogCaptureFixture, sent: bytes, text: str
) -> None:
    caplog.set_level(logging.WARNING, logger="mpidist")
    exchange(window, communicator)
    last = window.size - 1
    if window.rank == last:
        link = window._ours[0].link
        assert link is not None
        link.sendall(sent)
        link.shutdown(socket.SHUT_WR)
        while 0 not in window._losses.gone():
            window.poll(0.01)
    elif window.rank == 0:
        window.ring(last, b"a connection of this rank's own")
        while last not in window._losses.gone():
            assert window.poll(0.01) is None
        assert f"window: rank 0 has lost its connection to rank {last}: {text}" in caplog.text
        with pytest.raises(DeadRankError, match=rf"rank {last} of \d \(process \d+ on \S+\) has left"):
            window.get(last, 0, np.zeros(1))
        assert window.memory[999] == 0
        for rank in range(1, last):
            window.ring(rank, b"and the others go on")
            assert window.poll(SOON) == (rank, b"yes")
    else:
        assert window.poll(SOON) == (0, b"and the others go on")
        window.ring(0, b"yes")
    assert window.lost() == frozenset()


def test_an_end_of_a_connection_behind_the_programs_end_is_no_news(
    window: SocketWindow, communicator: Communicator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="mpidist")
    monkeypatch.setattr(WATCH, "is_over", True)
    exchange(window, communicator)
    last = window.size - 1
    if window.rank == last:
        link = window._ours[0].link
        assert link is not None
        link.shutdown(socket.SHUT_WR)
    if window.rank in (0, last):
        while last - window.rank not in window._losses.gone():
            window.poll(0.01)
    assert "lost its connection" not in caplog.text
