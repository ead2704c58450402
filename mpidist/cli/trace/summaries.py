"""Scalars out of event files, read without a library: they are protocol buffers in records.

Of a record (a length of 8 bytes, its checksum, the data, their checksum) these fields are read: of an event the wall
time (1), the step (2) and the summary (5); of a summary its values (1); of a value the tag (1) and the number (2).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5


class Point(NamedTuple):
    """A number of a curve.

    Attributes:
        step: The step of the program.
        time: Seconds since 1970.
        value: The number.
    """

    step: int
    time: float
    value: float


@dataclass(frozen=True)
class Curve:
    """A scalar of the program.

    Attributes:
        name: Its tag, with the folder of its file where there are several.
        points: Its numbers by steps.
    """

    name: str
    points: tuple[Point, ...]


def read_curves(folder: Path) -> list[Curve]:
    """Local. The scalars of all event files below a folder, and the steps per second that they were written with.

    Args:
        folder: A log directory.

    Returns:
        The curves, those of losses first; a file that is cut off gives what is whole.

    Raises:
        OSError: A file cannot be read.
    """
    found: dict[str, dict[int, Point]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        parent = path.parent.relative_to(folder).as_posix()
        for event in _records(path.read_bytes()):
            for tag, point in _scalars(event):
                found.setdefault(tag if parent == "." else f"{parent}/{tag}", {})[point.step] = point
    curves = [Curve(name, tuple(one[step] for step in sorted(one))) for name, one in found.items()]
    curves.sort(key=lambda one: ("loss" not in one.name, one.name))
    return [*curves, *_throughput(curves)]


def _throughput(curves: list[Curve]) -> list[Curve]:
    """Steps in a second between the numbers of the longest curve."""
    longest = max((one.points for one in curves), key=len, default=())
    rates = tuple(
        Point(after.step, after.time, (after.step - before.step) / (after.time - before.time))
        for before, after in itertools.pairwise(longest) if after.time > before.time
    )
    return [Curve("steps per second", rates)] if rates else []


def _records(data: bytes) -> Iterator[bytes]:
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        if place + 16 + length > len(data):
            return
        yield data[place + 12 : place + 12 + length]
        place += 16 + length


def _scalars(event: bytes) -> Iterator[tuple[str, Point]]:
    step, time = 0, 0.0
    for number, field in _fields(event):
        if number == 1 and len(field) == 8:
            (time,) = struct.unpack("<d", field)
        elif number == 2:
            step = int.from_bytes(field, "little")
        elif number == 5:
            for _, value in _fields(field):
                parts = dict(_fields(value))
                if 1 in parts and len(parts.get(2, b"")) == 4:
                    (scalar,) = struct.unpack("<f", parts[2])
                    yield parts[1].decode("utf-8", "replace"), Point(step, time, scalar)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind, number = key & 7, key >> 3
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value.to_bytes(10, "little")
            continue
        if kind == _LENGTH:
            length, place = _varint(message, place)
        elif kind in (_EIGHT, _FOUR):
            length = 8 if kind == _EIGHT else 4
        else:
            return
        yield number, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        shift += 7
        if byte < 0x80:
            break
    return value, place
