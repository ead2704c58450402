"""Pushes, commits, fences and cuts at a server, and those that break the protocol."""

from __future__ import annotations

import pytest

from mpidist.parameter_server.protocol.messages import (
    OWN_WRITE,
    Applied,
    Commit,
    Drop,
    Fence,
    Message,
    Prepared,
    Push,
    Send,
    SnapshotDone,
    SnapshotRequest,
)
from mpidist.parameter_server.server.staging import Action, Apply, Free, Save, Staging

COORDINATOR, WORKER = 0, 5


def push(closure: int, *, slot: int = 0, attempt: int = 1, ordinal: int = 0, last: bool = True) -> Push:
    return Push(closure, attempt, slot, ordinal, last)


def commit(number: int, closure: int, *, worker: int = WORKER, attempt: int = 1) -> Commit:
    return Commit(number, worker, closure, attempt, ())


def feed(*messages: tuple[int, Message]) -> tuple[Staging, list[Action]]:
    staging = Staging(COORDINATOR)
    actions: list[Action] = []
    for sender, message in messages:
        took = staging.take(sender, message)
        assert took is not None
        actions += took
    return staging, actions


def test_whole_update_is_prepared_then_applied_then_forgotten() -> None:
    first, second = push(1, ordinal=0, last=False), push(1, ordinal=1)
    staging, actions = feed((WORKER, first))
    assert actions == []
    staging, actions = feed((WORKER, first), (WORKER, second), (COORDINATOR, commit(1, 1)))
    assert actions == [
        Send(COORDINATOR, Prepared(1, 1)), Apply(commit(1, 1), 0, 2), Send(COORDINATOR, Applied(1, 1))
    ]
    assert staging.staged == {}


def test_next_update_is_staged_before_the_last_is_applied() -> None:
    staging, actions = feed((WORKER, push(1)), (WORKER, push(2, slot=1)), (COORDINATOR, commit(1, 1)))
    assert actions[:2] == [Send(COORDINATOR, Prepared(1, 1)), Send(COORDINATOR, Prepared(2, 1))]
    assert list(staging.staged[WORKER]) == [(2, 1)]


def test_own_write_of_the_coordinator_needs_no_word() -> None:
    write = commit(1, 1, worker=COORDINATOR, attempt=OWN_WRITE)
    _, actions = feed((COORDINATOR, push(1, attempt=OWN_WRITE)), (COORDINATOR, write))
    assert actions == [Apply(write, 0, 1), Send(COORDINATOR, Applied(1, OWN_WRITE))]


def test_fence_drops_what_is_staged_and_what_comes_later() -> None:
    staging, actions = feed((WORKER, push(1)), (COORDINATOR, Fence(WORKER)), (WORKER, push(2, slot=1)))
    assert actions == [Send(COORDINATOR, Prepared(1, 1))]
    assert staging.staged == {}


def test_failed_function_leaves_nothing() -> None:
    drops: list[tuple[int, Message]] = [(WORKER, Drop(WORKER, closure, 1)) for closure in (1, 7)]
    staging, _ = feed((WORKER, push(1, last=False)), *drops, (WORKER, push(2)))
    assert list(staging.staged[WORKER]) == [(2, 1)]


def test_update_without_a_learning_rate_is_dropped_and_its_slot_freed() -> None:
    staging, actions = feed((WORKER, push(1, slot=1)), (COORDINATOR, Drop(WORKER, 1, 1)))
    assert actions[1:] == [Free(WORKER, 1), Send(COORDINATOR, Applied(1, 1))]
    assert staging.staged == {}


def test_cut_is_saved_between_commits() -> None:
    _, actions = feed(
        (WORKER, push(1)), (WORKER, push(2, slot=1)), (COORDINATOR, commit(3, 1)), (COORDINATOR, SnapshotRequest(3)),
        (COORDINATOR, SnapshotRequest(3)), (COORDINATOR, commit(4, 2)),
    )
    assert [type(action) for action in actions[2:]] == [Apply, Send, Save, Save, Apply, Send]
    assert actions[4] == Save(3, b"")


@pytest.mark.parametrize(("before", "bad", "text"), [
    ([(WORKER, push(1))], (WORKER, push(1)), "part 1 of an update that is open"),
    ([], (WORKER, push(1, ordinal=1)), "part 0"),
    ([(WORKER, push(1, last=False))], (WORKER, push(1, slot=1, ordinal=1)), "part 1"),
    ([(WORKER, push(1))], (WORKER, push(2)), r"a free slot of 2; in use are \[0\]"),
    ([], (WORKER, push(1, slot=2)), "a free slot of 2"),
    ([], (COORDINATOR, commit(1, 1)), "an update that is staged as a whole; this one is None"),
    ([(WORKER, push(1, last=False))], (COORDINATOR, commit(1, 1)), "an update that is staged as a whole"),
    ([(WORKER, push(1))], (COORDINATOR, commit(1, 1, attempt=2)), "an update that is staged as a whole"),
    ([(WORKER, push(1)), (COORDINATOR, SnapshotRequest(4))], (COORDINATOR, commit(4, 1)), "a number after 4"),
    ([(COORDINATOR, SnapshotRequest(4))], (COORDINATOR, SnapshotRequest(3)), "a number after 4"),
    ([(WORKER, push(1))], (WORKER, commit(1, 1)), "it from the coordinator only, which is rank 0"),
    ([], (COORDINATOR, Drop(WORKER, 1, 1)), "an update that is staged as a whole"),
    ([], (WORKER, Drop(6, 1, 1)), "it from the coordinator only"),
    ([], (WORKER, Fence(6)), "it from the coordinator only"),
])
def test_breach_of_the_protocol(before: list[tuple[int, Message]], bad: tuple[int, Message], text: str) -> None:
    staging, _ = feed(*before)
    state = repr(staging)
    with pytest.raises(RuntimeError, match=f"breaks the serving protocol: expected {text}"):
        staging.take(*bad)
    assert repr(staging) == state


def test_other_messages_are_somebody_elses() -> None:
    assert Staging(COORDINATOR).take(COORDINATOR, SnapshotDone(1)) is None
