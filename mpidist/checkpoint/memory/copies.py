"""Copies of a manager's objects in the memory of the nodes: when they are made, and which one is restored."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from mpidist import launch
from mpidist.arguments import whole
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.state import CheckpointEntry
from mpidist.checkpoint.file.choice import Choice
from mpidist.checkpoint.memory.buffer import CopyBuffer
from mpidist.checkpoint.memory.buffers import BufferPair
from mpidist.checkpoint.memory.finding import FoundCopy, find_copy, open_copy
from mpidist.checkpoint.memory.interval import CopyInterval
from mpidist.checkpoint.memory.layout import CopyLayout, joined
from mpidist.checkpoint.memory.place import CopyPlace, arguments, place_of_run
from mpidist.checkpoint.memory.writing import WrittenShare, move, write_share
from mpidist.checkpoint.walk.found import Found
from mpidist.checkpoint.walk.listing import arrays_to_write, list_together
from mpidist.checkpoint.walk.objects import walk
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.failures.restart.notes import note
from mpidist.variables.variable import BaseVariable

logger = logging.getLogger("mpidist")


def memory_copies(checkpoint: Checkpoint, files: tuple[str, str], memory: object) -> MemoryCopies:
    """Local. The copies of a manager, by its argument `memory`; see `MemoryCopies`.

    Raises:
        TypeError, ValueError: `memory` is neither True nor a positive number of steps.
    """
    return MemoryCopies(checkpoint, files, None if memory is True else whole("memory", memory, least=1))


class MemoryCopies:
    """Local. The copies of one manager; they need a job that `mpidist run` has started.

    Args:
        checkpoint: The objects.
        files: The directory of the manager, and the first part of its files' names.
        interval: The number of steps between two copies; None: it is chosen.

    Attributes:
        is_on: Whether copies are made.

    Raises:
        NotImplementedError: The objects are on parameter servers, or of a strategy whose groups have others.
    """

    def __init__(self, checkpoint: Checkpoint, files: tuple[str, str], interval: int | None) -> None:
        held = walk(checkpoint.held_objects(), into_states=False)
        refuse(held, SoloCommunicator() if held.servers() is not None else held.group())
        self._checkpoint = checkpoint
        self._place: CopyPlace | None = place_of_run(*files)
        self._interval = CopyInterval(interval)
        self._calls = 0
        self._number = 0
        self._is_told = self._is_noted = False
        self._buffers = BufferPair()
        self.is_on = self._place is not None
        if self._place is None:
            logger.info("no copies in memory are made: they are for jobs that `mpidist run` starts")

    def offer(self, step: int | None, last_step: int | None, disk: tuple[float, str]) -> bool:
        """Collective where a copy is due, else Local. Copy the objects, if it is time.

        Args:
            step: The step, by the manager's counter; None: each call counts as one.
            last_step: The step of the last checkpoint on the disk.
            disk: When the newest checkpoint on the disk was saved, by rank 0's clock; and the file of a later one that
                threads write now, empty if there is none.

        Returns:
            Whether they were copied.

        Raises:
            CheckpointError, MismatchError, ValueError: See `Checkpoint.save`.
        """
        if not self.is_on:
            return False
        self._calls += 1
        at = self._calls if step is None else step
        begin = time.monotonic()
        if not self._interval.is_due(at, begin):
            return False
        found = self._checkpoint.find_objects()
        group = found.group()
        refuse(found, group)
        if self._checkpoint.pending is not None:
            self._checkpoint.pending.require_restored(found)
        if not _is_shared(found, group):
            self._turn_off("each rank has variables of its own", is_first=True)
            return False
        with found.calls(group).during("save"):
            saved, under_way = disk
            facts = {
                "step": step, "last_step": last_step, "saved": saved, "under_way": under_way, "arguments": arguments(),
            }
            is_made, count = self._copy(found, group, facts, (at, begin))
        if is_made:
            self._interval.begin(at, time.monotonic(), count)
        return is_made

    def count_from(self, step: int | None) -> None:
        """Local. Count the steps to the next copy from here: the state was saved on the disk, or restored."""
        if self._interval.next is not None:
            at = self._calls if step is None else step
            self._interval.begin(at, time.monotonic(), max(1, self._interval.next - self._interval.begun))

    def restore(self, found: Found, choice: Choice, disk: CheckpointEntry) -> dict[str, Any] | None:
        """Collective. Restore the newest copy that is whole, unless the checkpoint on the disk is newer.

        Args:
            found: The objects.
            choice: The part of the copy that is restored.
            disk: The newest checkpoint on the disk, as rank 0 knows it.

        Returns:
            The facts about the copy, with its `path`; None if the checkpoint on the disk is to be restored.
        """
        group = found.group()
        refuse(found, group)
        if not self.is_on or self._place is None or not _is_shared(found, group):
            return None
        place = self._place
        with found.calls(group).during("restore"):
            seen: FoundCopy | str = find_copy(group, place, disk if disk.name else None)
            if isinstance(seen, FoundCopy):
                buffer = CopyBuffer(place.path / str(seen.slot))
                try:
                    opened = open_copy(group, place, seen, buffer, choice)
                    self._checkpoint.restore_opened(found, opened)
                except (CheckpointError, OSError) as error:
                    torn = self._checkpoint.pending
                    if torn is not None and torn.is_torn and not disk.name:
                        raise
                    seen = f"the copy in memory is not used: {error}"
                else:
                    self._buffers.keep(seen.slot)
                    return self._restored(group, seen)
        if seen and group.rank == 0:
            logger.warning("%s. The checkpoint on the disk is restored instead", seen)
        return None

    def _restored(self, group: Communicator, seen: FoundCopy) -> dict[str, Any]:
        if group.rank == 0:
            note("restored", path=f"the copy in memory in {seen.shown}", step=seen.facts["step"])
        return {**seen.facts, "path": seen.shown}

    def _copy(
        self, found: Found, group: Communicator, facts: dict[str, Any], since: tuple[int, float]
    ) -> tuple[bool, int]:
        place, name, notes = self._place, "a copy in memory", self._checkpoint.metadata or None
        if place is None:
            return False, 0
        listing = partial(arrays_to_write, found, group, self._checkpoint.save_counter, notes)
        arrays = list_together(group, "listing what a copy in memory holds", listing, name)
        parts = [None if one.bounds is None else (one.bounds, one.owners) for one in arrays]
        layout = CopyLayout.of([one.record for one in arrays], parts, group.nodes, found.shared)
        text, reserved = layout.encode(), time.monotonic()
        try:
            buffer = self._buffers.prepare(group, place, layout, text)
        except OSError as error:
            self._turn_off(str(error), is_first=group.rank == 0)
            return False, 0
        # What is reserved once is no cost of each copy.
        begin = since[1] + time.monotonic() - reserved
        node = group.node
        with group.order.enter("save", None, None) as order:
            order.show_call()
            if node.rank == 0:
                buffer.invalidate()
            node.barrier()
            share = write_share(group, arrays, layout, buffer.data)
            move(group, layout.moves_on(), buffer.data)
            count = self._interval.choose(since[0], since[1], time.monotonic() - begin)
            everyone = group.all_gather_object((share, count))
            order.compare_across()
        shares, count = [one for one, _ in everyone], everyone[0][1]
        failed = next((rank for rank, one in enumerate(shares) if one.error), None)
        if failed is not None:
            self._turn_off(f"rank {failed}: {shares[failed].error}", is_first=group.rank == 0)
            return False, 0
        self._number += 1
        if node.rank == 0:
            buffer.commit({
                **facts, "start": place.start, "number": self._number, "node": group.node_index,
                "nodes": layout.node_count, "sum": _sum_of(shares, layout, group.node_index),
            })
        self._buffers.turn()
        self._tell(group, place, facts, count, layout.byte_count)
        return True, count

    def _tell(
        self, group: Communicator, place: CopyPlace, facts: dict[str, Any], count: int, byte_count: int
    ) -> None:
        if group.rank != 0:
            return
        if not self._is_noted:
            self._is_noted = True
            place.mark()
            note("saved", path=str(place.shown), step=facts["step"])
        if not self._is_told:
            self._is_told = True
            logger.info(
                "the state (%.1f MB on each node) is copied into %s every %d steps%s", byte_count / 1e6, place.shown,
                count, "" if self._interval.given else ", which takes about a hundredth of the time",
            )

    def _turn_off(self, reason: str, *, is_first: bool) -> None:
        self.is_on = False
        if is_first:
            logger.warning("no copies in memory are made, and only checkpoints on the disk are kept: %s", reason)


def refuse(found: Found, group: Communicator) -> None:
    """Local. Raise NotImplementedError for objects of which no copies can be made.

    Args:
        found: The objects.
        group: Their ranks.
    """
    if found.servers() is not None:
        raise NotImplementedError(
            "`memory` of a CheckpointManager is not supported under ParameterServerStrategy, whose servers hold the "
            "variables and whose workers continue while they are saved. Leave it out, and save to the disk"
        )
    variable = found.variable(group)
    if isinstance(variable, BaseVariable) and variable.home.saves_once:
        raise NotImplementedError(
            "`memory` of a CheckpointManager is not supported under HybridStrategy, whose groups have different "
            "values. Leave it out, and save to the disk"
        )


def _is_shared(found: Found, group: Communicator) -> bool:
    """Whether the ranks hold the objects together: else each would write the same copy."""
    return group.mpi is not None or (launch.world_size() == 1 and found.is_written_here(group))


def _sum_of(shares: Sequence[WrittenShare], layout: CopyLayout, node: int) -> int:
    """The sum of the bytes in the file of a node: see `CopyLayout.ranges`."""
    own = layout.ranks_of(node)
    # Where there is one node, its ranks are counted once.
    others = {*layout.ranks_of((node - 1) % layout.node_count), *own}
    return joined([*(shares[rank].whole for rank in own), *(shares[rank].own for rank in sorted(others))])
