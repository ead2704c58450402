"""The check for leaks, with threads that come and go beside it."""

from __future__ import annotations

import threading
import time

import pytest

from tests.helpers import leaks


def test_a_thread_that_another_one_is_about_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    check = leaks.LeakCheck()
    check.begin()
    thread = threading.Thread(target=time.sleep, args=(0.1,), name="about to start")
    # As `Thread.start` has it for a moment: listed, and not to be joined.
    monkeypatch.setitem(vars(threading)["_limbo"], thread, thread)
    threading.Timer(0.2, thread.start).start()
    assert check.end("a test", keeps_memory=False) == []


def test_a_thread_that_begins_while_another_one_ends_is_waited_for() -> None:
    check = leaks.LeakCheck()
    check.begin()
    second = threading.Thread(target=time.sleep, args=(0.1,), name="second")
    first = threading.Timer(0.1, second.start)
    first.start()
    assert check.end("a test", keeps_memory=False) == []


def test_a_thread_that_stays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_ENDING_SECONDS", 0.1)
    check = leaks.LeakCheck()
    check.begin()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="stays")
    thread.start()
    lines = check.end("a test", keeps_memory=False)
    stop.set()
    thread.join()
    assert len(lines) == 1
    assert "threads" in lines[0]
    assert "stays" in lines[0]
