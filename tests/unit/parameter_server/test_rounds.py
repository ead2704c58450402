"""Synchronous rounds, over random orders of all that can happen: who counts, who is late, and the ends of work."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.parameter_server.protocol.messages import (
    Applied,
    Commit,
    CommitPart,
    CommitStep,
    Do,
    Drop,
    Finished,
    Prepared,
    Round,
    Send,
)
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.commits import Commits
from mpidist.parameter_server.queue.synchronous import Rounds
from mpidist.parameter_server.queue.waiting import SETTLED_SECONDS
from mpidist.parameter_server.queue.work import Name, Rules, Work
from mpidist.recorder.recorder import Update
from tests.model.turns import take_turns

SERVERS = (1, 2)
WORKERS = (3, 4, 5)
OPTIMIZER = 7
ANY = Rules()


class Party:
    """Servers and workers that answer the coordinator's messages when they are told to."""

    def __init__(self, wanted: int, count: int, rules: Rules = ANY) -> None:
        self.updates: list[Update] = []
        self.rounds = Rounds(note=self.updates.append, wanted=wanted)
        self.closures = Closures(Commits(0, SERVERS, lambda _, iteration: 0.5 + iteration), versions=self.rounds)
        # What somebody is to tell, by who tells it: channels keep their order.
        self.channels: dict[int, list[Callable[[], object]]] = {one: [] for one in (*SERVERS, *WORKERS)}
        # Of each server: the attempts whose gradients it has added up together, and those that it has dropped.
        self.steps: dict[int, list[list[tuple[int, int]]]] = {server: [] for server in SERVERS}
        self.late: dict[int, list[tuple[int, int]]] = {server: [] for server in SERVERS}
        # By attempt: what its worker has read when it began.
        self.read: dict[tuple[int, int], set[int]] = {}
        for worker in WORKERS:
            self.do(self.closures.joined(worker, 0.0))
        for _ in range(count):
            self.do(self.closures.schedule(Work(Name("function", 1, b""), b""), rules, 0.0)[1])

    def tell(self, sender: int, message: object) -> None:
        self.do(self.closures.take(sender, message, 0.0) or [])  # type: ignore[arg-type]  # one of the protocol's

    def do(self, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]  # a list of them
            if isinstance(action, Send) and isinstance(action.message, Do | Commit | Round):
                act = self.run if isinstance(action.message, Do) else self.apply
                self.channels[action.rank].append(
                    lambda act=act, one=action: act(one.rank, one.message)  # type: ignore[misc]
                )

    def run(self, worker: int, do: Do) -> None:
        if do[:2] not in self.read:
            # It reads one moment, and returns another.
            self.read[do[:2]] = {len(steps) for steps in self.steps.values()}
            self.channels[worker].insert(0, lambda: self.run(worker, do))
            return
        self.tell(worker, Finished(do.closure, do.attempt, SERVERS, (OPTIMIZER,), b""))
        for server in SERVERS:
            self.channels[server].append(lambda s=server: self.tell(s, Prepared(do.closure, do.attempt)))  # type: ignore[misc]

    def apply(self, server: int, message: Commit | Round) -> None:
        parts = [one[1:3] if isinstance(one, CommitPart) else one[2:4] for one in (
            message.parts if isinstance(message, Round) else [message]
        )]
        (self.steps if message.steps else self.late)[server].append(parts if message.steps else parts[0])  # type: ignore[arg-type]
        for part in parts:
            self.tell(server, Applied(*part))

    def lose(self, worker: int) -> None:
        self.channels[worker].clear()
        self.do(self.closures.lost(worker, 0.0))
        self.do(self.closures.look(SETTLED_SECONDS))

    def go_on(self, *but: int) -> None:
        """Let all go on but these."""
        while ready := [one for one, channel in self.channels.items() if channel and one not in but]:
            self.channels[ready[0]].pop(0)()

    def wait(self) -> None:
        """The program waits for all that can come."""
        self.go_on()
        while actions := self.closures.end_round():
            self.do(actions)
            self.go_on()


@given(wanted=st.integers(1, 3), seed=st.integers(0, 2**32), loses=st.booleans())
def test_what_counts_together_has_read_the_same_version(wanted: int, seed: int, loses: bool) -> None:
    party = Party(wanted, 11)
    take_turns(party.channels, WORKERS, seed, party.lose if loses else None)
    party.wait()
    assert party.closures.is_done
    assert party.steps[1] == party.steps[2]
    assert sorted(party.late[1]) == sorted(party.late[2])
    for version, together in enumerate(party.steps[1]):
        assert all(party.read[attempt] == {version} for attempt in together)
    counted = [attempt for together in party.steps[1] for attempt in together]
    assert sorted(closure for closure, _ in [*counted, *party.late[1]]) == list(range(1, 12))
    assert party.rounds.late == len(party.late[1]) == sum(one.is_late for one in party.updates)
    assert [(one.closure, one.attempt) for one in party.updates if not one.is_late] == counted
    assert all(one.is_late == (one.read < one.before) for one in party.updates)
    # Only the last round is smaller, or one without enough workers.
    sizes = [len(together) for together in party.steps[1]]
    assert set(sizes) <= {wanted, min(wanted, 2) if loses else wanted, sizes[-1]}
    assert sizes[-1] <= wanted


