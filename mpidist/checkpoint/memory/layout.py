"""The layout of a copy in memory: the places of arrays, and which node has which parts; pure.

The file of each node has the same layout: every array has its place, of its full, global shape. Pages that a node does
not write take no memory (tmpfs): of an array of which each rank can read only parts, such as a component for each rank,
a node keeps the parts of its own ranks and those of the node before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.layout import (
    PAGE_BYTES,
    PIECE_BYTES,
    Bounds,
    Owners,
    Record,
    decode_index,
    encode_index,
)
from mpidist.errors import DamagedCheckpointError

# Arrays begin on different cache lines, and their bytes are summed in words.
_ALIGNMENT, _WORD = 64, 8
_WRAP = 1 << 64


class Move(NamedTuple):
    """Bytes that one rank sends to another one.

    Attributes:
        source: The rank that sends.
        target: The rank that receives.
        begin: The first byte in the file of either.
        end: The byte after the last.
    """

    source: int
    target: int
    begin: int
    end: int


@dataclass(frozen=True)
class CopyLayout:
    """The layout of one copy.

    Attributes:
        records: The arrays.
        parts: For each array the parts that ranks can read, and their ranks; None where every rank can read all.
        nodes: The node of each rank.
        shared: See `layout.encode_index`.
        offsets: The first byte of each array, counted from the beginning of the data.
        byte_count: The size of the data.
    """

    records: tuple[Record, ...]
    parts: tuple[tuple[Bounds, Owners] | None, ...]
    nodes: tuple[int, ...]
    shared: Mapping[str, str]
    offsets: tuple[int, ...]
    byte_count: int

    @classmethod
    def of(
        cls, records: Sequence[Record], parts: Sequence[tuple[Bounds, Owners] | None], nodes: Sequence[int],
        shared: Mapping[str, str],
    ) -> CopyLayout:
        """Local. Give each array its place."""
        offsets, end = [], 0
        for record in records:
            offsets.append(end)
            end += -(-record.nbytes // _ALIGNMENT) * _ALIGNMENT
        size = max(PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES)
        return cls(tuple(records), tuple(parts), tuple(nodes), dict(shared), tuple(offsets), size)

    def encode(self) -> bytes:
        """Local. The layout as JSON in ASCII."""
        index = encode_index(self.records, self.shared).decode("ascii")
        return json.dumps({"index": index, "parts": self.parts, "nodes": self.nodes}).encode("ascii")

    @classmethod
    def decode(cls, text: bytes) -> CopyLayout:
        """Local. Undo `encode`.

        Raises:
            DamagedCheckpointError: It is none.
        """
        try:
            content = json.loads(text)
            records, shared, _ = decode_index(content["index"].encode("ascii"))
            parts = [None if one is None else _parts(one) for one in content["parts"]]
            return cls.of(records, parts, [int(node) for node in content["nodes"]], shared)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"the layout of a copy in memory is damaged: {error}") from None

    @property
    def node_count(self) -> int:
        """Local. The number of nodes."""
        return max(self.nodes) + 1

    @property
    def has_parts(self) -> bool:
        """Local. Whether ranks have values of their own."""
        return any(one is not None for one in self.parts)

    def ranks_of(self, node: int) -> list[int]:
        """Local. The ranks of a node, in their order."""
        return [rank for rank, its in enumerate(self.nodes) if its == node]

    def own_parts(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Local. The number of each array of which a rank has parts, and their first byte and end within it."""
        for number, part in enumerate(self.parts):
            if part is not None:
                bounds, owners = part
                places = range(len(bounds) - 1) if owners is None else range(len(owners))
                for place in places:
                    if (place if owners is None else owners[place]) == rank and bounds[place] < bounds[place + 1]:
                        yield number, bounds[place], bounds[place + 1]

    def whole_share(self, number: int, rank: int, size: int) -> tuple[int, int]:
        """Local. The first and the end of the elements of an array that a rank of a node copies, where all read it."""
        record = self.records[number]
        if record.nbytes < PAGE_BYTES:
            # The ranks take turns.
            return (0, record.size) if number % size == rank else (0, 0)
        return record.size * rank // size, record.size * (rank + 1) // size

    def ranges(self, node: int) -> list[tuple[int, int]]:
        """Local. The bytes that the file of a node has, counted from the beginning of the data."""
        found = [
            (offset, offset + record.nbytes)
            for record, part, offset in zip(self.records, self.parts, self.offsets, strict=True)
            if part is None and record.nbytes
        ]
        for its in {node, (node - 1) % self.node_count}:
            found += self.part_ranges(its)
        return sorted(found)

    def part_ranges(self, node: int) -> list[tuple[int, int]]:
        """Local. The bytes of the parts of a node's ranks."""
        return [
            (self.offsets[number] + begin, self.offsets[number] + end)
            for rank in self.ranks_of(node) for number, begin, end in self.own_parts(rank)
        ]

    def moves_on(self) -> list[Move]:
        """Local. The parts that ranks send to the next node while they copy."""
        moves: list[Move] = []
        for node in range(self.node_count if self.node_count > 1 else 0):
            targets = self.ranks_of((node + 1) % self.node_count)
            for place, rank in enumerate(self.ranks_of(node)):
                target = targets[place % len(targets)]
                moves += [
                    Move(rank, target, self.offsets[number] + begin, self.offsets[number] + end)
                    for number, begin, end in self.own_parts(rank)
                ]
        return moves

    def is_covered(self, holders: Mapping[int, int]) -> bool:
        """Local. Whether the files that exist have all of it.

        Args:
            holders: For each file the node that wrote it, by the node that has it now.
        """
        if not holders:
            return False
        there = {*holders.values()}
        return all(
            not self.part_ranges(node) or there & {node, (node + 1) % self.node_count}
            for node in range(self.node_count)
        )

    def lacking(self, holders: Mapping[int, int], nodes: Sequence[int]) -> list[Move]:
        """Local. The parts that nodes send each other so that the file of each one is whole.

        Args:
            holders: See `is_covered`.
            nodes: The node of each rank now.
        """
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            members.setdefault(node, []).append(rank)
        first = min(holders)
        whole = [
            (offset, offset + record.nbytes)
            for record, part, offset in zip(self.records, self.parts, self.offsets, strict=True)
            if part is None and record.nbytes
        ]
        sources = {first: whole} if len(members) > len(holders) else {}
        moves = [
            move for source, ranges in sources.items() for target in members if target not in holders
            for move in _dealt(ranges, members[source], members[target])
        ]
        for its in range(self.node_count):
            has = [node for node, wrote in sorted(holders.items()) if its in (wrote, (wrote - 1) % self.node_count)]
            ranges = self.part_ranges(its)
            for target in members if ranges else ():
                if target not in has:
                    moves += _dealt(ranges, members[has[0]], members[target])
        return moves


