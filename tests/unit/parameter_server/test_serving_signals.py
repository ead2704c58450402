"""The chief's guess of how long functions take, and the signals of workers and servers."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator

import pytest

from mpidist.comm.windows.window import SoloWindow
from mpidist.failures.peers import Key
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Call, Message
from mpidist.parameter_server.protocol.signal_relay import Listener, Others


@pytest.fixture
def station() -> Station:
    return Station(SoloWindow(8), str, lambda rank: Key("", rank, ""), frozenset())


def test_functions_that_had_ended_before_the_first_look_count_for_nothing(station: Station) -> None:
    counts = [100, 10]
    others = Others(station, threading.Lock(), lambda: None, lambda: (counts[0], counts[1]))
    guesses = []
    # The number of functions so far, and how many of them have not ended.
    for now, *counts[:] in (
        (1000, 100, 10), (1006, 100, 10), (1006, 110, 17), (1006, 110, 0), (1030, 111, 1)
    ):
        guesses.append(others.join_seconds(now))
    # Of those 90 nobody knows how long they took: then one in 6 s, three in 6 s, 20 in 30 s.
    assert guesses == [0, 60, 34, 0, 1.5]


class Chief:
    """The role that hears of signals."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []

    def take(self, sender: int, message: Message) -> None:
        """Hear of one."""
        assert sender == 0
        assert isinstance(message, Call)
        self.heard.append((message.name, pickle.loads(message.arguments)))


@pytest.fixture
def listener(station: Station) -> Iterator[Listener]:
    listener, before = Listener(station, 0), signal.getsignal(signal.SIGUSR2)
    yield listener
    listener.silence()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_each_signal_is_told_once_and_a_second_one_too(station: Station, listener: Listener) -> None:
    chief = Chief()
    station.route([(Call, "listens"), (Call, "signal")], chief.take)

    def look() -> list[tuple[str, object]]:
        listener.look()
        while station.step():
            pass
        heard, chief.heard = chief.heard, []
        return heard

    assert look() == []
    for _ in range(2):
        # The chief may ask again, for others.
        listener.take(0, Call(0, "listen", pickle.dumps([signal.SIGUSR2])))
        assert look() == [("listens", None)]
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert look() == [("signal", signal.SIGUSR2)]
            assert look() == []
