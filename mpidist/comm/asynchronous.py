"""Asynchronous reduction: it begins now, the program computes, and waits for the result later.

One thread of the library does the work, in the order of issue and on a communicator of its own. It hides communication
where a core is free for it, above all while a GPU computes. Communication needs a core here as in a blocking call:
without a free core nothing is hidden, and a step took 1 to 7 % longer than with blocking calls (fastest rounds).

Measured by `benchmarks/overlap.py` (records in `benchmarks/results/`): 2 ranks on 2 cores without other load, 8 buckets
of 4 MB. The numbers are milliseconds of the fastest step: computation; communication alone; one after the other; with
the thread; with `MPI_Iallreduce` in chunks and `Test` between pieces of computation.

- All cores busy with short NumPy calls. MPICH 5.0.2, MPI: 6.2; 7.0; 12.9; 13.3; 20.1. AUTO: 6.2; 3.8; 9.4; 9.7.
  Open MPI 5.0.11, MPI: 5.1; 4.6; 9.7; 9.8; 19.5. AUTO: 5.1; 2.9; 8.1; 8.2.
- Cores idle, as while a GPU computes. MPICH, MPI: 8.7; 8.2; 17.0; 9.9; 25.1. AUTO: 8.7; 3.8; 12.5; 9.5.
  Open MPI, MPI: 4.7; 4.6; 9.0; 5.4; 18.6. AUTO: 4.7; 3.0; 7.6; 5.2. The thread hides 79 to 85 % of the communication.

`MPI_Iallreduce` was slower than one after the other in every case, and is not used.
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
from mpidist.comm.collective import check_in_place, check_reducible
from mpidist.comm.communicator import Communicator
from mpidist.comm.cross_device.user_backend import UserBackend
from mpidist.comm.deaths import WATCH
from mpidist.comm.ending import FORWARD_SECONDS
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.resource import Resource
from mpidist.options import CommunicationOptions, ReduceOp

logger = logging.getLogger("mpidist")

# Of the communicator on which the communication thread works: one beside each communicator.
PURPOSE = "asynchronous reductions"

# At the program's end the thread may go on as long as reductions are completed. If none is for this time, the ranks
# have begun different numbers of them, and the job ends.
STALLED_SECONDS = 30.0


class Handle:
    """A reduction that has begun; `AsyncCollective.all_reduce_async` makes it.

    Args:
        name: The operation, for `repr`.
        reduce: Does the work and raises nothing. Returns the result and None, or an error that `wait` is to raise.
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
        """Collective. Do the work and keep its result or its error for `wait`. Called once; raises nothing."""
        self._result, self._error = self._reduce()
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
            Exception: The error of this reduction or of an earlier one: after a failure no further reduction is made.
        """
        self._finish(self)
        if self._error is not None:
            raise self._error
        return self._result

    def __repr__(self) -> str:
        return f"<Handle of {self._name}, {'done' if self._is_done else 'in progress'}>"


class AsyncCollective(Resource):
    """Reductions in the background; see `open_asynchronous`.

    Args:
        communicator: The ranks.
        collective: Reduces over the same ranks; with a thread, on a communicator that nobody else uses.
        has_thread: Whether the process's communication thread does the work. Otherwise `wait` does it.

    Attributes:
        communicator: The ranks.
        has_thread: As given.
    """

    def __init__(self, communicator: Communicator, collective: CollectiveFront, *, has_thread: bool) -> None:
        self.communicator = communicator
        self.has_thread = has_thread
        self._collective = collective
        self._error: BaseException | None = None
        self._pending: deque[Handle] = deque()

    def all_reduce_async(self, array: Any, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = True) -> Handle:
        """Collective. Begin to combine the arrays of all ranks. Any number of reductions may be in progress.

        Args:
            array: Same shape and dtype on every rank. The program must not change it before `wait` has returned, and,
                if `in_place`, must not read it either.
            op: As for `Collective.all_reduce`.
            in_place: Write the result into `array`, which must be C-contiguous. Not for `MEAN` of integers.

        Returns:
            A handle, on which every rank calls `wait`.

        Raises:
            TypeError, ValueError: As `Collective.all_reduce`, at once.
            RuntimeError: It is closed.
            DeadRankError: A rank has died.
        """
        if self.is_closed:
            raise RuntimeError("all_reduce_async: the strategy is closed. Call it before `close()`")
        self.communicator.require_whole("an asynchronous reduction")
        lent = arrays.lend(array)
        check_reducible(lent, op)
        if in_place:
            check_in_place(lent, op)
        handle = Handle(op.name, functools.partial(self._reduce, array, op, in_place), self._finish)
        if self.has_thread:
            # The thread has a current CUDA stream of its own, which does not wait for the kernels that fill the array.
            arrays.wait_for_device(lent)
            # Reductions of all AsyncCollective objects pass through one queue, in the order in which the program
            # begins them. Ranks must begin them in one order: MPI matches collective calls on a communicator by their
            # order (MPI 4.1, section 6.14), and two communicators served in different orders would wait for each other.
            communication_thread().put(handle)
        else:
            self._pending.append(handle)
        return handle

    def _is_whole(self) -> bool:
        return self.communicator.is_whole()

    def _end(self, *, is_collective: bool) -> None:
        """Complete what has begun, since other ranks wait for it."""
        if not is_collective:
            return
        if self.has_thread:
            communication_thread().wait_until_idle()
            # Without a thread it is the strategy's own.
            self._collective.close()
        while self._pending:
            self._pending.popleft().run()

    def _finish(self, handle: Handle) -> None:
        if self.has_thread:
            communication_thread().wait_for(handle)
            return
        while not handle.done():
            self._pending.popleft().run()

    def _reduce(self, array: Any, op: ReduceOp, in_place: bool) -> tuple[Any, BaseException | None]:
        """Reduce, unless an earlier reduction has failed. Returns the result and the first error so far."""
        result = None
        if self._error is None:
            try:
                result = self._collective.all_reduce(array, op, in_place=in_place)
                arrays.wait_for_device(result)
            # `wait` raises it. Raised here it would end the thread, and every later `wait` would hang.
            except BaseException as error:
                self._error = error
        return result, self._error

    def __repr__(self) -> str:
        return f"AsyncCollective({self._collective!r}, has_thread={self.has_thread})"


class CommunicationThread:
    """The only thread beside the program's own that calls MPI. It lives until the program ends.

    Local. At the program's end it first completes all reductions that have begun, since other ranks may wait for them.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
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
        self._queue.put(handle)

    def wait_for(self, handle: Handle) -> None:
        """Local. Return when a reduction is done. Called by the program's thread only."""
        if not handle.is_waited:
            handle.is_waited = True
            self._waited_count += 1
        if not handle.done():
            with self._changed:
                self._changed.wait_for(handle.done)

    def wait_until_idle(self) -> None:
        """Collective. Return when all reductions that have begun are done. Called by the program's thread only."""
        with self._changed:
            self._changed.wait_for(lambda: self._done_count == self._begun_count)

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle.run()
            # It refers to its collective, which nobody else may need while this thread waits for the next one.
            del handle
            with self._changed:
                self._done_count += 1
                self._changed.notify_all()

    def _end(self) -> None:
        mpi: Any = importlib.import_module("mpidist.comm.mpi_communicator").MPI
        # A forked child inherits the hook but not the thread. A program that has finalized MPI itself needs none.
        if os.getpid() != self._process or mpi.Is_finalized():
            return
        left = self._begun_count - self._waited_count
        place = f"rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}"
        if left:
            logger.warning(
                "%s comes to its end, and %d of %d asynchronous reductions were not waited for: their results and "
                "errors are lost. Call `wait()` on every handle", place, left, self._begun_count,
            )
        self._queue.put(None)
        seen, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if WATCH.dead:
                # The thread may wait for the dead rank for ever, and nobody waits for the results any more.
                return
            if self._done_count != seen:
                seen, since = self._done_count, time.monotonic()
            elif time.monotonic() - since > STALLED_SECONDS:
                # A thread inside MPI cannot be stopped, and MPI must not be finalized while it is there (MPI 4.1,
                # section 11.2.2: all communication must be complete).
                os.write(
                    2,
                    f"mpidist: {place} comes to its end, and its asynchronous reduction number {seen + 1} has waited "
                    f"{STALLED_SECONDS:g} s for other ranks, which began fewer of them; the job ends\n".encode(),
                )
                # MPICH's launcher Hydra was seen to drop output written just before an abort.
                time.sleep(FORWARD_SECONDS)
                mpi.COMM_WORLD.Abort(1)


