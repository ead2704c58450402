"""Asynchronous reduction: begun now, waited for later, while the program computes.

One thread of our own does the work, in the order of issue, on a communicator of its own. It hides communication where
a core is free for it, above all while a GPU computes; it needs a core as a blocking call does, and without a free one
nothing is hidden: a step took 1 to 7 % longer than one after the other (fastest rounds).

Measured by `benchmarks/overlap.py` (records in `benchmarks/results/`), 2 ranks on 2 cores without other load, 8 buckets
of 4 MB, fastest step in milliseconds: computation; communication alone; one after the other; thread; `MPI_Iallreduce`
in chunks with Test between pieces of computation.

- Short NumPy calls on all cores. MPICH 5.0.2, MPI: 6.2; 7.0; 12.9; 13.3; 20.1. AUTO: 6.2; 3.8; 9.4; 9.7.
  Open MPI 5.0.11, MPI: 5.1; 4.6; 9.7; 9.8; 19.5. AUTO: 5.1; 2.9; 8.1; 8.2.
- Cores idle, as while a GPU computes. MPICH, MPI: 8.7; 8.2; 17.0; 9.9; 25.1. AUTO: 8.7; 3.8; 12.5; 9.5.
  Open MPI, MPI: 4.7; 4.6; 9.0; 5.4; 18.6. AUTO: 4.7; 3.0; 7.6; 5.2. The thread hides 79 to 85 % of the communication.

`MPI_Iallreduce` was slower than one after the other in all of these, and is not used.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpidist import arrays
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective, check_in_place, check_reducible
from mpidist.comm.communicator import Communicator
from mpidist.comm.cross_device.user_backend import UserBackend
from mpidist.comm.ending import FORWARD_SECONDS
from mpidist.comm.front.front import CollectiveFront
from mpidist.options import CommunicationOptions, ReduceOp

logger = logging.getLogger("mpidist")

# At the program's end the thread may go on for as long as something gets done; after so long without, the ranks have
# taken different ways.
STALLED_SECONDS = 30.0


class Handle:
    """A reduction that has begun; `AsyncCollective.all_reduce_async` makes it.

    Args:
        name: The operation, for `repr`.
        reduce: Does the work, raises nothing, and returns the result and the error, one of which is None.
        finish: Called by `wait` with this handle; returns when `run` has ended.

    Attributes:
        is_waited: Whether `wait` was called.
    """

    __slots__ = ("_error", "_finish", "_is_done", "_name", "_reduce", "_result", "is_waited")

    def __init__(
        self, name: str, reduce: Callable[[], tuple[Any, BaseException | None]], finish: Callable[[Handle], None]
    ) -> None:
        self.is_waited = False
        self._name = name
        self._reduce = reduce
        self._finish = finish
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_done = False

    def run(self) -> None:
        """Collective. Do the work: called once, by the thread that communicates; `wait` returns or raises the rest."""
        self._result, self._error = self._reduce()
        # Last: another thread may look at it, and then takes the result without a lock.
        self._is_done = True

    def done(self) -> bool:
        """Local. Whether `wait` returns, or raises, at once. Without a thread it becomes true in `wait` only."""
        return self._is_done

    def wait(self) -> Any:
        """Collective. Return when the reduction is done; any number of times, in any order.

        Returns:
            The array given if `in_place`, else a new one.

        Raises:
            Exception: That of this reduction or of an earlier one: after a failure nothing more is done.
        """
        self._finish(self)
        if self._error is not None:
            raise self._error
        return self._result

    def __repr__(self) -> str:
        return f"<Handle of {self._name}, {'done' if self._is_done else 'under way'}>"


class AsyncCollective:
    """Reductions in the background; see `open_asynchronous`.

    Args:
        communicator: The ranks.
        collective: Over the same ranks; with a thread on a communicator that nobody else uses.
        has_thread: Whether the process's communication thread does the work. Else `wait` does it.

    Attributes:
        communicator: The ranks.
        has_thread: As given.
    """

    def __init__(self, communicator: Communicator, collective: Collective, *, has_thread: bool) -> None:
        self.communicator = communicator
        self.has_thread = has_thread
        self._collective = collective
        self._error: BaseException | None = None
        self._pending: deque[Handle] = deque()

    def all_reduce_async(self, array: Any, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = True) -> Handle:
        """Collective. Begin to combine the arrays of all ranks; any number may be under way.

        Args:
            array: Same shape and dtype on every rank. Until `wait` has returned it must not be changed, nor read if
                `in_place`.
            op: As for `Collective.all_reduce`.
            in_place: Write the result into `array`, which must be C-contiguous; not for `MEAN` of integers.

        Returns:
            A handle, on which every rank calls `wait`.

        Raises:
            TypeError, ValueError: As `Collective.all_reduce`, at once.
        """
        lent = arrays.lend(array)
        check_reducible(lent, op)
        if in_place:
            check_in_place(lent, op)
        handle = Handle(op.name, functools.partial(self._reduce, array, op, in_place), self._finish)
        if self.has_thread:
            # The thread has a stream of its own, which knows nothing of what fills the array.
            arrays.wait_for_device(lent)
            communication_thread().put(handle)
        else:
            self._pending.append(handle)
        return handle

    def _finish(self, handle: Handle) -> None:
        if self.has_thread:
            communication_thread().wait_for(handle)
            return
        while not handle.done():
            self._pending.popleft().run()

    def _reduce(self, array: Any, op: ReduceOp, in_place: bool) -> tuple[Any, BaseException | None]:
        """Reduce, unless an earlier reduction has failed: the result, and the first error of all."""
        result = None
        if self._error is None:
            try:
                result = self._collective.all_reduce(array, op, in_place=in_place)
                arrays.wait_for_device(result)
            # Whatever it is, `wait` raises it: here it would end the thread, and every later `wait` would hang.
            except BaseException as error:
                self._error = error
        return result, self._error

    def __repr__(self) -> str:
        return f"AsyncCollective({self._collective!r}, has_thread={self.has_thread})"


class CommunicationThread:
    """The one thread beside the program's that calls MPI. It lives until the program's end.

    Local. It is ended in order there: what was begun is finished first, since other ranks may wait for it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._done_count = 0
        self._begun_count = 0
        self._waited_count = 0
        self._process = os.getpid()
        # A daemon: the interpreter's end must not wait for it before the hook below has had its say.
        self._thread = threading.Thread(target=self._work, name="mpidist-communication", daemon=True)
        self._thread.start()
        # Registered after the hook by which the ranks leave together, and so called before it.
        atexit.register(self._end)

    def put(self, handle: Handle) -> None:
        """Local. Hand over a reduction."""
        self._begun_count += 1
        self._queue.put(handle)

    def wait_for(self, handle: Handle) -> None:
        """Local. Return when a reduction is done."""
        if not handle.is_waited:
            handle.is_waited = True
            self._waited_count += 1
        if not handle.done():
            with self._changed:
                self._changed.wait_for(handle.done)

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle.run()
            with self._changed:
                self._done_count += 1
                self._changed.notify_all()

    def _end(self) -> None:
        mpi: Any = importlib.import_module("mpidist.comm.mpi_communicator").MPI
        # A forked child has no such thread; and a program that has finalized MPI itself has ended all of this.
        if os.getpid() != self._process or mpi.Is_finalized():
            return
        left = self._begun_count - self._waited_count
        place = f"rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}"
        if left:
            logger.warning(
                "%s comes to its end, and %d of %d asynchronous reductions were not waited for: their results were "
                "lost, and so were errors. Call `wait()` on every handle", place, left, self._begun_count,
            )
        self._queue.put(None)
        seen, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self._done_count != seen:
                seen, since = self._done_count, time.monotonic()
            elif time.monotonic() - since > STALLED_SECONDS:
                # A thread inside MPI cannot be ended, nor can MPI be left while it is there.
                os.write(
                    2,
                    f"mpidist: {place} comes to its end, and its asynchronous reduction number {seen + 1} has waited "
                    f"{STALLED_SECONDS:g} s for other ranks, which made fewer of them; the job ends\n".encode(),
                )
                # Hydra was seen to drop what a rank wrote just before it aborted.
                time.sleep(FORWARD_SECONDS)
                mpi.COMM_WORLD.Abort(1)