def _parts(content: Any) -> tuple[Bounds, Owners]:
    bounds, owners = content
    return tuple(map(int, bounds)), None if owners is None else tuple(map(int, owners))


def _dealt(ranges: Sequence[tuple[int, int]], sources: Sequence[int], targets: Sequence[int]) -> Iterator[Move]:
    """Ranges, in pieces, dealt to the ranks of two nodes."""
    number = 0
    for begin, end in ranges:
        for at in range(begin, end, 16 * PIECE_BYTES):
            yield Move(
                sources[number % len(sources)], targets[number % len(targets)], at, min(end, at + 16 * PIECE_BYTES)
            )
            number += 1


def sum_of(data: AnyArray, offset: int) -> int:
    """Local. The sum of bytes as words of 64 bits, modulo 2^64; sums of adjacent pieces add up to that of the whole.

    Args:
        data: Bytes.
        offset: The place of the first one, counted from the beginning of the data.
    """
    skipped = min(-offset % _WORD, data.size)
    total = int.from_bytes(data[:skipped].tobytes(), "little") << 8 * (offset % _WORD)
    rest = data[skipped:]
    words = rest.size // _WORD * _WORD
    if words:
        total += int(np.add.reduce(rest[:words].view(np.uint64), dtype=np.uint64))
    return (total + int.from_bytes(rest[words:].tobytes(), "little")) % _WRAP


def blocks(ranges: Sequence[tuple[int, int]], rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Local. A rank's share of ranges of bytes, in blocks that fit a cache; the ranks of a node take turns."""
    number = 0
    for begin, end in ranges:
        for at in range(begin, end, PIECE_BYTES // 2):
            if number % size == rank:
                yield at, min(end, at + PIECE_BYTES // 2)
            number += 1


def joined(sums: Sequence[int]) -> int:
    """Local. The sum of sums."""
    return sum(sums) % _WRAP
