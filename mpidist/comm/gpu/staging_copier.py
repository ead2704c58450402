"""The copier: rooms of memory for the staged backend, and copies between these rooms and arrays.

The staged backend works with three copiers, whose rooms are in host memory, in pinned host memory of CUDA, or in GPU
memory. The last two are in `cuda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpidist.arrays import AnyArray


class Ticket(Protocol):
    """A copy that has begun."""

    def synchronize(self) -> None:
        """Local. Return when the copy is done."""
        ...


class StagingCopier(Protocol):
    """Rooms of bytes in which a backend works, and copies that may still be in progress when their call returns.

    Copies into rooms are done in the order in which they have begun, and so are copies out of rooms.
    """

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. Allocate a room: uint8, one-dimensional, aligned for every dtype."""
        ...

    def begin(self) -> None:
        """Local. Let later copies see everything that the program has computed so far."""
        ...

    def end(self) -> None:
        """Local. Let everything that the program computes from now on see all copies that have begun."""
        ...

    def copy_to_room(self, sources: Sequence[AnyArray], room: AnyArray) -> Ticket:
        """Local. Begin to copy arrays into a room, one after the other.

        Args:
            sources: Contiguous arrays of bytes, together not longer than the room.
            room: The room, which the caller neither reads nor changes before `wait`.
        """
        ...

    def copy_from_room(self, room: AnyArray, targets: Sequence[AnyArray]) -> Ticket:
        """Local. Begin to copy a room into arrays, one after another.

        Args:
            room: The room, which the caller does not change before `wait`.
            targets: Contiguous arrays of bytes.
        """
        ...

    def wait(self, ticket: Ticket) -> None:
        """Local. Return when a copy is done, and with it all earlier copies in its direction."""
        ...


class HostCopier:
    """Rooms in host memory, for arrays in host memory. A copy is done when its call returns."""

    def allocate(self, byte_count: int) -> AnyArray:
        """Local. See `StagingCopier.allocate`."""
        return np.empty(byte_count, np.uint8)

    def begin(self) -> None:
        """Local. Do nothing: the host computes in order."""

    def end(self) -> None:
        """Local. Do nothing."""

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
        """Local. Return at once: the copy is done."""


DONE = _Done()
