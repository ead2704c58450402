"""The wire: messages of the serving protocol as bytes.

Messages that each closure needs are packed; all others are JSON, with the bytes of the message after it, and so are
messages that do not fit the packed fields. Nothing is unpickled here: bytes from elsewhere are refused, or are a
message of numbers and texts, and take no memory but their own.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import struct
from collections.abc import Callable
from struct import Struct
from typing import Any

from mpidist.parameter_server.protocol.messages import (
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

# The position is the first byte of what is JSON.
_KINDS: tuple[type[Message], ...] = (
    Define, Do, Push, Drop, Finished, Failed, Prepared, Commit, Applied, Fence, SnapshotRequest, SnapshotDone, Build,
    Built, Discard, Call, CallAnswer, Left, Round, Timed, Began, Ping, Pong,
)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
# The field of a message that is bytes, which JSON has not.
_BYTES: dict[type[Message], str] = {
    Define: "code", Do: "arguments", Finished: "result", Failed: "error", SnapshotRequest: "share",
    SnapshotDone: "outcome", Build: "arguments", Built: "error", Call: "arguments", CallAnswer: "value",
    Applied: "error",
}
_BYTES_AT = {kind: kind._fields.index(name) for kind, name in _BYTES.items()}
# The kind, and the sizes of the JSON and of the bytes.
_HEAD = Struct("<BIQ")
_to_json = json.JSONEncoder(separators=(",", ":"), default=operator.index).encode


def _forms(fields: str) -> tuple[Struct, Struct]:
    """Packed fields after the first byte: the small form and the large one.

    The small one is for numbers below 2^24, and ranks and optimizers below 2^8; the large one for numbers below 2^48,
    and ranks and optimizers below 2^16.

    Args:
        fields: The fields: numbers N, ranks or optimizers R, functions F, and the formats of `struct`.
    """
    small = fields.replace("N", "HB").replace("R", "B").replace("F", "H")
    large = fields.replace("N", "HI").replace("R", "H").replace("F", "I")
    return Struct("<B" + small), Struct("<B" + large)


# The first byte of what is packed: this bit; whether the form is the large one; three bits of a kind; the slot; two
# bits of the attempt.
_PACKED, _SLOT_BIT, _LARGE_BIT, _ATTEMPT = 0x80, 2, 6, 0x03
_DO, _DO_FOLLOWED, _PUSH, _PREPARED, _COMMIT, _APPLIED, _FINISHED = range(_PACKED, _PACKED + 7 * 8, 8)
# A number is packed as its low 16 bits and the rest.
_LOW = 0xFFFF
_CLOSURE = _forms("N")
# Closure, function, and the low bits of the arguments' size, by which a torn message is detected. Arguments follow it.
_CALLED = _forms("NFH")
# The forms of commits, by their number of steps: number, worker, closure; optimizer, iteration and rate of each step.
_COMMITS = [_forms("NRN" + "RNd" * steps) for steps in range(16)]
_STEP_BYTES = [_COMMITS[1][large].size - _COMMITS[0][large].size for large in range(2)]


@functools.lru_cache(256)
def _ended(servers: int, counts: int) -> tuple[Struct, Struct]:
    """Servers, optimizers and places in own data; before them their counts, closure, and the size as of `_CALLED`.

    The second count is that of optimizers, four bits, and that of places, four bits. The result comes last.
    """
    return _forms("BBNH" + "R" * (servers + (counts >> 4)) + "HHI" * (counts & 15))


def _first(kind: int, large: int, attempt: int, slot: int = 0) -> int:
    if attempt & ~_ATTEMPT or slot & ~1:
        raise ValueError("too large")
    return kind | large << _LARGE_BIT | slot << _SLOT_BIT | attempt


def _pack_do(message: Do, large: int) -> bytes:
    closure, attempt, slot, function, arguments, is_followed = message
    first = _first(_DO_FOLLOWED if is_followed else _DO, large, attempt, slot)
    return _CALLED[large].pack(first, closure & _LOW, closure >> 16, function, len(arguments) & _LOW) + arguments


def _pack_push(message: Push, large: int) -> bytes:
    closure, attempt, slot, ordinal, last = message
    if ordinal or not last:
        raise ValueError("one of several parts")
    return _CLOSURE[large].pack(_first(_PUSH, large, attempt, slot), closure & _LOW, closure >> 16)


def _pack_prepared(message: Prepared, large: int) -> bytes:
    closure, attempt = message
    return _CLOSURE[large].pack(_first(_PREPARED, large, attempt), closure & _LOW, closure >> 16)


def _pack_applied(message: Applied, large: int) -> bytes:
    closure, attempt, error = message
    if error:
        raise ValueError("bytes")
    return _CLOSURE[large].pack(_first(_APPLIED, large, attempt), closure & _LOW, closure >> 16)


def _pack_commit(message: Commit, large: int) -> bytes:
    number, worker, closure, attempt, steps = message
    packed: list[float] = []
    for optimizer, iteration, rate in steps:
        packed += optimizer, iteration & _LOW, iteration >> 16, rate
    return _COMMITS[len(steps)][large].pack(
        _first(_COMMIT, large, attempt), number & _LOW, number >> 16, worker, closure & _LOW, closure >> 16, *packed
    )


def _pack_finished(message: Finished, large: int) -> bytes:
    closure, attempt, servers, optimizers, result, read = message
    if len(read) > 15:
        # More than 15 optimizers make a byte that is too large; these would count as optimizers.
        raise ValueError("too many")
    counts = len(optimizers) << 4 | len(read)
    places = itertools.chain.from_iterable(read) if read else ()
    return _ended(len(servers), counts)[large].pack(
        _first(_FINISHED, large, attempt), len(servers), counts, closure & _LOW, closure >> 16, len(result) & _LOW,
        *servers, *optimizers, *places,
    ) + result


def _unpack_do(first: int, large: int, data: bytes) -> Do:
    form = _CALLED[large]
    _, low, high, function, size = form.unpack_from(data)
    arguments = data[form.size :]
    if len(arguments) & _LOW != size:
        raise ValueError("torn")
    is_followed = bool(first & (_DO ^ _DO_FOLLOWED))
    return Do(low | high << 16, first & _ATTEMPT, first >> _SLOT_BIT & 1, function, arguments, is_followed)


def _unpack_push(first: int, large: int, data: bytes) -> Push:
    _, low, high = _CLOSURE[large].unpack(data)
    return Push(low | high << 16, first & _ATTEMPT, first >> _SLOT_BIT & 1, 0, True)


def _unpack_prepared(first: int, large: int, data: bytes) -> Prepared:
    _, low, high = _CLOSURE[large].unpack(data)
    return Prepared(low | high << 16, first & _ATTEMPT)


def _unpack_applied(first: int, large: int, data: bytes) -> Applied:
    _, low, high = _CLOSURE[large].unpack(data)
    return Applied(low | high << 16, first & _ATTEMPT)


def _unpack_commit(first: int, large: int, data: bytes) -> Commit:
    form = _COMMITS[(len(data) - _COMMITS[0][large].size) // _STEP_BYTES[large]][large]
    fields = form.unpack(data)
    steps = tuple([
        CommitStep(fields[at], fields[at + 1] | fields[at + 2] << 16, fields[at + 3]) for at in range(6, len(fields), 4)
    ])
    _, number, number_high, worker, closure, closure_high = fields[:6]
    return Commit(number | number_high << 16, worker, closure | closure_high << 16, first & _ATTEMPT, steps)


def _unpack_finished(first: int, large: int, data: bytes) -> Finished:
    form = _ended(data[1], data[2])[large]
    fields, result = form.unpack_from(data), data[form.size :]
    _, servers, counts, low, high, size = fields[:6]
    if len(result) & _LOW != size:
        raise ValueError("torn")
    optimizers = 6 + servers
    places = optimizers + (counts >> 4)
    read = tuple([fields[at : at + 3] for at in range(places, len(fields), 3)]) if counts & 15 else ()
    pushed, stepped = fields[6:optimizers], fields[optimizers:places]
    return Finished(low | high << 16, first & _ATTEMPT, pushed, stepped, result, read)


_PACK: dict[type[Message], Callable[[Any, int], bytes]] = {
    Do: _pack_do, Push: _pack_push, Prepared: _pack_prepared, Commit: _pack_commit, Applied: _pack_applied,
    Finished: _pack_finished,
}
# The functions by three bits of the first byte.
_UNPACK: tuple[Callable[[int, int, bytes], Message], ...] = (
    _unpack_do, _unpack_do, _unpack_push, _unpack_prepared, _unpack_commit, _unpack_applied, _unpack_finished,
)


def _write(message: Message) -> bytes:
    """A message as JSON and bytes."""
    kind = type(message)
    fields: list[Any] = list(message)
    data: bytes = fields.pop(_BYTES_AT[kind]) if kind in _BYTES_AT else b""
    text = _to_json(fields).encode("ascii")
    return b"".join((_HEAD.pack(_NUMBERS[kind], len(text), len(data)), text, data))


def _read(data: bytes) -> Message:
    """The message of `_write`."""
    number, size, byte_count = _HEAD.unpack_from(data)
    begin = _HEAD.size + size
    if begin + byte_count != len(data):
        raise ValueError("torn")
    kind = _KINDS[number]
    fields = json.loads(data[_HEAD.size : begin])
    if kind in _BYTES_AT:
        fields.insert(_BYTES_AT[kind], data[begin:])
    message: Message = kind(*fields)
    # JSON knows lists alone.
    if isinstance(message, Commit):
        return message._replace(steps=_steps(message.steps))
    if isinstance(message, Round):
        parts = tuple(
            CommitPart(worker, closure, attempt, tuple(steps)) for worker, closure, attempt, steps in message.parts
        )
        return Round(message.number, parts, _steps(message.steps), tuple(message.counts))
    if isinstance(message, Finished):
        return message._replace(
            servers=tuple(message.servers), optimizers=tuple(message.optimizers), read=tuple(map(tuple, message.read))
        )
    return message


def _steps(read: Any) -> tuple[CommitStep, ...]:
    return tuple(CommitStep(*one) for one in read)


def encode(message: Message) -> bytes:
    """Local. The bytes of a message.

    Args:
        message: The message.
    """
    pack = _PACK.get(type(message))
    if pack is not None:
        for large in range(2):
            try:
                return pack(message, large)
            except (struct.error, ValueError, TypeError, IndexError):
                # Something is larger than the fields of this form, or there is more of it.
                continue
    return _write(message)


def decode(data: bytes) -> Message:
    """Local. The message of which `encode` made these bytes.

    Args:
        data: The bytes, from a peer that is known to belong to the job: the content of its messages is unpickled later.

    Raises:
        ValueError: The bytes are no message.
    """
    try:
        first = data[0]
        if first & _PACKED:
            return _UNPACK[first >> 3 & 7](first, first >> _LARGE_BIT & 1, data)
        return _read(data)
    except Exception as error:
        raise ValueError(
            f"expected a message of mpidist's serving protocol, got {len(data)} bytes that are none, {data[:40]!r}; "
            "all processes of the job must run the same version of mpidist"
        ) from error
