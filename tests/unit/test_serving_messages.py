"""Messages arrive as they were sent, and are small."""

from __future__ import annotations

import pickle

import pytest

from mpidist.serving.messages import (
    OWN_WRITE,
    SLOTS,
    Answer,
    Applied,
    Build,
    Built,
    Call,
    Commit,
    Cut,
    CutDone,
    Define,
    Discard,
    Do,
    Drop,
    Failed,
    Fence,
    Finished,
    Left,
    Message,
    Part,
    Prepared,
    Push,
    Round,
    Step,
    closure_of,
    given_by_user,
)
from mpidist.serving.wire import decode, encode

LATE = 10**6

MESSAGES: list[Message] = [
    Define("function", 1, b"code"), Do(LATE, 1, SLOTS - 1, 7, b"arguments"), Push(LATE, 1, 1, 0, True),
    Drop(4, LATE, 2),
    Finished(LATE, 1, (1, 2), (0, 3), b"result"), Failed(LATE, 1, b"error", "a traceback"), Prepared(LATE, 1),
    Commit(LATE, 4, LATE, 1, (Step(0, LATE, 1e-3), Step(3, 5, 0.1))), Applied(LATE, 1), Fence(4), Cut(LATE),
    CutDone(LATE),
    Round(LATE, (Part(4, LATE, 1, (1, 0)), Part(5, 2, 1, ())), (Step(0, LATE, 1e-3), Step(3, 5, 0.1)), (2, 1)),
    Build(3, 7, b""), Built(3), Built(3, b"error", "a traceback"),
    Finished(LATE, 1, (), (), b"", ((3, 0, LATE),)), Built(3, begun={"iteration": 1}),
    Discard("resource", 3), Call(1, "make", b"x"), Answer(1, b"value"), Left("why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives(message: Message) -> None:
    arrived = decode(encode(message))
    assert arrived == message
    assert type(arrived) is type(message)
    if isinstance(arrived, Commit):
        assert arrived.steps[0].iteration == LATE
    if isinstance(arrived, Round):
        assert (arrived.steps[0].iteration, arrived.parts[0].closure) == (LATE, LATE)


def test_every_kind_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(Message.__args__)


def test_closure_takes_few_bytes() -> None:
    """All messages of a closure that steps an optimizer on two servers, from the second use of its function on."""
    arguments, result = pickle.dumps((1, 2.5, "x")), pickle.dumps(0.25)
    commit = Commit(LATE, 7, LATE, 1, (Step(0, LATE, 1e-3),))
    to_servers: list[Message] = [Push(LATE, 1, 1, 0, True), Prepared(LATE, 1), commit, Applied(LATE, 1)]
    # It has read on in data of its worker's own.
    finished = Finished(LATE, 1, (1, 2), (0,), result, ((3, 0, LATE),))
    messages: list[Message] = [Do(LATE, 1, 1, 300, arguments), finished, *2 * to_servers]
    assert sum(len(encode(message)) for message in messages) - len(arguments) - len(result) <= 256


def test_messages_are_about_a_closure_or_about_none() -> None:
    own: list[Message] = [Push(5, OWN_WRITE, 1, 0, True), Commit(5, 0, 5, OWN_WRITE, ()), Applied(5, OWN_WRITE)]
    assert {closure_of(message) for message in own} == {0}
    assert {type(message) for message in MESSAGES if closure_of(message) == LATE} == {
        Do, Push, Drop, Finished, Failed, Prepared, Commit, Applied,
    }
    given = {type(message): given_by_user(message) for message in MESSAGES[:6]}
    assert given == {Define: 0, Do: 9, Push: 0, Drop: 0, Finished: 6, Failed: 16}


@pytest.mark.parametrize("data", [
    b"", b"no message", b"\x00", b"\xff" + pickle.dumps((1,)), b"\x00" + pickle.dumps((1, 2)),
    b"\x07" + pickle.dumps((1, 2, 3, 4, 5)), b"\x00" + pickle.dumps(3), encode(Cut(1))[:-1],
])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected a message of mpidist's serving protocol"):
        decode(data)