def test_a_worker_that_stood_still_is_late_and_changes_no_version() -> None:
    party = Party(2, 9)
    party.channels[WORKERS[0]].pop(0)()
    party.go_on(WORKERS[0])
    assert Counter(map(len, party.steps[1])) == {2: 4}
    party.go_on()
    assert (party.late[1], party.rounds.late, party.rounds.number) == ([(1, 1)], 1, 4)
    assert (party.updates[-1].read, party.updates[-1].before) == (0, 4)
    assert party.closures.is_done


def test_a_round_waits_for_one_that_stands_still_and_goes_on_without_it_when_it_is_lost() -> None:
    party = Party(3, 7)
    party.channels[WORKERS[0]].pop(0)()
    party.go_on(WORKERS[0])
    assert party.steps[1] == []
    assert party.closures.end_round() == [], "one runs"
    party.lose(WORKERS[0])
    party.wait()
    assert party.closures.is_done
    assert [len(together) for together in party.steps[1]] == [2, 2, 2, 1]
    assert (1, 2) in itertools.chain(*party.steps[1])


def test_a_lost_worker_takes_its_update_out_of_the_round() -> None:
    party = Party(2, 2)
    party.go_on(WORKERS[1])
    assert party.rounds.number == 0
    party.lose(WORKERS[0])
    party.wait()
    assert sorted(party.steps[1]) == [[(1, 2), (2, 1)]] or sorted(party.steps[1]) == [[(2, 1), (1, 2)]]


def test_a_round_names_steps_and_the_updates_that_make_them() -> None:
    party = Party(2, 2)
    sent: list[Send] = []
    party.do = sent.extend  # type: ignore[method-assign,assignment]  # nobody answers
    for worker, closure, servers, optimizers in ((4, 2, (1, 2), (7, 8, 7)), (3, 1, (2,), (7,))):
        party.tell(worker, Finished(closure, 1, servers, optimizers, b""))
        for server in servers:
            party.tell(server, Prepared(closure, 1))
    steps = (CommitStep(7, 0, 0.5), CommitStep(8, 0, 0.5), CommitStep(7, 1, 1.5))
    first, second = CommitPart(3, 1, 1, (0,)), CommitPart(4, 2, 1, (0, 1, 2))
    assert sent == [
        Send(2, Round(1, (first, second), steps, (2, 1, 1))), Send(1, Round(1, (second,), steps, (2, 1, 1)))
    ]
    assert party.closures.commits.iterations == {7: 2, 8: 1}


def test_a_round_without_a_learning_rate_fails_as_a_whole() -> None:
    party = Party(2, 2)
    party.closures.commits.rate = lambda *_: float("nan")
    sent: list[Send] = []
    party.do = sent.extend  # type: ignore[method-assign,assignment]  # nobody answers
    for worker, closure in ((3, 1), (4, 2)):
        party.tell(worker, Finished(closure, 1, (1,), (7,), b""))
        party.tell(1, Prepared(closure, 1))
    assert sent == [Send(1, Drop(3, 1, 1)), Send(1, Drop(4, 2, 1))]
    assert (party.rounds.number, party.updates) == (0, [])


def test_what_makes_no_step_counts_beside_the_round() -> None:
    """Also one of each worker, as many as make a round."""
    party = Party(2, 2)
    sent: list[Send] = []
    party.do = sent.extend  # type: ignore[method-assign,assignment]  # nobody answers
    for worker, closure in ((3, 1), (4, 2)):
        party.tell(worker, Finished(closure, 1, (1,), (), b""))
        party.tell(1, Prepared(closure, 1))
    assert sent == [Send(1, Commit(1, 3, 1, 1, ())), Send(1, Commit(2, 4, 2, 1, ()))]
    assert (party.rounds.number, party.updates) == (0, [])


@pytest.mark.parametrize("wanted", [2, 3])
def test_functions_for_one_worker_count_one_by_one_when_the_program_waits(wanted: int) -> None:
    party = Party(wanted, 3, Rules(worker=WORKERS[0]))
    party.go_on()
    assert party.rounds.number == 0
    party.wait()
    assert party.steps[1] == [[(1, 1)], [(2, 1)], [(3, 1)]]
