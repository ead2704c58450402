"""A signal that is Slurm's notice, or the launcher's word of a death: after the first death, too."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from mpidist.cluster import signals
from mpidist.cluster.signals import SIGNALLED, Notice
from mpidist.failures.deaths import DeathWatch, this_process
from tests.unit.failures.settable_clock import Clock

HERE = this_process("here")
REASON = SIGNALLED + signal.SIGUSR1


class Rank:
    """A rank that serves: it ignores the launcher's signals, and takes notices with a function of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.watch, self.signals = Clock(), DeathWatch(), signals._Signals()
        self.clock.put_into(monkeypatch, signals)
        monkeypatch.setattr(signals, "WATCH", self.watch)
        self.watch.start(lambda: None, lambda _: [])
        # Those of a real one stay for ever.
        self.signals._has_hooks = True

    def listen(self) -> Notice:
        """A notice that hears of the signal."""
        notice = Notice()
        self.signals.tell(notice, [signal.SIGUSR1])
        return notice

    def hear(self, *, dies: int | None = None) -> None:
        """A signal comes, and perhaps the news of a death soon after it."""
        if dies is not None:
            self.clock.after(0.5, lambda: self.watch.note(HERE._replace(number=-dies), f"rank {dies}"))
        self.signals._decide(signal.SIGUSR1)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = Rank(monkeypatch)
    yield rank
    signal.signal(signal.SIGUSR1, before)


def test_each_death_brings_a_signal_and_any_other_one_is_a_notice(rank: Rank) -> None:
    notice = rank.listen()
    for number in (1, 2):
        rank.hear(dies=number)
        assert notice.reason == 0
    rank.hear()
    assert notice.reason == REASON


def test_a_death_from_before_counts_for_no_signal(rank: Rank) -> None:
    rank.watch.note(HERE._replace(number=-1), "rank 1")
    notice = rank.listen()
    rank.hear(dies=2)
    assert notice.reason == 0
    rank.hear()
    assert notice.reason == REASON


def test_who_was_silenced_hears_nothing_and_the_signal_is_as_before(rank: Rank) -> None:
    first, second = rank.listen(), rank.listen()
    rank.signals.silence(first)
    rank.hear()
    assert (first.reason, second.reason) == (0, REASON)
    rank.signals.silence(second)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
