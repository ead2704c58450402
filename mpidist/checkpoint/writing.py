"""The writing of a checkpoint's objects: by servers, by all ranks at once, or by threads in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpidist.checkpoint.background.save import BackgroundSave
from mpidist.checkpoint.background.together import begin_in_background
from mpidist.checkpoint.saves import SaveOrder, Saves
from mpidist.checkpoint.transfer import ArrayToWrite, write_checkpoint
from mpidist.checkpoint.walk.found import Found
from mpidist.checkpoint.walk.listing import arrays_to_write, list_together
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.communicator import Communicator
from mpidist.failures.restart.notes import VARIABLE, note

if TYPE_CHECKING:
    from mpidist.checkpoint.background.served import write_snapshot, write_snapshot_behind
else:
    write_snapshot = at_first_use("mpidist.checkpoint.background.served", "write_snapshot")
    write_snapshot_behind = at_first_use("mpidist.checkpoint.background.served", "write_snapshot_behind")

_NOT_BEHIND = "the groups of a HybridStrategy save together"


def write_objects(
    communicator: Communicator, found: Found, order: SaveOrder, saves: Saves, find: Callable[[], Found],
    save_once: Callable[..., float] | None,
) -> float | BackgroundSave:
    """Collective. Write a checkpoint.

    Args:
        communicator: The objects' own ranks.
        found: The objects.
        order: The settings of the save.
        saves: The saves of the checkpoint.
        find: A function that finds the objects again.
        save_once: `Checkpoint.save_found`; None where it is the one save of all groups, see `Home.save_once`.

    Returns:
        The time at which the file got its name, in seconds since 1970; or the save that a thread completes.

    Raises:
        OSError, CheckpointError, MismatchError, ValueError, TypeError: See `Checkpoint.save`.
    """
    path, variable = order.path, found.variable(communicator)
    is_first = communicator.rank == 0 and save_once is not None
    # Only a chief has it.
    servers = found.servers() if communicator.size == 1 else None
    has_groups = variable is not None and variable.home.saves_once and save_once is not None
    with (communicator.calls if variable is None else variable.calls).during("save"):
        written: float | BackgroundSave
        if variable is not None and save_once is not None and has_groups:
            now = order._replace(in_background=False, ended=None)
            write = partial(_write_for_all, found, partial(save_once, is_once=True), now, find)
            written = variable.home.save_once(write, found.places_in_group())
        elif servers is not None:
            written = (
                write_snapshot_behind(communicator, servers, find, order) if order.in_background
                else write_snapshot(servers, find, order)
            )
        else:
            listing = partial(arrays_to_write, found, communicator, order.number, order.metadata)
            arrays = list_together(communicator, f"listing what checkpoint {path!r} holds", listing, path)
            written = (
                _write_behind(communicator, arrays, found, order, saves) if order.in_background
                else write_checkpoint(communicator, path, arrays, found.shared, order.work)
            )
        if isinstance(written, float):
            communicator.order.last_checkpoint = path
            if is_first and VARIABLE in os.environ:
                note("saved", path=path)
    if is_first:
        if found.caches or found.numbers:
            saves.warn(found, path)
        if order.in_background and has_groups:
            saves.tell_foreground(_NOT_BEHIND)
    return written


def _write_for_all(
    found: Found, save: Callable[..., float], order: SaveOrder, find: Callable[[], Found],
    of_groups: Mapping[int, Mapping[str, Any]],
) -> float:
    """Write the objects of one group, with the places of all of them."""
    if found.places_in_group():
        found.note_places(of_groups)
        found = find()
    return save(found, order)


def _write_behind(
    communicator: Communicator, arrays: Sequence[ArrayToWrite], found: Found, order: SaveOrder, saves: Saves
) -> float | BackgroundSave:
    """Let a thread write a checkpoint, if there is memory for the copy; else write it."""
    save = begin_in_background(communicator, order.path, arrays, found.shared, order.work, saves.memory)
    if isinstance(save, BackgroundSave):
        return save
    if communicator.rank == 0:
        saves.tell_foreground(save)
    return write_checkpoint(communicator, order.path, arrays, found.shared, order.work)