@functools.cache
def communication_thread() -> CommunicationThread:
    """Local. The process's communication thread, started at the first call."""
    return CommunicationThread()


def open_asynchronous(collective: CollectiveFront, options: CommunicationOptions | None = None) -> AsyncCollective:
    """Collective. What reduces in the background, over the ranks of `collective` and beside it.

    Args:
        collective: Over the ranks.
        options: Its options.

    Returns:
        With a thread, a communicator and a backend of its own; without a thread where MPI allows calls of one thread
        only, or where `collective` is not one of the library's: it is then used itself, by `wait`. One warning says
        so.
    """
    communicator = collective.communicator
    if communicator.size == 1:
        return AsyncCollective(communicator, collective, has_thread=False)
    reason = _why_no_thread(collective)
    if reason is not None:
        if communicator.rank == 0:
            logger.warning("asynchronous reductions are done when they are waited for, since %s", reason)
        return AsyncCollective(communicator, collective, has_thread=False)
    own = selection.choose(communicator.split(0, communicator.rank), options or CommunicationOptions())
    return AsyncCollective(communicator, own, has_thread=True)


def _why_no_thread(collective: CollectiveFront) -> str | None:
    """The same on every rank."""
    if isinstance(collective.backend, UserBackend):
        return f"{collective.backend!r} has its own way of communicating, which two threads cannot share"
    mpi: Any = importlib.import_module("mpidist.comm.mpi_communicator").MPI
    if collective.communicator.all_reduce_max(int(mpi.Query_thread() < mpi.THREAD_MULTIPLE)):
        return "MPI was started without THREAD_MULTIPLE, by the program or by mpi4py.rc.thread_level"
    return None
