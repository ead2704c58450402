"""The bound on the updates between an attempt's reads and its own update, over random orders of all that can happen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.parameter_server.protocol.messages import Applied, Commit, Do, Fence, Finished, Prepared, Send
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.commits import Commits
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.parameter_server.queue.waiting import SETTLED_SECONDS
from mpidist.parameter_server.queue.work import Name, Rules, Work
from mpidist.recorder.recorder import Update
from tests.model.turns import take_turns

SERVERS = (1, 2)
WORKERS = (3, 4, 5)


class Party:
    """Servers and workers that answer the coordinator's messages when they are told to."""

    def __init__(self, staleness: int | None, count: int, *, prefetch: bool = False) -> None:
        self.updates: list[Update] = []
        self.closures = Closures(
            Commits(0, SERVERS, lambda *_: 0.5), prefetch=prefetch, versions=Versions(staleness, self.updates.append)
        )
        # What somebody is to tell, by who tells it: channels keep their order.
        self.channels: dict[int, list[Callable[[], object]]] = {one: [] for one in (*SERVERS, *WORKERS)}
        self.applied = dict.fromkeys(SERVERS, 0)
        # By closure: what its worker has read when it began.
        self.read: dict[int, int] = {}
        self.lag: list[int] = []
        for worker in WORKERS:
            self.do(self.closures.joined(worker, 0.0))
        for _ in range(count):
            self.do(self.closures.schedule(Work(Name("function", 1, b""), b""), Rules(), 0.0)[1])

    def tell(self, sender: int, *messages: object) -> None:
        for message in messages:
            self.do(self.closures.take(sender, message, 0.0) or [])  # type: ignore[arg-type]  # one of the protocol's

    def do(self, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]  # a list of them
            if not isinstance(action, Send) or isinstance(action.message, Fence):
                continue
            rank, message = action
            if isinstance(message, Do):
                self.channels[rank].append(lambda rank=rank, do=message: self.run(rank, do))  # type: ignore[misc]
            elif isinstance(message, Commit):
                self.channels[rank].append(lambda rank=rank, one=message: self.apply(rank, one))  # type: ignore[misc]

    def run(self, worker: int, do: Do) -> None:
        if do.closure not in self.read:
            # It reads one moment, and returns another.
            self.read[do.closure] = min(self.applied.values())
            self.channels[worker].insert(0, lambda: self.run(worker, do))
            return
        self.tell(worker, Finished(do.closure, do.attempt, SERVERS, (), b""))
        for server in SERVERS:
            self.channels[server].append(lambda s=server: self.tell(s, Prepared(do.closure, do.attempt)))  # type: ignore[misc]

    def apply(self, server: int, commit: Commit) -> None:
        if server == SERVERS[0]:
            self.lag.append(commit.number - 1 - self.read[commit.closure])
        self.applied[server] += 1
        self.tell(server, Applied(commit.closure, commit.attempt))

    def lose(self, worker: int) -> None:
        self.channels[worker].clear()
        for number in [n for n, one in self.closures._closures.items() if one.worker == worker and not one.is_decided]:
            self.read.pop(number, None)
        self.do(self.closures.lost(worker, 0.0))
        self.do(self.closures.look(SETTLED_SECONDS))


@pytest.mark.parametrize("prefetch", [False, True])
@given(staleness=st.integers(0, 4), seed=st.integers(0, 2**32), loses=st.booleans())
def test_no_update_counts_later_than_the_bound_says_and_all_come_to_their_end(
    staleness: int, seed: int, loses: bool, prefetch: bool
) -> None:
    party = Party(staleness, 12, prefetch=prefetch)
    take_turns(party.channels, WORKERS, seed, party.lose if loses else None)
    assert party.closures.is_done
    assert len(party.updates) == len(party.lag) == 12
    assert [one.before for one in party.updates] == list(range(12))
    assert max(party.lag) <= staleness
    assert all(0 <= one.before - one.read <= staleness for one in party.updates)
    assert all(party.read[one.closure] >= one.read for one in party.updates)


def test_without_a_bound_an_update_counts_at_once() -> None:
    party = Party(None, 6)
    # The first worker stops after its read; the others go on.
    party.channels[WORKERS[0]].pop(0)()
    for _ in range(200):
        ready = [one for one, channel in party.channels.items() if channel and one != WORKERS[0]]
        if not ready:
            break
        party.channels[ready[0]].pop(0)()
    assert len(party.updates) == 5
    party.channels[WORKERS[0]].pop(0)()
    while ready := [one for one, channel in party.channels.items() if channel]:
        party.channels[ready[0]].pop(0)()
    assert party.updates[-1].before - party.updates[-1].read == 5
    assert party.closures.is_done


def test_others_wait_for_one_that_stands_still_and_go_on_when_it_is_lost() -> None:
    party = Party(2, 9)
    party.channels[WORKERS[0]].pop(0)()

    def all_but_the_first() -> None:
        while ready := [one for one, channel in party.channels.items() if channel and one != WORKERS[0]]:
            party.channels[ready[0]].pop(0)()

    all_but_the_first()
    assert [one.closure for one in party.updates] == [2, 3]
    party.lose(WORKERS[0])
    all_but_the_first()
    assert party.closures.is_done
    assert sorted(one.closure for one in party.updates) == list(range(1, 10))
