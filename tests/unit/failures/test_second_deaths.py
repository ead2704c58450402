"""What the watch over processes does with the second event: another death, another rank, another signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpidist.failures import deaths
from mpidist.failures.deaths import SOME_RANK, DeathWatch, Process, this_process
from mpidist.failures.job_directory import DeathNotes
from mpidist.failures.peers import Key
from mpidist.failures.watchdog import WATCHDOG
from tests.unit.failures.settable_clock import Clock

HERE = this_process("here")
WORKERS = [HERE._replace(host="there", number=number) for number in (1, 2)]
SERVER = HERE._replace(host="there", number=3)
# Below the limit of a test: what waits in vain fails.
SECONDS = 50.0


def run_where_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads do what they do where they are started."""

    class Thread:
        def __init__(self, target: Callable[[], None], **_: object) -> None:
            self.start = target

    monkeypatch.setattr(deaths, "threading", types.SimpleNamespace(Thread=Thread))


class Watch:
    """A watch whose news come at once, in the thread that brings them.

    Attributes:
        told: The dead at each time that a death was told.
        reported: What MPI reports in each of its errors.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watch = DeathWatch()
        self.told: list[list[str]] = []
        self.reported: list[str] = []
        self.watch.start(lambda: self.told.append(list(self.watch.dead.values())), lambda _: self.reported)
        self.clock = Clock()
        self.clock.put_into(monkeypatch, deaths)
        run_where_they_start(monkeypatch)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture
def _signals() -> Iterator[None]:
    # That of a handler in another test.
    woken = signal.set_wakeup_fd(-1)
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)
    signal.set_wakeup_fd(woken)


def test_the_death_of_a_server_is_told_after_that_of_a_worker(at_once: Watch) -> None:
    at_once.watch.needed = frozenset([SERVER])
    at_once.watch.note(WORKERS[0], "worker 0")
    assert at_once.told == [["worker 0"]]
    at_once.watch.note(WORKERS[1], "worker 1")
    assert len(at_once.told) == 1
    at_once.watch.note(SERVER, "server 0")
    assert at_once.told[1:] == [["worker 0", "worker 1", "server 0"]]


def test_a_death_that_two_have_seen_is_told_once(at_once: Watch) -> None:
    """By the name of the first: that of a rank that may be alive says so."""
    at_once.watch.needed = frozenset([SERVER])
    at_once.watch.note(SERVER, "server 0, which does not respond")
    at_once.watch.note((SERVER.host, SERVER.number, SERVER.namespace), "server 0")
    assert at_once.told == [["server 0, which does not respond"]]
    assert list(at_once.watch.dead.values()) == at_once.told[0]


def test_the_death_of_one_that_is_spared_ends_nothing(at_once: Watch) -> None:
    """An evaluator's. The next one's is told as the first."""
    names: list[str] = []
    at_once.watch.spared[WORKERS[1]] = names.append
    for _ in range(2):
        at_once.watch.note(WORKERS[1], "rank 2 of 3 (process 2 on there)")
    assert names == ["rank 2 of 3 (process 2 on there)"]
    assert at_once.told == []
    assert at_once.watch.dead == {}
    at_once.watch.require_alive([HERE, *WORKERS], "a sum")
    # It is the death that an error of MPI, or the launcher's signal, tells of.
    at_once.reported = ["rank 2"]
    assert not at_once.watch.learn(RuntimeError("of MPI"))
    at_once.watch.note(WORKERS[0], "rank 1 of 3")
    assert at_once.told == [["rank 1 of 3"]]


def test_a_group_without_the_dead_goes_on(at_once: Watch) -> None:
    at_once.watch.note(WORKERS[0], "worker 0")
    assert at_once.watch.lost([HERE, WORKERS[1], SERVER]) == []
    at_once.watch.require_alive([HERE, WORKERS[1], SERVER], "a sum")
    at_once.watch.note(WORKERS[1], "worker 1")
    assert at_once.watch.lost([HERE, WORKERS[1], SERVER]) == ["worker 1"]
    assert at_once.watch.lost([HERE, *WORKERS]) == ["worker 0", "worker 1"]


def test_ranks_of_a_large_job_are_told_of_the_first_death_and_of_needed_ones(
    at_once: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever dies on a host that is not known is no process, of which a note could tell."""
    notes = DeathNotes(tmp_path, Key(*HERE))
    monkeypatch.setattr(WATCHDOG, "death_notes", notes)
    at_once.watch.needed = frozenset([SERVER])
    at_once.watch.suspect()
    assert len(at_once.told) == 1
    at_once.watch.note(WORKERS[0], "worker 0")
    at_once.watch.note(SERVER, "server 0")
    assert notes.news() == [(Key(*SERVER), "server 0")]
    assert len(at_once.told) == 2


