"""The wire: messages of the serving protocol as bytes."""

from __future__ import annotations

import itertools
import pickle

from mpidist.serving.messages import (
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
)

# The position is the first byte on the wire.
_KINDS: tuple[type[Message], ...] = (
    Define, Do, Push, Drop, Finished, Failed, Prepared, Commit, Applied, Fence, Cut, CutDone, Build, Built, Discard,
    Call, Answer, Left, Round,
)
_NUMBERS = {kind: bytes([number]) for number, kind in enumerate(_KINDS)}
# The frames of newer protocols take 11 bytes, and are of use from 4 GiB on only, which no window carries.
_WITHOUT_FRAMES = 3


def encode(message: Message) -> bytes:
    """Local. The bytes of a message.

    Args:
        message: The message; each of its numbers takes 2 to 10 bytes.
    """
    fields: tuple[object, ...] = message
    if isinstance(message, Commit):
        # Flat: a class is written as its long name, and a tuple takes 4 bytes.
        fields = (*message[:-1], *itertools.chain.from_iterable(message.steps))
    elif isinstance(message, Round):
        fields = message.number, tuple(map(tuple, message.parts)), tuple(map(tuple, message.steps)), message.counts
    return _NUMBERS[type(message)] + pickle.dumps(tuple(fields), _WITHOUT_FRAMES)


def decode(data: bytes) -> Message:
    """Local. The message that `encode` made these bytes of.

    Args:
        data: The bytes, from a peer that is known to belong to the job: to read a pickle is to run it.

    Raises:
        ValueError: They are no message.
    """
    try:
        kind = _KINDS[data[0]]
        fields = pickle.loads(memoryview(data)[1:])
        if kind is Commit:
            fields, steps = fields[:4], fields[4:]
            fields = (*fields, tuple(Step(*steps[at : at + 3]) for at in range(0, len(steps), 3)))
        elif kind is Round:
            number, parts, steps, counts = fields
            fields = number, tuple(Part(*one) for one in parts), tuple(Step(*one) for one in steps), counts
        message: Message = kind(*fields)
    except Exception as error:
        raise ValueError(
            f"expected a message of mpidist's serving protocol, got {len(data)} bytes that are none, {data[:40]!r}; "
            "all processes of the job must run the same version of mpidist"
        ) from error
    return message