@functools.cache
def communication_thread() -> CommunicationThread:
    """Local. The process's communication thread, started at the first call."""
    return CommunicationThread()


def open_asynchronous(collective: CollectiveFront, options: CommunicationOptions | None = None) -> AsyncCollective:
    """Collective. Open reductions in the background, over the ranks of `collective` and independent of its calls.

    Args:
        collective: The collective of these ranks.
        options: Its options.

    Returns:
        An object with a thread, a communicator and a backend of its own. Where MPI allows calls from one thread only,
        or `collective` reduces in the user's own way, there is no thread: `wait` then uses `collective` itself. One
        warning says so.
    """
    communicator = collective.communicator
    if communicator.size == 1:
        return AsyncCollective(communicator, collective, has_thread=False)
    reason = _why_no_thread(collective)
    if reason is not None:
        if communicator.rank == 0:
            logger.warning("asynchronous reductions are done when they are waited for, because %s", reason)
        return AsyncCollective(communicator, collective, has_thread=False)
    # The thread must not be in a call on that communicator while this one creates something on it.
    communication_thread().wait_until_idle()
    own = selection.choose(communicator.open_sibling(PURPOSE), options or CommunicationOptions())
    return AsyncCollective(communicator, own, has_thread=True)


def _why_no_thread(collective: CollectiveFront) -> str | None:
    """The reason for doing without the communication thread, None if there is none; the same on every rank."""
    if isinstance(collective.backend, UserBackend):
        return f"{collective.backend!r} has its own way of communicating, which two threads cannot share"
    mpi: Any = importlib.import_module("mpidist.comm.mpi_communicator").MPI
    if collective.communicator.all_reduce_max(int(mpi.Query_thread() < mpi.THREAD_MULTIPLE)):
        # Below this level two threads must not be in MPI at once (MPI 4.1, section 11.6).
        return "MPI was started without THREAD_MULTIPLE, by the program or by mpi4py.rc.thread_level"
    return None
