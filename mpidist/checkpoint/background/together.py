"""The beginning and the end of a save in the background, which all ranks make together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter

import numpy as np

from mpidist.checkpoint.background.copying import Buffer, ShareCopy
from mpidist.checkpoint.background.memory import free_bytes
from mpidist.checkpoint.background.save import BackgroundSave
from mpidist.checkpoint.directory.state import DirectoryWork
from mpidist.checkpoint.transfer import ArrayToWrite, create_blank, discard
from mpidist.comm.group.agreement import exchange, on_first_rank
from mpidist.comm.group.communicator import Communicator


class CopyMemory:
    """Local. The memory for the copies of one checkpoint's saves, which is kept, since its first use is slow."""

    def __init__(self) -> None:
        self._buffer: Buffer = np.empty(0, np.uint8)

    def missing(self, nbytes: int) -> int:
        """Local. The bytes to take from the system for a copy."""
        return 0 if nbytes <= self._buffer.nbytes else nbytes

    def take(self, nbytes: int) -> Buffer:
        """Local. Memory for a copy of this size.

        Raises:
            MemoryError: There is not enough memory.
        """
        if self.missing(nbytes):
            # The old one first.
            self.release()
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer

    def release(self) -> None:
        """Local. Give the memory back, when the last copy is written."""
        self._buffer = np.empty(0, np.uint8)


def begin_in_background(
    communicator: Communicator, path: str, arrays: Sequence[ArrayToWrite], shared: Mapping[str, str],
    work: DirectoryWork, memory: CopyMemory,
) -> BackgroundSave | str:
    """Collective. Copy a checkpoint, and let a thread write it.

    Args:
        communicator: The ranks that write.
        path: The file's name.
        arrays: See `write_checkpoint`.
        shared: See `write_checkpoint`.
        work: See `write_checkpoint`; all but `before` is done by rank 0's thread.
        memory: The memory for the copy.

    Returns:
        The save; or the reason why there is no memory for it, the same on every rank.

    Raises:
        OSError: On every rank: the directory cannot be written.
        CheckpointError, ValueError: On every rank; see `Checkpoint.save`.
    """
    share = ShareCopy(arrays, communicator.rank, communicator.size)
    buffer: Buffer | None = None
    missing = memory.missing(share.nbytes)
    free = free_bytes() if missing else 0
    if missing <= free:
        try:
            buffer = memory.take(share.nbytes)
        except MemoryError:
            free = 0
    needs = exchange(
        communicator, "looking for memory", (communicator.host, missing, free, buffer is not None)
    )
    lack = _lack(needs)
    if lack or buffer is None:
        memory.release()
        return lack
    make = partial(
        create_blank, path, list(map(attrgetter("record"), arrays)), shared, work.before, with_blocks=False
    )
    blank = on_first_rank(communicator, f"creating checkpoint {path!r}", make)
    try:
        communicator.share_directory(os.path.dirname(os.path.abspath(path)))
        # What is in the file must not come from calls in which ranks differ.
        with communicator.order.enter("save", None, None) as order:
            order.show_call()
            heads, error = share.take(arrays, buffer)
            # No rank continues before every rank has its copy: the next step would change what others copy.
            everyone = exchange(communicator, f"copying checkpoint {path!r}", heads, error)
            order.compare_across()
    except BaseException:
        discard(communicator, blank)
        raise
    write = partial(share.write, blank.path, blank.offsets, everyone, buffer)
    save = BackgroundSave(communicator, path, blank, write, work)
    save.start()
    return save


def finish_together(communicator: Communicator, save: BackgroundSave) -> float:
    """Collective. Wait for a save in the background.

    Args:
        communicator: The ranks that write.
        save: This rank's part of the save.

    Returns:
        The time at which the file got its name, by rank 0's clock, in seconds since 1970.

    Raises:
        OSError, CheckpointError: On every rank, if any rank could not write, or the file could not get its name.
    """
    step = f"saving checkpoint {save.path!r} in the background"
    try:
        exchange(communicator, step, None, save.wait_until_written())
    except Exception:
        # Not after an interrupt: the end of the program completes the save.
        save.give_up()
        save.join()
        save.forget()
        # Now no rank leaves a mark any more.
        save.clear()
        raise
    try:
        saved_at = on_first_rank(communicator, step, save.finish)
    except Exception:
        save.forget()
        raise
    save.forget()
    return saved_at


def _lack(needs: Sequence[tuple[str, int, int, bool]]) -> str:
    """The lack of memory on some host, in words; empty where there is none."""
    for host in dict.fromkeys(host for host, *_ in needs):
        here = [need for need in needs if need[0] == host]
        missing, free = sum(need[1] for need in here), [need[2] for need in here if need[1]]
        if not all(has for *_, has in here) or missing > min(free, default=missing):
            return (
                f"the copies take {missing} bytes on host {host}, which has {min(free, default=0)} bytes of memory left"
            )
    return ""
