"""Asynchronous reduction: it begins now, the program computes, and waits for the result later.

One thread of the library does the work, in the order of issue and on a communicator of its own. It hides communication
where a core is free for it, above all while a GPU computes: 79 to 85 % of it. Communication needs a core here as in a
blocking call: without a free core nothing is hidden, and a step takes 1 to 7 % longer than with blocking calls.
`MPI_Iallreduce` in chunks, with `Test` between pieces of computation, was slower than one after the other in every
case, and is not used. All numbers are of the fastest steps of `benchmarks/overlap.py`, whose records are in
`benchmarks/results/`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.collective import check_in_place, check_reducible
from mpidist.comm.cross_device.user_backend import UserBackend
from mpidist.comm.front.call_log import is_refusal
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communication_thread import Handle, communication_thread
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.errors import is_shared
from mpidist.options import CommunicationOptions, ReduceOp

logger = logging.getLogger("mpidist")

# The purpose of the communication thread's communicator: there is one for each communicator.
PURPOSE = "asynchronous reductions"


class AsyncCollective(Resource):
    """Reductions in the background; see `open_asynchronous`.

    Args:
        communicator: The ranks.
        collective: The collective that reduces over the same ranks; with a thread, on a communicator of its own.
        has_thread: Whether the process's communication thread does the work. Otherwise `wait` does it.

    Attributes:
        communicator: The ranks.
        has_thread: The constructor's argument.
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
            array: The array, of the same shape and dtype on every rank. The program must not change it before `wait`
                has returned, and, if `in_place`, must not read it either.
            op: See `Collective.all_reduce`.
            in_place: Whether to write the result into `array`, which must be C-contiguous. Not for `MEAN` of integers.

        Returns:
            A handle, on which every rank calls `wait`. A new array on a GPU is of the CUDA stream that is current now:
            its memory is used again after work of that stream. Its values are there when `wait` has returned.

        Raises:
            TypeError, ValueError: See `Collective.all_reduce`; raised at once.
            RuntimeError: This object is closed.
            DeadRankError: A rank has died.
        """
        if self.is_closed:
            raise RuntimeError("all_reduce_async: the strategy is closed. Call it before `close()`")
        self.communicator.require_whole("an asynchronous reduction")
        try:
            lent: AnyArray = array if type(array) is np.ndarray else arrays.lend(array)
            check_reducible(lent, op)
            if in_place:
                check_in_place(lent, op)
        except (TypeError, ValueError) as error:
            self.refuse(error)
            raise
        finish = (lambda _: array) if in_place else functools.partial(arrays.give_back, like=array)
        # The thread may detect late that ranks have begun different reductions: their next call shows it.
        if self.has_thread:
            self.communicator.order.sign("all_reduce_async", op, lent, self._collective.log.owner)
            if arrays.is_cupy(lent) and not in_place:
                # Made for this stream: what the thread makes is for its own, and the pool would give it to the next
                # result as soon as the program drops it, while kernels on this stream still read it.
                lent, in_place = _copied(lent, op), True
        # The work may be done on another CUDA stream, which does not wait for the kernels that fill the array.
        arrays.wait_for_device(lent)
        work = functools.partial(self._reduce, lent, op, in_place, finish)
        return self._put(Handle(op.name, work, self._finish))

    def refuse(self, error: Exception) -> None:
        """Collective. Refuse a reduction that others begin: they would wait for this rank until its program ends.

        Args:
            error: The error in this rank's arguments.
        """
        handle = Handle("refused", functools.partial(self._refuse, error), self._finish)
        # The program never gets it.
        handle.is_waited = True
        self._put(handle)
        if self.has_thread:
            # Other ranks do so at `wait`, where they get the error.
            self.communicator.order.mark = 0

    def _put(self, handle: Handle) -> Handle:
        if self.has_thread:
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
        """Complete the reductions that have begun, since other ranks wait for them."""
        if not is_collective:
            return
        if self.has_thread:
            communication_thread().wait_until_idle()
            # Without a thread it is the strategy's own.
            self._collective.close()
        while self._pending:
            self._pending.popleft().run()
        # `wait` has raised it: it holds the program's frames, and with them variables, which hold this strategy.
        self._error = None

    def _finish(self, handle: Handle) -> None:
        if self.has_thread:
            is_first = not handle.is_waited
            communication_thread().wait_for(handle)
            if is_first and is_shared(handle.error) and not isinstance(handle.error, OverflowError):
                self.communicator.order.restart()
            return
        while not handle.done():
            self._pending.popleft().run()

    def _reduce(
        self, lent: AnyArray, op: ReduceOp, in_place: bool, finish: Callable[[AnyArray], Any]
    ) -> tuple[Any, BaseException | None]:
        """Reduce, unless an earlier reduction has failed. Returns the result and the first error so far.

        Integers that do not fit are an error of this reduction alone, and so is what another rank refuses: every rank
        has an error, and nothing is in the middle.
        """
        result = None
        if self._error is None:
            try:
                if self.has_thread:
                    arrays.use_device(arrays.device_index(lent))
                self._collective.log.meet("all_reduce", op, lent)
                total = self._collective.all_reduce(lent, op, in_place=in_place)
                arrays.wait_for_device(total)
                result = finish(total)
            # `wait` raises it. Raised here it would end the thread, and every later `wait` would hang.
            except BaseException as error:
                if is_shared(error) and (isinstance(error, OverflowError) or is_refusal(error)):
                    return None, error
                self._error = error
        return result, self._error

    def _refuse(self, error: Exception) -> tuple[Any, BaseException | None]:
        """Show the other ranks that this one refuses the reduction, and why. Returns the first error so far."""
        if self._error is not None:
            return None, self._error
        try:
            self._collective.log.refuse("all_reduce", error)
        except BaseException as caught:
            # The program has got the error. Other ranks are notified, or refuse alike.
            self._error = None if caught is error or (is_shared(caught) and is_refusal(caught)) else caught
        return None, self._error

    def __repr__(self) -> str:
        return f"AsyncCollective({self._collective!r}, has_thread={self.has_thread})"


def _copied(array: AnyArray, op: ReduceOp) -> AnyArray:
    """A copy of an array on a GPU that can take the result of a reduction."""
    is_wider = op is ReduceOp.MEAN and array.dtype.kind in "iu"
    return array.astype(np.dtype(np.float64) if is_wider else array.dtype, order="C")


def open_asynchronous(collective: CollectiveFront, options: CommunicationOptions | None = None) -> AsyncCollective:
    """Collective. Open reductions in the background, over the ranks of `collective` and independent of its calls.

    Args:
        collective: The collective of these ranks.
        options: The options of the collective.

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
    sibling = communicator.open_sibling(PURPOSE)
    own = selection.choose(sibling, options or CommunicationOptions(), collective.log.owner)
    return AsyncCollective(communicator, own, has_thread=True)


def _why_no_thread(collective: CollectiveFront) -> str | None:
    """The reason for doing without the communication thread, None if there is none; the same on every rank."""
    if isinstance(collective.backend, UserBackend):
        return f"{collective.backend!r} has its own way of communicating, which two threads cannot share"
    mpi: Any = importlib.import_module("mpidist.comm.group.mpi_communicator").MPI
    if collective.communicator.all_reduce_max(int(mpi.Query_thread() < mpi.THREAD_MULTIPLE)):
        # Below this level two threads must not be in MPI at once (MPI 4.1, section 11.6).
        return "MPI was started without THREAD_MULTIPLE, by the program or by mpi4py.rc.thread_level"
    return None
