"""The save of a job with parameter servers: it is of one moment, and the servers write the most of it.

The caller waits until they have, or continues while a thread waits for that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial

from mpidist.checkpoint.background.save import BackgroundSave, MainThread
from mpidist.checkpoint.saves import SaveOrder
from mpidist.checkpoint.server_snapshot import SnapshotPlan
from mpidist.checkpoint.transfer import Checksums, create_blank, publish
from mpidist.checkpoint.walk.found import Found
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.variables.kinds.served import ServedHome

# How long a thread waits between two looks at what the servers have said.
_FIRST_SECONDS = 0.002
_LAST_SECONDS = 0.25


def write_snapshot(home: ServedHome, find: Callable[[], Found], order: SaveOrder) -> float:
    """Local. Write a checkpoint of variables of servers, and of what the chief has beside them.

    Args:
        home: The home of the variables.
        find: A function that finds the objects; it is called twice.
        order: The settings of the save. A file that had the name keeps it until all is written.

    Returns:
        The time at which the file got its name, in seconds since 1970.

    Raises:
        OSError: The chief, or a server, cannot write.
        DeadRankError: A server is dead.
        CheckpointError, ValueError: See `Checkpoint.save`.
    """
    snapshot = _ServerSnapshot(home, find, order)
    try:
        return publish(snapshot.blank, [snapshot.write(home.wait_for_snapshot)], order.path, order.work)
    except BaseException:
        snapshot.clear()
        raise


def write_snapshot_behind(
    communicator: Communicator, home: ServedHome, find: Callable[[], Found], order: SaveOrder
) -> BackgroundSave:
    """Local. Do as `write_snapshot`, but return when the servers have begun and the chief has copied its own values.

    A thread writes these, and completes the file. It makes no call of MPI: it waits until the main thread has taken the
    servers' messages, in any call of the coordinator.

    Args:
        communicator: The communicator of the chief.
        home: See `write_snapshot`.
        find: See `write_snapshot`.
        order: See `write_snapshot`.

    Raises:
        OSError, DeadRankError, CheckpointError, ValueError: See `write_snapshot`.
    """
    snapshot = _ServerSnapshot(home, find, order)
    try:
        snapshot.copy()
        save = BackgroundSave(
            communicator, order.path, snapshot.blank, partial(snapshot.write, snapshot.wait_in_thread), order.work,
            MainThread(home.look_at_snapshot, snapshot.wait_in_main_thread),
        )
    except BaseException:
        snapshot.clear()
        raise
    save.start()
    return save


class _ServerSnapshot:
    """Local. A checkpoint of one moment, whose parts the servers have begun to write.

    Args:
        home: See `write_snapshot`.
        find: See `write_snapshot`.
        order: See `write_snapshot`.

    Attributes:
        blank: The file.
    """

    def __init__(self, home: ServedHome, find: Callable[[], Found], order: SaveOrder) -> None:
        path, count, metadata = order.path, order.number, order.metadata
        self._home = home
        self._is_given_up = threading.Event()
        self._plan = plan = SnapshotPlan(find(), count, metadata)
        self.blank = create_blank(path, plan.records, plan.shared, order.work.before)
        try:
            home.communicator.share_directory(os.path.dirname(os.path.abspath(path)))
            # The disk may take its time for the file, and for another checkpoint that servers still write; no closure
            # waits for that. Then all is of one moment.
            home.wait_for_snapshot()
            with home.pause():
                self._plan = now = SnapshotPlan(find(), count, metadata)
                if (now.records, now.shared) != (plan.records, plan.shared):
                    # The text of a generator's state may be longer now, for instance.
                    os.unlink(self.blank.path)
                    self.blank = create_blank(path, now.records, now.shared, ())
                self._outcomes = home.begin_snapshot(now.shares(self.blank))
        except BaseException:
            self.clear()
            raise

    def copy(self) -> None:
        """Local. Copy the values that the chief writes: the program may change them before that."""
        self._plan.copy_own()

    def write(self, wait: Callable[[], None]) -> Checksums:
        """Local. Write the values that are not on servers and, when these have saved, what they leave to the chief.

        Args:
            wait: A function that waits until the servers have saved.
        """
        communicator, plan, blank = SoloCommunicator(), self._plan, self.blank
        try:
            checksums = plan.write_own(communicator, blank)
        finally:
            wait()
        outcomes = self._outcomes() or {}
        checksums |= plan.write_small(communicator, blank, outcomes)
        for its in (*(outcome.checksums for outcome in outcomes.values()), *plan.join_shards(blank, outcomes)):
            checksums |= its
        return checksums

    def wait_in_thread(self) -> None:
        """Local. Wait until the main thread knows that the servers have saved."""
        seconds = _FIRST_SECONDS
        while self._outcomes() is None:
            if self._is_given_up.wait(seconds):
                raise CheckpointError(f"{self.blank.path!r} was given up: a server could not be waited for")
            seconds = min(1.5 * seconds, _LAST_SECONDS)

    def wait_in_main_thread(self) -> None:
        """Local. Wait until the servers have saved.

        Raises:
            DeadRankError: A server is dead.
        """
        try:
            self._home.wait_for_snapshot()
        except Exception:
            # After an interrupt it can wait again.
            self._is_given_up.set()
            raise

    def clear(self) -> None:
        """Local. Delete the file, which will not be completed."""
        with contextlib.suppress(OSError):
            os.unlink(self.blank.path)
