"""Processes without descriptors, by a table of processes that the test changes, and by real ones."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mpidist.comm import lives
from mpidist.comm.lives import Lives, life_of

# The limit of a test run ends what waits in vain.
SECONDS = 60.0


class Table:
    """A table of processes: the time at which each was started. Each end is noted once more for each time it is told."""

    def __init__(self, **started: str) -> None:
        self.started = started
        self.lives = Lives(lambda number: self.started.get(f"p{number}", ""))
        self.told: list[int] = []
        self.ends = {name: threading.Event() for name in started}

    def add(self, number: int) -> threading.Event:
        """Look at a process; the event says that its end was told."""
        end = self.ends.setdefault(f"p{number}", threading.Event())

        def on_end() -> None:
            self.told.append(number)
            end.set()

        self.lives.add(number, on_end)
        return end


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "LOOK_SECONDS", 0.001)


def test_who_is_dead_at_the_first_look_is_told() -> None:
    """It was alive a moment ago, and its number is nobody's: it would count as alive for ever."""
    table = Table(p2="200")
    assert table.add(1).wait(SECONDS)
    assert table.told == [1]


def test_who_has_the_number_of_a_dead_process_is_another_one() -> None:
    table = Table(p1="100", p2="100")
    first, second = table.add(1), table.add(2)
    for _ in range(3):
        assert table.lives.look()
    assert table.told == []
    table.started["p2"] = "101"
    assert second.wait(SECONDS)
    assert not first.is_set()
    del table.started["p1"]
    assert first.wait(SECONDS)
    assert not table.lives.look()
    assert table.told == [2, 1]


def test_who_is_added_after_the_last_one_has_ended_is_looked_at() -> None:
    table = Table(p2="200")
    assert table.add(1).wait(SECONDS)
    second = table.add(2)
    del table.started["p2"]
    assert second.wait(SECONDS)
    assert table.told == [1, 2]


def test_who_ends_while_another_end_is_told_is_told_too() -> None:
    table = Table(p1="100", p2="200")
    second = table.ends["p2"]

    def on_end() -> None:
        # In the middle of the look that has found it.
        del table.started["p2"]
        table.told.append(1)

    table.lives.add(1, on_end)
    table.add(2)
    del table.started["p1"]
    assert second.wait(SECONDS)
    assert table.told == [1, 2]


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
    # Five ticks of the kernel's clock of starts.
    time.sleep(0.05)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert int(life_of(other.pid)) > int(sign)
        other.kill()
        other.wait()
        assert life_of(other.pid) == ""
    assert life_of(named.pid) == sign
