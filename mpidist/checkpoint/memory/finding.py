"""The finding of a copy: all nodes agree on the newest one that they have whole together, and send what one lacks."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidist.checkpoint.directory.state import CheckpointEntry
from mpidist.checkpoint.file.choice import Choice
from mpidist.checkpoint.file.hdf5 import Contents
from mpidist.checkpoint.file.layout import FORMAT, PIECE_BYTES
from mpidist.checkpoint.file.saved import SavedFile
from mpidist.checkpoint.memory.buffer import CopyBuffer, SeenCopy, data_begin, look_into, require_room
from mpidist.checkpoint.memory.layout import CopyLayout, blocks, joined, sum_of
from mpidist.checkpoint.memory.place import CopyPlace, arguments
from mpidist.checkpoint.memory.writing import move
from mpidist.checkpoint.opening import open_contents
from mpidist.comm.group.agreement import gather_together, together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import DamagedCheckpointError

Key = tuple[int, int]


class FoundCopy(NamedTuple):
    """A copy that all nodes have agreed on.

    Attributes:
        slot: The number of its buffer, the same on every node.
        facts: What is known of it.
        holders: For each node that has a file of it the node that wrote it.
        layout: The layout.
        text: The layout as a text.
        shown: The directory of the copies, as the first rank sees it.
    """

    slot: int
    facts: Mapping[str, Any]
    holders: Mapping[int, int]
    layout: CopyLayout
    text: bytes
    shown: str


def find_copy(group: Communicator, place: CopyPlace, disk: CheckpointEntry | None) -> FoundCopy | str:
    """Collective. Find the newest copy of which the nodes together have every part.

    Args:
        group: The ranks.
        place: Where copies are.
        disk: The newest checkpoint on the disk, as rank 0 knows it; None if there is none.

    Returns:
        The copy; or the reason why none is used, empty if it needs none.
    """
    layouts: dict[int, bytes] = {}
    everyone = gather_together(
        group, "looking for copies in memory",
        lambda: (_look(group, place, layouts), disk, place.is_marked, str(place.shown)),
    )
    _, disk, is_marked, shown = everyone[0]
    seen = {rank: copies for rank, (copies, *_) in enumerate(everyone) if copies}
    if not seen:
        return "the copies in memory of an earlier start of this job are gone" if is_marked else ""
    keys = sorted({_key(one) for copies in seen.values() for one in copies}, reverse=True)
    reason = ""
    for key in keys:
        there = {rank: one for rank, copies in seen.items() for one in copies if _key(one) == key}
        first = there[min(there)]
        if any(one.facts["arguments"] != arguments() for one in there.values()):
            reason = "a copy in memory is of a program with other arguments"
            continue
        if disk is not None and _is_newer(disk, first.facts):
            return ""
        text = layouts.get(first.slot, b"")
        if {group.nodes[rank] for rank in there} != {*group.nodes}:
            text = group.broadcast_object(text, root=min(there))
        if any(one.facts["layout"] != first.facts["layout"] for one in there.values()):
            reason = "the nodes have copies of different objects"
            continue
        layout = CopyLayout.decode(text)
        whole = _whole(group, place, layout, text, there)
        holders = {group.nodes[rank]: int(one.facts["node"]) for rank, one in there.items() if rank in whole}
        if layout.is_covered(holders):
            return FoundCopy(first.slot, first.facts, holders, layout, text, shown)
        reason = "a copy in memory is not whole: the nodes that are left do not have every part of it"
    return reason


def _is_newer(disk: CheckpointEntry, facts: Mapping[str, Any]) -> bool:
    """Whether a checkpoint on the disk has a later state than a copy."""
    # Threads may complete a file after the copy, with the state of before.
    saved, under_way = float(facts["saved"]), str(facts["under_way"])
    return disk.timestamp > saved and disk.name != under_way


def _key(copy: SeenCopy) -> Key:
    return int(copy.facts["start"]), int(copy.facts["number"])


def _look(group: Communicator, place: CopyPlace, layouts: dict[int, bytes]) -> list[SeenCopy]:
    """Whole copies that this rank sees there; the layouts, which may be long, stay on each rank."""
    found = [look_into(place.path / str(slot), slot) for slot in range(2)]
    copies = [one for one in found if one is not None]
    layouts.update({one.slot: one.layout for one in copies})
    return [] if group.node.rank else [
        one._replace(layout=b"", facts={**one.facts, "layout": zlib.crc32(one.layout)}) for one in copies
    ]


def _whole(
    group: Communicator, place: CopyPlace, layout: CopyLayout, text: bytes, there: Mapping[int, SeenCopy]
) -> set[int]:
    """Collective. The first ranks of the nodes whose files have the sums with which they were written."""
    node = group.node
    first = next((rank for rank in there if group.nodes[rank] == group.node_index), None)

    def add_up() -> tuple[int, int]:
        if first is None:
            return -1, 0
        ranges = layout.ranges(int(there[first].facts["node"]))
        with (place.path / str(there[first].slot)).open("rb", buffering=0) as file:
            return first, _add_up(file.fileno(), data_begin(text), blocks(ranges, node.rank, node.size))

    everyone = gather_together(group, "comparing copies in memory with their sums", add_up)
    sums: dict[int, list[int]] = {}
    for rank, total in everyone:
        sums.setdefault(rank, []).append(total)
    return {rank for rank in there if joined(sums[rank]) == there[rank].facts["sum"]}


def _add_up(descriptor: int, origin: int, places: Iterable[tuple[int, int]]) -> int:
    """The sum of blocks of the data. Not by a mapping: a fault for each page would take as long as the sum."""
    block = np.empty(PIECE_BYTES // 2, np.uint8)
    total = 0
    for begin, end in places:
        part = block[: end - begin]
        if os.preadv(descriptor, [part.data], origin + begin) < part.size:
            raise DamagedCheckpointError("a copy in memory is shorter than its layout")
        total += sum_of(part, begin)
    return joined([total])


def open_copy(
    group: Communicator, place: CopyPlace, found: FoundCopy, buffer: CopyBuffer, choice: Choice
) -> tuple[SavedFile, int | None, dict[str, Any]]:
    """Collective. Give every node the whole copy, and open it as a checkpoint.

    Args:
        group: The ranks.
        place: Where copies are.
        found: The copy.
        buffer: Its buffer on this node, which this opens.
        choice: The part of it that is taken.

    Returns:
        See `opening.open_together`.

    Raises:
        OSError: A node has no memory for it.
        CheckpointError: The choice does not fit it.
    """
    layout, node = found.layout, group.node
    moves = layout.lacking(found.holders, group.nodes)
    is_here = group.node_index in found.holders
    has_all = all(group.nodes[one.target] != group.node_index for one in moves)
    ranges = [
        (offset, offset + record.nbytes) for record, offset in zip(layout.records, layout.offsets, strict=True)
    ]

    def make() -> None:
        if node.rank == 0 and not is_here:
            place.make()
            require_room(place.home, layout.byte_count)
            buffer.make(found.text, layout.byte_count)

    def reserve() -> None:
        if any(group.rank == one.source for one in moves):
            buffer.map(found.text)
        if not has_all:
            buffer.open(found.text, ranges, node.rank, node.size)

    if moves or len(found.holders) < len({*group.nodes}):
        together(group, "making room for a copy from another node", make)
        together(group, "mapping a copy in memory", reserve)
        move(group, moves, buffer.data)
        buffer.close()

    def open_here() -> tuple[SavedFile, int | None, dict[str, Any]]:
        begin = data_begin(found.text)
        contents = Contents(
            found.shown, os.stat(buffer.path).st_size, [*layout.records], [begin + offset for offset in layout.offsets],
            [], dict(layout.shared), FORMAT, 0, buffer.mark(), str(buffer.path),
        )
        return open_contents(contents, found.shown, choice)

    # No rank leaves this before the others of its node have received what they are to receive.
    return together(group, "opening a copy in memory", open_here)
