"""The lists of a checkpoint's objects: all ranks compare theirs before they write or restore anything."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np

from mpidist.arguments import described
from mpidist.checkpoint.file.layout import METADATA, SAVE_COUNTER, Record
from mpidist.checkpoint.file.metadata import encode_metadata
from mpidist.checkpoint.file.saved import SavedArray
from mpidist.checkpoint.transfer import ArrayToWrite
from mpidist.checkpoint.walk.found import Found
from mpidist.checkpoint.walk.registered import Component
from mpidist.comm.group.agreement import exchange, name_ranks, require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, mark_shared
from mpidist.variables.variable import BaseVariable

T = TypeVar("T")


def list_together(
    communicator: Communicator, step: str, function: Callable[[], tuple[T, list[str]]], path: str
) -> T:
    """Collective. Call `function`, which lists objects; raise on every rank where it fails, or where the lists differ.

    Args:
        communicator: The ranks that have to agree.
        step: The operation, for the error.
        function: A function that returns a result and one line for each object. It must not communicate.
        path: The path of the checkpoint, which must be the same, too.

    Returns:
        This rank's result.

    Raises:
        MismatchError: The lists or paths differ; the text shows the paths, or the first line that differs.
        Exception: What `function` raised on some rank; see `agreement.together`.
    """
    result: T | None = None
    lines: list[str] = []
    error: Exception | None = None
    try:
        result, lines = function()
    except Exception as caught:
        error = caught
    digests = exchange(communicator, step, (path, len(lines), zlib.crc32("\n".join(lines).encode())), error)
    if digests.count(digests[0]) < len(digests):
        require_same(list(map(itemgetter(0), digests)), "the path of a checkpoint", "Pass the same path on every rank.")
        raise mark_shared(MismatchError(_difference(communicator.all_gather_object(lines))))
    return cast(T, result)


def arrays_to_write(
    found: Found, communicator: Communicator, counter: int | None, metadata: Mapping[str, Any] | None = None
) -> tuple[list[ArrayToWrite], list[str]]:
    """Local. List the arrays to write.

    Args:
        found: The objects.
        communicator: The ranks that write.
        counter: Number of saves, which is written too; None leaves it out.
        metadata: Notes of the program's own; None leaves them out.

    Returns:
        The arrays, and for each a line that must be the same on all ranks.

    Raises:
        ValueError: An object has the path of the counter, or a value would be lost.
        TypeError: JSON cannot hold the metadata.
        InterruptedCallError: Variables may hold the half of a step.
    """
    communicator.order.require_whole("a save")
    for path, value in found.lost.items():
        raise ValueError(
            f"{path!r}: expected variables, and objects with `state` and `load_state`, got {described(value)}, which a "
            "checkpoint does not save: its changes would be lost. Make it a mpidist.Variable, give its object `state` "
            "and `load_state`, or, if an array never changes, keep it as a NumPy array with flags.writeable = False. A "
            "mpidist.Module keeps temporary values in attributes that begin with `_`, such as `self._x`, which are not "
            "saved"
        )
    arrays: list[ArrayToWrite] = []
    lines: list[str] = []
    for record, value, group, *_ in found.leaves.values():
        line = f"{record.path!r} of shape {record.shape} and dtype {_text_of(record.dtype)}"
        if isinstance(value, BaseVariable) and group is not None and group.size == communicator.size:
            # Each rank writes a part.
            line += f", strategy number {value.home.strategy_number}, variable number {value.number}"
            edges = range(0, record.size + 1, value.size) if value.is_per_replica and value.size else value.bounds
            bounds = None if edges is None else tuple(edge * record.dtype.itemsize for edge in edges)
            arrays.append(ArrayToWrite(record, value.reader, bounds, value.owners))
        elif isinstance(value, SavedArray):
            arrays.append(ArrayToWrite(record, value.reader))
        elif isinstance(value, Component):
            edges = range(0, record.nbytes + 1, value.array.nbytes) if value.array.nbytes else None
            arrays.append(ArrayToWrite(record, value.reader, None if edges is None else tuple(edges)))
        else:
            # Each rank has its own copy, and each writes some bytes of it: the copies have to be the same.
            array = value.reader()(0, value.size) if isinstance(value, BaseVariable) else value
            arrays.append(ArrayToWrite(record, array))
            if communicator.size > 1:
                line += f" with the content of checksum {zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
        lines.append(line)
    if counter is not None:
        if SAVE_COUNTER in found.leaves:
            raise ValueError(f"{SAVE_COUNTER!r} is the checkpoint's own count of saves; rename the attribute of root")
        record = Record(SAVE_COUNTER, (), np.dtype(np.int64))
        arrays.append(ArrayToWrite(record, np.array(counter, np.int64)))
        lines.append(f"save number {counter}")
    if metadata is not None:
        text = encode_metadata(metadata).encode("ascii")
        note = np.array(text, f"S{len(text)}")
        arrays.append(ArrayToWrite(Record(METADATA, (), note.dtype), note))
        lines.append(f"metadata of checksum {zlib.crc32(text):08x}")
    return arrays, lines


# NumPy makes the text again each time, which takes longer than the rest of a line.
_text_of = cache(str)


def number_of(value: object, communicator: Communicator) -> str:
    """Local. The number of a variable of these ranks, in words: each may restore a part of it. Else empty."""
    if not isinstance(value, BaseVariable) or value.number is None or value.group.size != communicator.size:
        return ""
    return f", variable number {value.number}"


def _difference(everyone: list[list[str]]) -> str:
    """The first line that differs between the ranks' lists, with the ranks that have each form of it."""
    place = next(
        n for n in range(max(map(len, everyone)) + 1) if len({tuple(other[n : n + 1]) for other in everyone}) > 1
    )
    groups: dict[str, list[int]] = {}
    for rank, other in enumerate(everyone):
        groups.setdefault(other[place] if place < len(other) else "nothing more", []).append(rank)
    got = "; ".join(f"{line} on {name_ranks(ranks)}" for line, ranks in list(groups.items())[:4])
    return (
        f"all ranks must hold the same objects in a checkpoint, got as number {place}: {got}. Build the same objects "
        "on every rank. Save values that differ by rank as one array with a row for each rank"
    )
