"""The watch over processes, with processes that end in every way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mpidist.errors import DeadRankError
from mpidist.failures import deaths, lives
from mpidist.failures.deaths import IS_SILENT, DeathWatch, Process, describe, this_process

# Below the limit of a test: what waits in vain fails.
SECONDS = 50.0


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "LOOK_SECONDS", 0.01)


def start() -> subprocess.Popen[bytes]:
    """A process that lives until it is ended, or reads a line."""
    return subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with start() as process:
        yield process
        process.kill()


def watch_over(child: subprocess.Popen[bytes]) -> tuple[DeathWatch, threading.Event, list[Process]]:
    here = this_process("here")
    processes = [here, here._replace(number=child.pid)]
    happened = threading.Event()
    watch = DeathWatch()
    watch.start(happened.set, lambda error: ["rank 1 of 2"] if isinstance(error, ConnectionError) else [])
    watch.watch(processes, 0)
    return watch, happened, processes


def refuse(_: int) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("has_descriptors", [True, False])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_end_of_a_process_is_seen(
    child: subprocess.Popen[bytes], end: signal.Signals | None, has_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    watch, happened, processes = watch_over(child)
    assert watch.lost(processes) == []
    watch.require_alive(processes, "a sum")
    if end is None:
        child.communicate(b"\n")
    else:
        child.send_signal(end)
    assert happened.wait(SECONDS)
    name = f"rank 1 of 2 (process {child.pid} on here)"
    assert watch.lost(processes) == [name]
    assert watch.lost(processes[:1]) == []
    assert not watch.was_raised
    with pytest.raises(DeadRankError, match=r"a sum cannot be done: rank 1 of 2 \(process \d+ on here\) terminated"):
        watch.require_alive(processes, "a sum")
    assert watch.was_raised


def test_who_has_no_descriptor_is_watched_beside_those_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread that waits for descriptors has begun before, and would wait for ever."""
    with start() as first, start() as second:
        watch, happened, processes = watch_over(first)
        watch.hear(signal.SIGINT, lambda: None)
        # Signals of the tests that follow are not this watch's.
        signal.set_wakeup_fd(-1)
        monkeypatch.setattr(os, "pidfd_open", refuse)
        watch.watch([*processes, processes[0]._replace(number=second.pid)], 0)
        second.kill()
        assert happened.wait(SECONDS)
        assert list(watch.dead.values()) == [f"rank 2 of 3 (process {second.pid} on here)"]
        first.kill()


def test_processes_elsewhere_are_not_watched(child: subprocess.Popen[bytes]) -> None:
    here = this_process("here")
    watch = DeathWatch()
    watch.start(lambda: None, lambda _: [])
    before = len(os.listdir("/proc/self/fd"))
    watch.watch([here, Process("there", child.pid, here.namespace), Process("here", child.pid, "pid:[1]")], 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_gone_already_is_dead(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    watch, happened, processes = watch_over(child)
    assert happened.wait(SECONDS)
    assert len(watch.lost(processes)) == 1


def test_after_the_farewell_nobody_is_dead(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, happened, processes = watch_over(child)
    note, noted = watch._note, threading.Event()

    def look(process: Process | str, name: str) -> None:
        note(process, name)
        noted.set()

    monkeypatch.setattr(watch, "_note", look)
    watch.stop()
    child.kill()
    assert noted.wait(SECONDS)
    assert watch.lost(processes) == []
    assert not happened.is_set()


def test_an_error_of_mpi_brings_the_news(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_NEWS_SECONDS", 0.02)
    watch, happened, processes = watch_over(child)
    assert not watch.learn(ValueError("of the program"))
    assert watch.learn(ConnectionError("of MPI, of a rank on another host"))
    assert happened.wait(SECONDS)
    # Its process is not known: each group may be its group, but that of this process alone.
    assert watch.lost(processes) == ["rank 1 of 2"]
    assert watch.lost(processes[:1]) == []


def test_an_error_of_mpi_names_nobody_twice(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's news come late on a busy machine.
    monkeypatch.setattr(deaths, "_NEWS_SECONDS", SECONDS)
    watch, _, processes = watch_over(child)
    child.kill()
    assert watch.learn(ConnectionError("of MPI"))
    assert len(watch.lost(processes)) == 1


def test_a_death_that_comes_while_one_is_told_harms_nothing() -> None:
    here = this_process("here")

    class Late(Process):
        """A process in whose turn another one dies."""

        def __hash__(self) -> int:
            if watch.dead:
                watch.note(here._replace(number=2), "rank 2 of 3")
            return super().__hash__()

    watch = DeathWatch()
    watch.start(lambda: None, lambda _: [])
    first = here._replace(number=1)
    watch.dead = {Late(*first): "rank 1 of 3"}
    assert watch.lost([here, first]) == ["rank 1 of 3"]
    assert list(watch.dead.values()) == ["rank 1 of 3", "rank 2 of 3"]


def test_the_sentence_about_the_dead() -> None:
    assert describe(["rank 3 of 4", "rank 1 of 4"]).startswith("rank 1 of 4, rank 3 of 4 terminated unexpectedly")
    silent = f"rank 2 of 4{IS_SILENT}"
    assert describe([silent]).startswith("rank 2 of 4 cannot be reached: the host does not respond")
    both = describe([silent, "rank 1 of 4"])
    assert both.startswith("rank 1 of 4 terminated unexpectedly")
    assert "; rank 2 of 4 cannot be reached" in both


def test_many_signals_are_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_is_under_hydra", lambda: True)
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    depths: list[int] = []
    told: list[bool] = []

    def wait() -> bool:
        depths.append(len(depths))
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
        return False

    try:
        watch = DeathWatch()
        watch.take_notices(has_other_hosts=False)
        assert watch.give_notices(told.append)
        monkeypatch.setattr(watch, "_wait_for_news", wait)
        signal.raise_signal(signal.SIGUSR1)
        assert (depths, told) == ([0], [False])
        signal.raise_signal(signal.SIGUSR1)
        assert (depths, told) == ([0, 1], [False, False])
    finally:
        signal.signal(signal.SIGUSR1, before)