def test_after_a_death_an_error_of_mpi_waits_for_the_news_of_another_one(at_once: Watch) -> None:
    """A death without a process would count in every group, also in those of ranks that live."""
    at_once.watch.note(WORKERS[0], "rank 1 of 4 (process 1 on there)")
    at_once.reported = ["rank 1 of 4", "rank 2 of 4"]
    at_once.clock.after(0.5, lambda: at_once.watch.note(WORKERS[1], "rank 2 of 4 (process 2 on there)"))
    assert at_once.watch.learn(ValueError("of MPI"))
    assert set(at_once.watch.dead) == set(WORKERS)
    naps = len(at_once.clock.slept)
    assert at_once.watch.learn(ValueError("of MPI, again"))
    assert len(at_once.clock.slept) == naps
    at_once.reported = [SOME_RANK]
    assert at_once.watch.learn(ValueError("of MPI, without a rank"))
    assert set(at_once.watch.dead) == set(WORKERS)


def test_what_mpi_alone_reports_is_waited_for_once(at_once: Watch) -> None:
    at_once.reported = ["rank 3 of 4"]
    assert at_once.watch.learn(ValueError("of MPI"))
    naps = len(at_once.clock.slept)
    assert naps
    assert at_once.watch.learn(ValueError("of MPI, again"))
    assert len(at_once.clock.slept) == naps
    assert list(at_once.watch.dead) == ["rank 3 of 4"]


def test_another_rank_whose_name_begins_alike_is_another_one(at_once: Watch) -> None:
    at_once.watch.note(WORKERS[0], "rank 1 of 20 (process 1 on there)")
    at_once.reported = ["rank 1 of 2"]
    assert at_once.watch.learn(ValueError("of MPI"))
    assert list(at_once.watch.dead) == [WORKERS[0], "rank 1 of 2"]


def start() -> subprocess.Popen[bytes]:
    """A process that lives until it is ended, or reads a line."""
    return subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)


def test_only_the_worker_that_was_given_up_is_ended() -> None:
    watch = DeathWatch()
    happened = threading.Event()
    watch.start(happened.set, lambda _: [])
    with start() as first, start() as second, start() as third:
        processes = [HERE, *(HERE._replace(number=one.pid) for one in (first, second, third))]
        watch.watch(processes, 0)
        watch.end(processes[2])
        assert second.wait(SECONDS) == -signal.SIGKILL
        assert happened.wait(SECONDS)
        # It has ended: nothing happens, and above all nothing to the others.
        watch.end(processes[2])
        for one in (first, third):
            one.communicate(b"\n")
            assert one.returncode == 0


def test_a_process_in_two_groups_is_watched_once(at_once: Watch) -> None:
    """Else it would be told twice, and each group would take a descriptor."""
    with start() as one, start() as other:
        processes = [HERE, HERE._replace(number=one.pid)]
        at_once.watch._open_poll = lambda: types.SimpleNamespace(register=lambda *_: None)  # type: ignore[assignment, method-assign, return-value]
        for group in (processes, processes[::-1], [*processes, HERE._replace(number=other.pid)]):
            at_once.watch.watch(group, group.index(HERE))
        assert [process.number for process, _ in at_once.watch._watched.values()] == [one.pid, other.pid]
        for descriptor in at_once.watch._watched:
            os.close(descriptor)
        for process in (one, other):
            process.kill()


