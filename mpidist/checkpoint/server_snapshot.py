"""The checkpoint of a job with parameter servers: the chief and the servers write it in parallel, while workers train.

Servers save their variables as they are after one commit, and what the chief has is of the same moment.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpidist.checkpoint.file.hdf5 import Blank
from mpidist.checkpoint.file.layout import PAGE_BYTES, Bounds, Piece, Record, deal
from mpidist.checkpoint.file.positional import write_at
from mpidist.checkpoint.transfer import (
    ArrayToWrite,
    Checksums,
    OwnPart,
    write_arrays,
    write_pieces,
)
from mpidist.checkpoint.walk.found import Found
from mpidist.checkpoint.walk.listing import arrays_to_write
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.parameter_server.server.snapshot import ElementRange
from mpidist.variables.kinds.served import ServedVariable
from mpidist.variables.kinds.sharded import served_parts
from mpidist.variables.variable import BaseVariable, Read

T = TypeVar("T")


class _Part(NamedTuple):
    """A variable, or one shard of it, that a server saves.

    Attributes:
        variable: The number of the variable on the server.
        record: The dataset of the variable.
        offset: First byte of the dataset in the file.
        pieces: All of the dataset, or what the shard has of them.
        bounds: Where the shards begin in the dataset, and the last one ends; empty for a variable that is not cut.
        shard: The place of the shard among these.
    """

    variable: int
    record: Record
    offset: int
    pieces: Sequence[Piece]
    bounds: Bounds = ()
    shard: int = 0

    @property
    def begin(self) -> int:
        """Local. The first byte in the dataset."""
        return self.bounds[self.shard] if self.bounds else 0

    @property
    def size(self) -> int:
        """Local. The number of elements."""
        if not self.bounds:
            return self.record.size
        return (self.bounds[self.shard + 1] - self.begin) // self.record.dtype.itemsize

    def reader(self, read: Read) -> Read:
        """Local. A function that reads elements by their places in the dataset.

        Args:
            read: A function that reads elements by their places in the variable on the server.
        """
        first = self.begin // self.record.dtype.itemsize
        return lambda low, high: read(low - first, high - first)

    @property
    def is_small(self) -> bool:
        """Local. Whether the chief writes it, as other small datasets, which are in the same pages of the file."""
        return self.record.nbytes < PAGE_BYTES


class _Outcome(NamedTuple):
    """The results of one server.

    Attributes:
        checksums: The checksums of the pieces that it has written.
        small: The content of small variables, by number.
        shards: The checksums of the parts of pieces that shards have, by their numbers.
        heads: The first bytes of shards in a page of the file that begins in an earlier one; likewise.
    """

    checksums: Checksums
    small: dict[int, bytes]
    shards: dict[int, Checksums]
    heads: dict[int, bytes]


@dataclass(frozen=True)
class ServerShare:
    """The part of a checkpoint that one server writes; see `parameter_server.server.snapshot.SavedShare`.

    Attributes:
        path: The file, which has its structure already.
        parts: The variables.
    """

    path: str
    parts: Sequence[_Part]

    def blocks(self) -> dict[ElementRange, int]:
        """Local. See `SavedShare.blocks`: a piece each."""
        blocks = {}
        for part in self.parts:
            itemsize, begin = part.record.dtype.itemsize, part.begin
            for _, start, stop in part.pieces:
                block = ElementRange(part.variable, (start - begin) // itemsize, -(-(stop - begin) // itemsize))
                blocks[block] = stop - start
        return blocks

    def write(self, read: Callable[[int], Read]) -> _Outcome:
        """Local. See `SavedShare.write`.

        Raises:
            OSError: This host does not see the file, or the disk is full.
        """
        outcome = _Outcome({}, {}, {}, {})
        if not any(not part.is_small for part in self.parts):
            outcome.small.update({part.variable: _content(part, read) for part in self.parts})
            return outcome
        try:
            descriptor = os.open(self.path, os.O_WRONLY)
        except FileNotFoundError:
            raise FileNotFoundError(
                errno.ENOENT, f"the chief has made {self.path!r}, and a server does not see it: save checkpoints to a "
                "file system that all hosts share"
            ) from None
        try:
            for part in self.parts:
                if part.is_small:
                    outcome.small[part.variable] = _content(part, read)
                else:
                    _write(descriptor, part, part.reader(read(part.variable)), outcome)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return outcome


def _content(part: _Part, read: Callable[[int], Read]) -> bytes:
    return read(part.variable)(0, part.size).tobytes()


def _write(descriptor: int, part: _Part, read: Read, outcome: _Outcome) -> None:
    own, checksums = None, outcome.checksums
    if part.bounds:
        own, checksums = OwnPart(part.record, part.bounds, part.shard), outcome.shards.setdefault(part.variable, {})
    write_pieces(descriptor, part.offset, part.record, read, part.pieces, own, checksums)
    if own is not None:
        outcome.heads[part.variable] = own.head


class SnapshotPlan:
    """The parts of a checkpoint, by their writers.

    Args:
        found: The objects.
        count: See `arrays_to_write`.
        metadata: See `arrays_to_write`.

    Attributes:
        records: All datasets.
        shared: See `layout.encode_index`.
    """

    def __init__(self, found: Found, count: int | None, metadata: Mapping[str, Any] | None) -> None:
        self.shared = found.shared
        self._arrays, _ = arrays_to_write(found, SoloCommunicator(), count, metadata)
        self.records = [array.record for array in self._arrays]
        self._dealt = deal(self.records, 0, 1)
        # The variable, or its shards in their order.
        self._served: dict[int, list[ServedVariable]] = {}
        for number, record in enumerate(self.records):
            leaf = found.leaves.get(record.path)
            served = served_parts(leaf.value) if leaf is not None and isinstance(leaf.value, BaseVariable) else []
            if served and record.nbytes:
                self._served[number] = served

    def shares(self, blank: Blank) -> dict[int, ServerShare]:
        """Local. The parts of the servers, by rank."""
        parts: dict[int, list[_Part]] = {}
        for number, variables in self._served.items():
            bounds = self._bounds(number)
            for index, variable in enumerate(variables):
                pieces = self._dealt[number]
                if bounds:
                    low, high = bounds[index], bounds[index + 1]
                    cut = (Piece(piece, max(start, low), min(stop, high)) for piece, start, stop in pieces)
                    pieces = [piece for piece in cut if piece.start < piece.stop]
                part = _Part(
                    variable.place.number, self.records[number], blank.offsets[number], pieces, bounds, index
                )
                parts.setdefault(variable.place.server, []).append(part)
        path = os.path.abspath(blank.path)
        return {server: ServerShare(path, tuple(its)) for server, its in parts.items()}

    @property
    def _own(self) -> list[int]:
        return [number for number in range(len(self.records)) if number not in self._served]

    def copy_own(self) -> None:
        """Local. Copy what is not on servers."""
        for number in self._own:
            record, content = self._arrays[number][:2]
            read = content if isinstance(content, np.ndarray) else content()(0, record.size)
            self._arrays[number] = ArrayToWrite(record, np.array(read))

    def write_own(self, communicator: SoloCommunicator, blank: Blank) -> Checksums:
        """Local. Write what is not on servers; see `write_snapshot`."""
        return self._write(communicator, blank, self._own, self._arrays)

    def write_small(self, communicator: SoloCommunicator, blank: Blank, outcomes: Mapping[int, Any]) -> Checksums:
        """Local. Write what the servers have left to the chief; see `write_snapshot`."""
        arrays = list(self._arrays)
        small = []
        for number, variables in self._served.items():
            record = self.records[number]
            if record.nbytes < PAGE_BYTES:
                contents = [outcomes[one.place.server].small[one.place.number] for one in variables]
                arrays[number] = ArrayToWrite(record, np.frombuffer(b"".join(contents), record.dtype))
                small.append(number)
        return self._write(communicator, blank, small, arrays)

    def join_shards(self, blank: Blank, outcomes: Mapping[int, Any]) -> list[Checksums]:
        """Local. Write the bytes of shards that are in pages which begin in an earlier shard; see `write_snapshot`.

        Returns:
            The checksums of all shards, in the order of what they have of a piece.
        """
        checksums: list[Checksums] = []
        for number, variables in self._served.items():
            record, bounds = self.records[number], self._bounds(number)
            if not bounds or record.nbytes < PAGE_BYTES:
                continue
            of = [(outcomes[one.place.server], one.place.number) for one in variables]
            checksums += [outcome.shards[one] for outcome, one in of]
            heads = [outcome.heads[one] for outcome, one in of]
            descriptor = os.open(blank.path, os.O_WRONLY)
            try:
                for index in range(len(variables)):
                    own = OwnPart(record, bounds, index)
                    write_at(descriptor, own.following(heads), blank.offsets[number] + own.end)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return checksums

    def _bounds(self, number: int) -> Bounds:
        """The bounds of shards in a dataset; empty for a variable that is not cut."""
        variables = self._served[number]
        sizes = [one.place.bytes for one in variables]
        return tuple(itertools.accumulate(sizes, initial=0)) if len(variables) > 1 else ()

    def _write(
        self, communicator: SoloCommunicator, blank: Blank, numbers: Sequence[int], arrays: Sequence[ArrayToWrite]
    ) -> Checksums:
        def chosen(things: Sequence[T]) -> list[T]:
            return [things[number] for number in numbers]

        part = replace(blank, offsets=chosen(blank.offsets))
        checksums, error = write_arrays(communicator, part, chosen(arrays), chosen(self._dealt))
        if error is not None:
            raise error
        return checksums
