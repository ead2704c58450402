"""The communication thread, which calls MPI beside the program's own, and the reductions that it is given."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mpidist.failures.deaths import WATCH
from mpidist.failures.ending import FORWARD_SECONDS

logger = logging.getLogger("mpidist")

# At the program's end the thread may continue as long as reductions are completed. If none is for this time, the ranks
# have begun different numbers of them, and the job ends.
STALLED_SECONDS = 30.0


class Handle:
    """A reduction that has begun; `AsyncCollective.all_reduce_async` makes it.

    Args:
        name: The operation, for `repr`.
        reduce: A function that does the work and raises nothing. It returns the result and None, or an error that
            `wait` is to raise.
        finish: A function of this handle, called by `wait`; it returns when `run` has ended.

    Attributes:
        is_waited: Whether `wait` was called.
        error: The error that `wait` raises; None before it is done.
    """

    __slots__ = ("_finish", "_is_done", "_name", "_reduce", "_result", "error", "is_waited")

    def __init__(
        self, name: str, reduce: Callable[[], tuple[Any, BaseException | None]], finish: Callable[[Handle], None]
    ) -> None:
        self.is_waited = False
        self._name = name
        self._reduce = reduce
        self._finish = finish
        self._result: Any = None
        self.error: BaseException | None = None
        self._is_done = False

    def run(self) -> None:
        """Collective. Do the work and keep its result or its error for `wait`. Called once; raises nothing."""
        self._result, self.error = self._reduce()
        # Set last: `wait` in another thread reads this flag without a lock, and then the result.
        self._is_done = True

    def done(self) -> bool:
        """Local. Whether `wait` would return or raise at once. Without a thread only `wait` makes it true."""
        return self._is_done

    def wait(self) -> Any:
        """Collective. Return when the reduction is done. May be called any number of times and in any order.

        Returns:
            The given array if `in_place`, otherwise a new one.

        Raises:
            OverflowError: A sum or product of integers does not fit its dtype; on every rank. The array of a reduction
                in place is then undefined, and further reductions are made.
            Exception: The error of this reduction or of an earlier one: after a failure no further reduction is made.
        """
        self._finish(self)
        if self.error is not None:
            raise self.error
        return self._result

    def __repr__(self) -> str:
        return f"<Handle of {self._name}, {'done' if self._is_done else 'in progress'}>"


class CommunicationThread:
    """The only thread beside the program's own that calls MPI. It lives until the program ends.

    Local. At the program's end it first completes all reductions that have begun, since other ranks may wait for them.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        # The program's thread waits for it. The thread of this object alone changes `_done_count`, the program's thread
        # the other two counts.
        self._changed = threading.Condition()
        self._done_count = 0
        self._begun_count = 0
        self._waited_count = 0
        self._process = os.getpid()
        # A daemon: otherwise the interpreter would join it before `atexit` runs, and `_end` could never end it.
        self._thread = threading.Thread(target=self._work, name="mpidist-communication", daemon=True)
        self._thread.start()
        # Hooks run in reverse order of registration. The hook of `ending`, by which ranks leave together, was
        # registered when the communicator was opened, and so it runs after this one.
        atexit.register(self._end)

    def put(self, handle: Handle) -> None:
        """Local. Hand over a reduction. Called by the program's thread only."""
        self._begun_count += 1
        self._waited_count += handle.is_waited
        self._queue.put(handle)

    def wait_for(self, handle: Handle) -> None:
        """Local. Return when a reduction is done. Called by the program's thread only."""
        if not handle.is_waited:
            handle.is_waited = True
            self._waited_count += 1
        if not handle.done():
            if os.getpid() != self._process:
                raise RuntimeError(
                    "`wait` in a process that was forked after the reduction began: only its parent gets the result"
                )
            with self._changed:
                self._changed.wait_for(handle.done)

    def wait_until_idle(self) -> None:
        """Collective. Return when all reductions that have begun are done. Called by the program's thread only."""
        with self._changed:
            self._changed.wait_for(lambda: self._done_count == self._begun_count)

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle.run()
            # It refers to its collective, which may be unused while this thread waits for the next one.
            del handle
            with self._changed:
                self._done_count += 1
                self._changed.notify_all()

    def _end(self) -> None:
        mpi: Any = importlib.import_module("mpidist.comm.group.mpi_communicator").MPI
        # A forked child inherits the hook but not the thread. A program that has finalized MPI itself needs none.
        if os.getpid() != self._process or mpi.Is_finalized():
            return
        left = self._begun_count - self._waited_count
        place = f"rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}"
        if left:
            logger.warning(
                "%s exits, but %d of %d asynchronous reductions were not waited for: their results and "
                "errors are lost. Call `wait()` on every handle", place, left, self._begun_count,
            )
        self._queue.put(None)
        seen, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if WATCH.dead:
                # The thread may wait for the dead rank without end, and no rank waits for the results any more.
                return
            if self._done_count != seen:
                seen, since = self._done_count, time.monotonic()
            elif time.monotonic() - since > STALLED_SECONDS:
                # A thread inside MPI cannot be stopped, and MPI must not be finalized while it is there (MPI 4.1,
                # section 11.2.2: all communication must be complete).
                os.write(
                    2,
                    f"mpidist: {place} exits, but its asynchronous reduction number {seen + 1} has waited "
                    f"{STALLED_SECONDS:g} s for other ranks, which started fewer of them; the job ends\n".encode(),
                )
                # MPICH's launcher Hydra was seen to drop output written just before an abort.
                time.sleep(FORWARD_SECONDS)
                mpi.COMM_WORLD.Abort(1)


@functools.cache
def communication_thread() -> CommunicationThread:
    """Local. The process's communication thread, started at the first call."""
    return CommunicationThread()
