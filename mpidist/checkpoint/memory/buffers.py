"""The two buffers of a node, which are written in turns: whenever a kill comes, one of them is whole."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence

from mpidist.checkpoint.memory.buffer import CopyBuffer, data_begin, require_room
from mpidist.checkpoint.memory.layout import CopyLayout
from mpidist.checkpoint.memory.place import CopyPlace
from mpidist.comm.group.agreement import gather_together, together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared


class BufferPair:
    """Local. The buffers of one manager on this node; all nodes write the one of the same number."""

    def __init__(self) -> None:
        self._open: dict[int, CopyBuffer] = {}
        self._slot = 0
        self._keeps_other = False

    def keep(self, slot: int) -> None:
        """Local. Write another buffer than this one next: the objects were restored from it.

        They may still read from it what they have not taken yet. So it is never written again: a new file takes its
        place.
        """
        self._open.clear()
        self._slot, self._keeps_other = 1 - slot, True

    def turn(self) -> None:
        """Local. Write the other buffer next."""
        self._slot = 1 - self._slot

    def prepare(self, group: Communicator, place: CopyPlace, layout: CopyLayout, text: bytes) -> CopyBuffer:
        """Collective. Give the buffer that is written next, with memory for a layout.

        Args:
            group: The ranks.
            place: The place of the copies.
            layout: The layout.
            text: The layout as a text.

        Raises:
            OSError: On every rank: there is no memory for it on some node.
        """
        buffer = self._open.get(self._slot)
        if buffer is not None and buffer.layout == text:
            return buffer
        # At first both, so that the memory is known to be enough.
        slots = [self._slot, *([] if self._open or self._keeps_other else [1 - self._slot])]
        buffers = {slot: CopyBuffer(place.path / str(slot)) for slot in slots}
        node, ranges = group.node, layout.ranges(group.node_index)
        size = data_begin(text) + sum(end - begin for begin, end in ranges)

        def reserve() -> None:
            for one in buffers.values():
                one.open(text, ranges, node.rank, node.size)

        try:
            there = gather_together(
                group, "making buffers for copies in memory",
                lambda: None if node.rank else _make(place, [*buffers.values()], (text, layout.byte_count), size),
            )
            identities = [one for one in there if one is not None]
            if len({*identities}) < len(identities):
                raise mark_shared(OSError(errno.EEXIST, f"several nodes have the same directory {place.path}"))
            together(group, "reserving memory for copies", reserve)
        except OSError:
            self._open.clear()
            for one in buffers.values() if node.rank == 0 else ():
                with contextlib.suppress(OSError):
                    one.path.unlink()
            raise
        self._open.update(buffers)
        return buffers[self._slot]


def _make(
    place: CopyPlace, buffers: Sequence[CopyBuffer], layout: tuple[bytes, int], size: int
) -> tuple[str, int, int]:
    """Make files on this node, in the place of older ones; returns the identity of their directory."""
    place.make()
    for one in buffers:
        # One that is replaced gives its memory back.
        one.path.unlink(missing_ok=True)
    require_room(place.home, size * len(buffers))
    for one in buffers:
        one.make(*layout)
    return place.identity()
