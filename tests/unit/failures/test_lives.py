"""Processes without descriptors, by a table of processes that the test changes, and by real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from mpidist.failures import lives
from mpidist.failures.lives import Lives, how_ended, life_of


class Table:
    """A table of processes, as `number: the time at which it was started`, and the looks at it.

    Attributes:
        threads: The number of threads that have begun to look; the test looks for them.
        told: The processes that have ended, in the order in which that was told.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, started: dict[int, str]) -> None:
        self.started = started
        self.lives = Lives(lambda number: self.started.get(number, ""))
        self.told: list[int] = []
        self.threads = 0
        monkeypatch.setattr(lives, "threading", types.SimpleNamespace(Thread=lambda **_: self))

    def start(self) -> None:
        """Begin to look."""
        self.threads += 1

    def add(self, *numbers: int) -> None:
        """Look at more processes."""
        for number in numbers:
            self.lives.add(number, lambda number=number: self.told.append(number))  # type: ignore[misc]


def test_who_is_dead_at_the_first_look_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was alive a moment ago, and its number is nobody's: it would count as alive for ever."""
    table = Table(monkeypatch, {2: "200"})
    table.add(1, 2)
    assert table.lives.look()
    assert table.told == [1]


def test_who_has_the_number_of_a_dead_process_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, {1: "100", 2: "100"})
    table.add(1, 2)
    for _ in range(3):
        assert table.lives.look()
    assert table.told == []
    table.started[2] = "101"
    assert table.lives.look()
    assert table.told == [2]
    del table.started[1]
    assert not table.lives.look()
    assert not table.lives.look()
    assert table.told == [2, 1]
    assert table.threads == 1


def test_who_is_added_after_the_last_one_has_ended_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, {1: "100", 2: "200"})
    table.add(1)
    del table.started[1]
    # The thread ends after it.
    assert not table.lives.look()
    table.add(2)
    assert table.threads == 2
    assert table.lives.look()
    assert table.told == [1]


def test_who_ends_while_another_end_is_told_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that begins in the middle of the look that has found the first one, too."""
    table = Table(monkeypatch, {1: "100", 2: "200"})
    table.lives.add(1, lambda: table.add(2))
    table.started.clear()
    assert not table.lives.look()
    assert table.threads == 2
    assert not table.lives.look()
    assert table.told == [2]


@pytest.fixture
def named() -> Iterator[subprocess.Popen[str]]:
    """A process whose name looks like the end of a name and a state."""
    program = "open('/proc/self/comm', 'w').write('a) Z 1 (b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        yield process
        process.kill()


def test_the_sign_of_life_is_the_start_of_a_process_whatever_its_name(named: subprocess.Popen[str]) -> None:
    sign = life_of(named.pid)
    assert sign.isdecimal()
    # The kernel's clock of starts has coarse ticks: the first one that is later.
    while True:
        with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
            later = int(life_of(other.pid))
            other.kill()
        assert later >= int(sign)
        if later > int(sign):
            break
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        other.kill()
        other.wait()
        assert life_of(other.pid) == ""
    assert life_of(named.pid) == sign


@pytest.mark.parametrize(("end", "told"), [
    ("os._exit(0)", "exit code 0"), ("os._exit(7)", "exit code 7"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11 (SIGSEGV)"), ("os.kill(os.getpid(), 40)", "signal 40"),
])
def test_how_a_process_has_ended(end: str, told: str) -> None:
    """Where the kernel tells it; elsewhere nothing is said."""
    with subprocess.Popen([sys.executable, "-c", f"import os, signal; input(); {end}"], stdin=subprocess.PIPE) as one:
        descriptor = os.pidfd_open(one.pid)
        assert one.stdin is not None
        one.stdin.write(b"\n")
    try:
        assert how_ended(descriptor) == (told if _kernel() >= (6, 15) else "")
    finally:
        os.close(descriptor)


def test_who_lives_has_not_ended() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        assert how_ended(descriptor) == ""
    finally:
        os.close(descriptor)


def _kernel() -> tuple[int, ...]:
    return tuple(int(one) for one in os.uname().release.split(".")[:2])