def test_nobody_is_watched_where_numbers_of_processes_mean_nothing(at_once: Watch) -> None:
    """Without `/proc` nobody knows whether two of one host have one space of numbers."""
    unknown = HERE._replace(namespace="")
    with start() as other:
        at_once.watch.watch([unknown, unknown._replace(number=other.pid)], 0)
        assert not at_once.watch._watched
        assert not at_once.watch.watches(unknown._replace(number=other.pid))
        other.kill()


@pytest.mark.usefixtures("_signals")
def test_two_signals_that_come_together_are_both_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, heard, first, last = DeathWatch(), list[int](), threading.Event(), threading.Event()
    try:
        watch.hear(signal.SIGUSR1, first.set)
        watch.hear(signal.SIGUSR2, lambda: heard.append(signal.SIGUSR2))
        watch.hear(signal.SIGTERM, last.set)
        # What is heard is called by the thread that has begun to wait.
        run_where_they_start(monkeypatch)
        writer = signal.set_wakeup_fd(-1)
        # As the interpreter does; one write is read as a whole.
        os.write(writer, bytes([signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]))
        assert first.wait(SECONDS)
        os.write(writer, bytes([signal.SIGTERM]))
        assert last.wait(SECONDS)
        assert heard == [signal.SIGUSR2]
    finally:
        signal.set_wakeup_fd(-1)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("is_ours", [True, False])
def test_signals_of_a_child_are_not_its_parents(monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    monkeypatch.setattr(deaths, "_is_under_hydra", lambda: True)
    in_child: list[Callable[[], None]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: in_child.append(after_in_child))
    watch = DeathWatch()
    watch.start(lambda: None, lambda _: [])
    for _ in range(2):
        watch.refuse_children()
    assert len(in_child) == 1
    try:
        watch.take_notices(has_other_hosts=True)
        if not is_ours:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        in_child[0]()
        # A byte of its would wake the parent, which would take the child's signal for its own.
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(-1)
    assert signal.getsignal(signal.SIGUSR1) == (signal.SIG_DFL if is_ours else signal.SIG_IGN)
    with pytest.raises(RuntimeError, match="was forked from a rank"):
        watch.require_alive([HERE, SERVER], "a sum")


@pytest.mark.usefixtures("_signals")
def test_a_handler_that_the_program_sets_later_is_its_own(at_once: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signals tell of no deaths on other hosts, and it stays where the rank begins to serve."""
    monkeypatch.setattr(deaths, "_is_under_hydra", lambda: True)
    own: list[int] = []
    heard: dict[int, Callable[[], None]] = {}
    monkeypatch.setattr(at_once.watch, "hear", heard.__setitem__)
    at_once.watch.take_notices(has_other_hosts=True)
    signal.signal(signal.SIGUSR1, lambda number, _: own.append(number))
    heard[signal.SIGUSR1]()
    assert at_once.watch.dead == {}
    at_once.watch.ignore_notices(at_end=False)
    signal.raise_signal(signal.SIGUSR1)
    assert own == [signal.SIGUSR1]
    at_once.watch.ignore_notices()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


@pytest.mark.usefixtures("_signals")
def test_a_notice_is_a_death_on_another_host_unless_news_come(
    at_once: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_is_under_hydra", lambda: True)
    others: list[bool] = []
    heard: dict[int, Callable[[], None]] = {}
    monkeypatch.setattr(at_once.watch, "hear", heard.__setitem__)
    at_once.watch.take_notices(has_other_hosts=True)
    assert at_once.watch.give_notices(others.append)
    heard[signal.SIGUSR1]()
    assert (others, at_once.watch.dead) == ([True], {})
    assert at_once.watch.give_notices(None)
    at_once.clock.after(0.5, lambda: at_once.watch.note(WORKERS[0], "worker 0"))
    signal.raise_signal(signal.SIGUSR1)
    assert list(at_once.watch.dead) == [WORKERS[0]]
    assert others == [True]


def test_the_processes_of_two_hosts_differ_though_their_numbers_do_not(at_once: Watch) -> None:
    at_once.watch.note(SERVER, "server 0")
    assert at_once.watch.lost([HERE, Process("here", SERVER.number, SERVER.namespace)]) == []
