"""One save in the background on one rank: its thread, and its outcome.

The thread makes no call of MPI, and none of HDF5. It writes and syncs the copy of this rank's share, and leaves a mark.
That of the first rank waits for the marks of all, and gives the file its name.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from mpidist.checkpoint.background.marks import Mark, leave_mark, mark_of, remove_marks, wait_for_marks
from mpidist.checkpoint.directory.state import DirectoryWork
from mpidist.checkpoint.file.hdf5 import Blank
from mpidist.checkpoint.transfer import Checksums, publish
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError
from mpidist.failures.deaths import WATCH
from mpidist.failures.farewell import BEFORE_ABORT
from mpidist.failures.restart.notes import note

logger = logging.getLogger("mpidist")

# The longest wait for the first rank where the job ends, and the pause between two looks.
_NAME_SECONDS = 60.0
_LOOK_SECONDS = 0.02


class MainThread(NamedTuple):
    """The part of the main thread in a save of which servers write the most: their messages come by MPI.

    Attributes:
        look: A function that takes the messages that have come.
        wait: A function that waits for those that the save needs; after an error of it the save has failed.
    """

    look: Callable[[], None]
    wait: Callable[[], None]


class BackgroundSave:
    """Local. A save that a thread completes.

    Args:
        communicator: The ranks that write.
        path: The file's name.
        blank: The file, under its temporary name.
        write: A function that writes this rank's share, syncs it, and returns the checksums.
        work: The work of rank 0's thread; its functions `before` were called already.
        main_thread: The part of the main thread; None where all that is written is on this rank.

    Attributes:
        path: The constructor's argument.
        group: The ranks.
        seconds: The time from the beginning to the end on this rank.
        write_error: The error with which this rank could not write its share; None without one.
    """

    def __init__(
        self, communicator: Communicator, path: str, blank: Blank, write: Callable[[], Checksums], work: DirectoryWork,
        main_thread: MainThread | None = None,
    ) -> None:
        self.path = path
        self.group = communicator
        self.seconds = 0.0
        self.write_error: Exception | None = None
        self._error: Exception | None = None
        self._saved_at = 0.0
        self._rank, self._size, self._host = communicator.rank, communicator.size, communicator.host
        self._processes = communicator.processes
        self._blank = blank
        self._work = work
        self._main_thread = main_thread
        self._process = os.getpid()
        self._begin = time.monotonic()
        self._has_written = threading.Event()
        self._is_given_up = threading.Event()
        # A daemon: else the interpreter would join it before exit functions run, and no error would be logged.
        self._thread = threading.Thread(target=self._run, args=(write,), daemon=True, name="mpidist-save")

    def start(self) -> None:
        """Local. Begin to write."""
        UNSEEN.append(self)
        _NAMELESS.append(self)
        if _finish_soon not in BEFORE_ABORT:
            BEFORE_ABORT.append(_finish_soon)
        # Last, so that it runs first of all at the end: locks are released after it.
        atexit.unregister(_finish_all)
        atexit.register(_finish_all)
        try:
            self._thread.start()
        except RuntimeError as error:
            # No more threads can be made, or the interpreter ends. The other ranks have continued by now.
            logger.warning("checkpoint %r is written in the foreground: %s", self.path, error)
            # What it would wait for, this thread takes; after an error of that it gives up.
            with contextlib.suppress(Exception):
                self._wait_in_main_thread()
            self._thread.run()

    @property
    def is_running(self) -> bool:
        """Local. Whether this rank's thread is at work; False in a child after a fork, which has none."""
        if self._main_thread is not None and self.is_own:
            self._main_thread.look()
        return self._process == os.getpid() and self._thread.is_alive()

    @property
    def is_own(self) -> bool:
        """Local. Whether this process has begun it; a child after a fork has not."""
        return self._process == os.getpid()

    def wait_until_written(self) -> Exception | None:
        """Local. Wait until this rank has written its share; return the error if it could not."""
        self._wait_in_main_thread()
        self._has_written.wait()
        return self.write_error

    def give_up(self) -> None:
        """Local. Let rank 0's thread wait for no more marks."""
        self._is_given_up.set()

    def join(self) -> None:
        """Local. Wait for the thread of this rank."""
        if self._thread.ident is not None and self.is_own:
            self._wait_in_main_thread()
            self._thread.join()

    def _wait_in_main_thread(self) -> None:
        if (main_thread := self._main_thread) is not None:
            try:
                main_thread.wait()
            except Exception:
                # The thread gives up by itself. An interrupt leaves it as it is.
                self._main_thread = None
                raise
            self._main_thread = None

    def finish(self) -> float:
        """Local. Wait for the thread of this rank; on rank 0 for the file's name.

        Returns:
            The time at which the file got its name; on other ranks than 0 a number without meaning.

        Raises:
            Exception: The error with which the save has failed on this rank.
        """
        self.join()
        self.forget()
        if self._error is not None:
            raise self._error
        return self._saved_at

    def await_name(self) -> None:
        """Local. Wait until the first rank has completed the file, or could not; for a minute at most."""
        end = time.monotonic() + _NAME_SECONDS
        if self._thread.ident is not None and self.is_own:
            self._thread.join(_NAME_SECONDS)
        # The first rank deletes the marks at last.
        mark = mark_of(self._blank.path, self._rank)
        while self._error is None and os.path.exists(mark) and time.monotonic() < end:
            if WATCH.lost(self._processes):
                return
            time.sleep(_LOOK_SECONDS)

    def forget(self) -> None:
        """Local. Do not report this save at the end of the program, and do not wait for it there."""
        self._note_written()
        with contextlib.suppress(ValueError):
            _NAMELESS.remove(self)

    def _note_written(self) -> None:
        with contextlib.suppress(ValueError):
            UNSEEN.remove(self)

    def clear(self) -> None:
        """Local. Delete what a failed save has left, on rank 0, when all ranks have written."""
        if self._rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(self._blank.path)
            remove_marks(self._blank.path, range(1, self._size))

    def _run(self, write: Callable[[], Checksums]) -> None:
        """Write, and leave a mark; on rank 0 complete the file."""
        try:
            if self._rank == 0:
                self._complete(write)
            else:
                self._take_part(write)
        # Whatever it is, the main thread raises it.
        except BaseException as error:
            known = error if isinstance(error, Exception) else CheckpointError(repr(error))
            # Its frames would keep the copy.
            self._error = known.with_traceback(None)
            if not self._has_written.is_set():
                self.write_error = self._error
            if self._rank == 0:
                self.clear()
        else:
            self._note_written()
        finally:
            if self._work.end is not None and self._rank == 0:
                self._work.end()
            self.seconds = time.monotonic() - self._begin
            self._has_written.set()

    def _take_part(self, write: Callable[[], Checksums]) -> None:
        try:
            mark = Mark(write())
        except Exception as error:
            with contextlib.suppress(OSError):
                text = f"{type(error).__name__}: {error}"
                leave_mark(self._blank.path, self._rank, Mark({}, f"rank {self._rank} (host {self._host}): {text}"))
            raise
        leave_mark(self._blank.path, self._rank, mark)

    def _complete(self, write: Callable[[], Checksums]) -> None:
        # It also syncs the structure of the file, which this rank has made.
        own = write()
        self._has_written.set()
        ranks = range(1, self._size)
        marks = wait_for_marks(self._blank.path, ranks, self._wait) if ranks else {}
        for mark in marks.values():
            if mark.error:
                raise CheckpointError(f"saving checkpoint {self.path!r} in the background failed on {mark.error}")
        everyone: list[Checksums] = [own, *(marks[rank].checksums for rank in ranks)]
        self._saved_at = publish(self._blank, everyone, self.path, self._work)
        remove_marks(self._blank.path, ranks)
        note("saved", path=self.path)

    def _wait(self, seconds: float) -> None:
        if self._is_given_up.wait(seconds):
            raise CheckpointError(f"checkpoint {self.path!r} was given up: another rank could not write its share")
        if WATCH.lost(self._processes):
            raise CheckpointError(
                f"checkpoint {self.path!r} was not completed: a rank died before it had written its share"
            )


