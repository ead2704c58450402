"""The copier: memory between where arrays lie and the collective that combines them, and the copies to and fro.

The staged collective is one pipeline over three carriers: host memory, pinned host memory of CUDA, and fixed pieces
of GPU memory (the last two in `cuda`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpidist.arrays import AnyArray


class Ticket(Protocol):
    """A copy that was started."""

    def synchronize(self) -> None:
        """Local. Return when the copy is done."""
        ...


class StagingCopier(Protocol):
    """Rooms of bytes that a collective works in, and copies that may still be under way when their call returns.

    Copies towards rooms are done in the order in which they were started, and so are those from rooms.
    """

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. A room: uint8, one-dimensional, aligned for every dtype."""
        ...

    def begin(self) -> None:
        """Local. Copies that are started from now on see what the program has computed so far."""
        ...

    def end(self) -> None:
        """Local. What the program computes from now on sees all copies that were started."""
        ...

    def copy_to_room(self, sources: Sequence[AnyArray], room: AnyArray) -> Ticket:
        """Local. Start to copy arrays, one after another, into a room.

        Args:
            sources: Contiguous, of bytes, together at most as long as the room.
            room: Must not change, or be read, before `wait`.
        """
        ...

    def copy_from_room(self, room: AnyArray, targets: Sequence[AnyArray]) -> Ticket:
        """Local. Start to copy a room into arrays, one after another.

        Args:
            room: Must not change before `wait`.
            targets: Contiguous, of bytes.
        """
        ...

    def wait(self, ticket: Ticket) -> None:
        """Local. Return when that copy is done, and those before it in its direction."""
        ...


class HostCopier:
    """Rooms in plain host memory, for arrays that lie there, too; a copy is done when its call returns."""

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. See `StagingCopier.allocate`."""
        return np.empty(byte_count, np.uint8)

    def begin(self) -> None:
        """Local. Nothing: the host computes in order."""

    def end(self) -> None:
        """Local. Nothing."""

    def copy_to_room(self, sources: Sequence[AnyArray], room: AnyArray) -> Ticket:
        """Local. See `StagingCopier.copy_to_room`."""
        at = 0
        for source in sources:
            room[at : at + source.size] = source
            at += source.size
        return DONE

    def copy_from_room(self, room: AnyArray, targets: Sequence[AnyArray]) -> Ticket:
        """Local. See `StagingCopier.copy_from_room`."""
        at = 0
        for target in targets:
            target[...] = room[at : at + target.size]
            at += target.size
        return DONE

    def wait(self, ticket: Ticket) -> None:
        """Local. See `StagingCopier.wait`."""
        ticket.synchronize()


class _Done:
    def synchronize(self) -> None:
        """Local. The copy is done already."""


DONE = _Done()
