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
from mpidist.recorder.rank_page import PAGE_BYTES, Page


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


class ManyPages:
    """Ranks that know each other's pages, in place of the watchdog: the first one is this process."""

    def __init__(self) -> None:
        self.page = Page(memoryview(bytearray(PAGE_BYTES)))
        self.others = [types.SimpleNamespace(page=Page(memoryview(bytearray(PAGE_BYTES)))) for _ in range(20)]

    def peers(self) -> list[types.SimpleNamespace]:
        """All others."""
        return self.others


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> ManyPages:
    pages = ManyPages()
    monkeypatch.setattr(lives, "WATCHDOG", pages)
    return pages


def around(monkeypatch: pytest.MonkeyPatch) -> tuple[Table, list[int], list[int]]:
    """A table of ten processes before this one and ten after it, and the processes that were looked at."""
    here = os.getpid()
    numbers = [*range(here - 10, here), *range(here + 1, here + 11)]
    table = Table(monkeypatch, dict.fromkeys(numbers, "100"))
    looked: list[int] = []
    table.add(*numbers)
    life = table.lives._life

    def noted(number: int) -> str:
        looked.append(number)
        return life(number)

    monkeypatch.setattr(table.lives, "_life", noted)
    return table, numbers, looked


def test_of_many_processes_the_next_one_is_looked_at(monkeypatch: pytest.MonkeyPatch, many: ManyPages) -> None:
    table, numbers, looked = around(monkeypatch)
    for _ in range(4):
        assert table.lives.look()
    assert looked == [os.getpid() + 1] * 4
    # It ends, and this process looks at all; so do the others.
    del table.started[os.getpid() + 1]
    assert table.lives.look()
    assert table.told == [os.getpid() + 1]
    assert set(looked) == {*numbers}
    assert all(one.page.bell for one in many.others)
    looked.clear()
    assert table.lives.look()
    assert looked == [os.getpid() + 2]


def test_who_is_told_of_an_end_looks_at_all_once(monkeypatch: pytest.MonkeyPatch, many: ManyPages) -> None:
    table, numbers, looked = around(monkeypatch)
    del table.started[numbers[3]]
    assert table.lives.look()
    assert table.told == []
    many.page.bell = 5
    assert table.lives.look()
    assert table.told == [numbers[3]]
    looked.clear()
    assert table.lives.look()
    assert len(looked) == 1


def test_the_first_process_is_next_to_the_last_one(monkeypatch: pytest.MonkeyPatch, many: ManyPages) -> None:
    here = os.getpid()
    numbers = range(here - 20, here)
    table = Table(monkeypatch, dict.fromkeys(numbers, "100"))
    table.add(*numbers)
    del table.started[here - 20]
    assert table.lives.look()
    assert table.told == [here - 20]


def test_who_is_dead_when_it_is_added_to_many_is_told(monkeypatch: pytest.MonkeyPatch, many: ManyPages) -> None:
    table = Table(monkeypatch, {number: "100" for number in range(1, 20) if number != 7})
    table.add(*range(1, 20))
    assert table.lives.look()
    assert table.told == [7]