# The saves of this process that are under way, or whose error no call has raised yet.
UNSEEN: list[BackgroundSave] = []
# Those of which this rank does not know yet that the file has its name.
_NAMELESS: list[BackgroundSave] = []


def wait_for_saves(directory: str) -> None:
    """Local. Wait until no save of this process in the background is under way in a directory.

    Args:
        directory: The directory. The threads work on it alone: two saves would overwrite each other's state file.
    """
    place = os.path.realpath(directory or os.curdir)
    for save in list(UNSEEN):
        if os.path.realpath(os.path.dirname(save.path) or os.curdir) == place:
            save.join()


def _finish_all() -> None:
    """Complete the running saves at the end of the program; errors are logged, since no call can raise them."""
    nameless = list(_NAMELESS)
    for save in list(UNSEEN):
        try:
            save.finish()
        except Exception as error:
            logger.error("checkpoint %r was not saved: %s", save.path, error)
    for save in nameless:
        # An exit code ends the job.
        save.await_name()


def _finish_soon() -> None:
    """Wait for the running saves before an error of this rank ends the job: threads of all ranks still write."""
    for save in list(_NAMELESS):
        save.await_name()


# A child has no thread of its parent.
os.register_at_fork(after_in_child=UNSEEN.clear)
os.register_at_fork(after_in_child=_NAMELESS.clear)
