"""Messages arrive as they were sent, and are small."""

from __future__ import annotations

import pickle
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.parameter_server.protocol.messages import (
    SLOTS,
    Applied,
    Began,
    Build,
    Built,
    Call,
    CallAnswer,
    Commit,
    CommitPart,
    CommitStep,
    Define,
    Discard,
    Do,
    Drop,
    Failed,
    Fence,
    Finished,
    Left,
    Message,
    Ping,
    Pong,
    Prepared,
    Push,
    Round,
    SnapshotDone,
    SnapshotRequest,
    Timed,
)
from mpidist.parameter_server.protocol.wire import decode, encode
from tests.helpers.amounts import amount

LATE = 10**6

MESSAGES: list[Message] = [
    Define("function", 1, b"code"), Do(LATE, 1, SLOTS - 1, 7, b"arguments"), Push(LATE, 1, 1, 0, True),
    Drop(4, LATE, 2),
    Finished(LATE, 1, (1, 2), (0, 3), b"result"), Failed(LATE, 1, b"error", "a traceback"), Prepared(LATE, 1),
    Commit(LATE, 4, LATE, 1, (CommitStep(0, LATE, 1e-3), CommitStep(3, 5, 0.1))), Applied(LATE, 1),
    Applied(LATE, 1, b"error"), Fence(4), SnapshotRequest(LATE),
    SnapshotDone(LATE),
    Round(
        LATE, (CommitPart(4, LATE, 1, (1, 0)), CommitPart(5, 2, 1, ())),
        (CommitStep(0, LATE, 1e-3), CommitStep(3, 5, 0.1)), (2, 1),
    ),
    Build(3, 7, b""), Built(3), Built(3, b"error", "a traceback"),
    Finished(LATE, 1, (), (), b"", ((3, 0, LATE),)), Built(3, begun={"iteration": 1}),
    Discard("resource", 3), Call(1, "make", b"x"), CallAnswer(1, b"value"), Left("why"), Timed(),
    Began(LATE, 1, is_loaded=True), Ping(LATE), Pong(LATE),
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


# The largest numbers that take three bytes, and rank and optimizer that take one.
MOST, BYTE = (1 << 24) - 1, (1 << 8) - 1


def bytes_of_closure(servers: int, steps: int, iterators: int) -> int:
    """All messages of a closure but its arguments and result, where numbers take the most bytes of the small form."""
    arguments, result = pickle.dumps((1, 2.5, "x")), pickle.dumps(0.25)
    commit = Commit(MOST, BYTE, MOST, 1, (CommitStep(BYTE, MOST, 1 / 3),) * steps)
    to_servers: list[Message] = [Push(MOST, 1, 1, 0, True), Prepared(MOST, 1), commit, Applied(MOST, 1)]
    read = ((1 << 15, 1 << 15, 1 << 31),) * iterators
    finished = Finished(MOST, 1, (BYTE,) * servers, (BYTE,) * steps, result, read)
    messages: list[Message] = [Do(MOST, 1, 1, 1 << 15, arguments), finished, *servers * to_servers]
    return sum(len(encode(message)) for message in messages) - len(arguments) - len(result)


@pytest.mark.parametrize(("steps", "most_servers"), [(0, 11), (1, 7), (2, 5), (3, 4)])
def test_closure_takes_few_bytes(steps: int, most_servers: int) -> None:
    """From the second use of its function on; with numbers that grow for long, and data of its worker's own."""
    for servers in range(1, 1 + most_servers):
        assert bytes_of_closure(servers, steps, 1) == 24 + steps + servers * (21 + 12 * steps) <= 256
        assert bytes_of_closure(servers, steps, 0) == 16 + steps + servers * (21 + 12 * steps)
    assert bytes_of_closure(most_servers + 1, steps, 0) > 256


_NUMBER = st.one_of(st.integers(0, 300), st.integers(0, 1 << 70), st.sampled_from(
    [edge + one for edge in (1 << 8, 1 << 16, 1 << 24, 1 << 32, 1 << 48, 1 << 64) for one in (-1, 0, 1)]
))
_DATA, _TEXT = st.binary(max_size=40) | st.binary(min_size=1).map(lambda one: one * 40_000), st.text()
_ATTEMPT, _SLOT = st.integers(0, 5), st.integers(0, SLOTS - 1)
_NUMBERS = st.lists(_NUMBER, max_size=20).map(tuple)
_STEPS = st.lists(st.builds(CommitStep, _NUMBER, _NUMBER, st.floats(allow_nan=False)), max_size=20).map(tuple)
_STATE = st.dictionaries(_TEXT, _NUMBER, max_size=3)
_PLACE = st.tuples(_NUMBER, _NUMBER, _NUMBER)
_READ = st.lists(_PLACE | st.tuples(_NUMBER, _NUMBER, _NUMBER, _STATE), max_size=20).map(tuple)
ANY_MESSAGE = st.one_of(
    st.builds(Define, _TEXT, _NUMBER, _DATA), st.builds(Do, _NUMBER, _ATTEMPT, _SLOT, _NUMBER, _DATA, st.booleans()),
    st.builds(Push, _NUMBER, _ATTEMPT, _SLOT, st.integers(0, 2), st.booleans()),
    st.builds(Drop, _NUMBER, _NUMBER, _ATTEMPT),
    st.builds(Finished, _NUMBER, _ATTEMPT, _NUMBERS, _NUMBERS, _DATA, _READ),
    st.builds(Finished, _NUMBER, _ATTEMPT, st.lists(st.integers(0, 300), max_size=20).map(tuple),
              st.lists(st.integers(0, 300), max_size=20).map(tuple), _DATA, st.lists(_PLACE, max_size=20).map(tuple)),
    st.builds(Failed, _NUMBER, _ATTEMPT, _DATA, _TEXT, _NUMBER), st.builds(Prepared, _NUMBER, _ATTEMPT),
    st.builds(Commit, _NUMBER, _NUMBER, _NUMBER, _ATTEMPT, _STEPS), st.builds(Applied, _NUMBER, _ATTEMPT, _DATA),
    st.builds(Fence, _NUMBER), st.builds(SnapshotRequest, _NUMBER, _DATA),
    st.builds(SnapshotDone, _NUMBER, _DATA, _TEXT),
    st.builds(Build, _NUMBER, _NUMBER, _DATA), st.builds(Built, _NUMBER, _DATA, _TEXT, _STATE | _TEXT),
    st.builds(Discard, _TEXT, _NUMBER), st.builds(Call, _NUMBER, _TEXT, _DATA),
    st.builds(CallAnswer, _NUMBER, _DATA, _TEXT), st.builds(Left, _TEXT),
    st.builds(
        Round, _NUMBER, st.lists(st.builds(CommitPart, _NUMBER, _NUMBER, _ATTEMPT, _NUMBERS), max_size=3).map(tuple),
        _STEPS, _NUMBERS,
    ),
    st.builds(Timed), st.builds(Began, _NUMBER, _ATTEMPT, st.booleans()), st.builds(Ping, _NUMBER),
    st.builds(Pong, _NUMBER),
)


@given(ANY_MESSAGE)
@settings(max_examples=amount(400, 20_000), deadline=None)
def test_any_message_arrives(message: Message) -> None:
    arrived = decode(encode(message))
    assert arrived == message
    assert type(arrived) is type(message)
    assert repr(arrived) == repr(message)


@given(ANY_MESSAGE, st.data())
@settings(max_examples=amount(200, 5000), deadline=None)
def test_torn_messages_are_refused(message: Message, data: st.DataObject) -> None:
    """Wherever they are torn; but for a commit, which may be torn between two steps: then it names fewer."""
    sent = encode(message)
    torn = sent[: data.draw(st.integers(0, len(sent) - 1))]
    try:
        found = decode(torn)
    except ValueError:
        return
    assert isinstance(message, Commit)
    assert isinstance(found, Commit)
    assert found == message._replace(steps=message.steps[: len(found.steps)])


def test_bytes_from_elsewhere_are_refused_or_are_a_message() -> None:
    """And take no memory, whatever sizes they name."""
    drawn, ours = random.Random(5), [encode(message) for message in MESSAGES]
    refused = 0
    tracemalloc.start()
    try:
        for number in range(amount(5000, 100_000)):
            data = bytearray(drawn.choice(ours) if number % 2 else drawn.randbytes(drawn.randrange(60)))
            for _ in range(drawn.randrange(1, 4) if data else 0):
                data[drawn.randrange(len(data))] = drawn.choice((0, 0x7F, 0xFF, drawn.randrange(256)))
            try:
                assert type(decode(bytes(data))) in Message.__args__
            except ValueError:
                refused += 1
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert refused


@pytest.mark.parametrize("data", [
    b"", b"no message", b"\x00", b"\xff" + pickle.dumps((1,)), b"\x00" + pickle.dumps((1, 2)),
    b"\x07" + pickle.dumps((1, 2, 3, 4, 5)), b"\x00" + pickle.dumps(3), encode(SnapshotRequest(1))[:-1],
    encode(Do(1, 1, 0, 1, b"arguments"))[:-1], encode(Finished(1, 1, (1,), (0,), b"result"))[:-1],
    encode(Prepared(1, 1)) + b"x", encode(Finished(1, 1, (1,), (0,), b""))[:-1], b"\xff\xff\xff\xff", b"\xbf",
])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected a message of mpidist's serving protocol"):
        decode(data)
