"""Steps that no interrupt tears apart: on the chief KeyboardInterrupt comes between messages, never inside one."""

from __future__ import annotations

from threading import get_ident, main_thread
from types import TracebackType

from mpidist.comm.calls.order import CallOrder
from mpidist.errors import InterruptedCallError
from mpidist.failures.interrupts import INTERRUPTS


class Whole:
    """`with whole:` surrounds what is done to its end; one may stand in another. Threads of ours are not interrupted.

    Args:
        order: The order of calls that no other rank makes.
    """

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self._is_torn = False

    def __enter__(self) -> None:
        if get_ident() != main_thread().ident:
            return
        if self._is_torn:
            # A message may be lost, and who waits for what it asked for would never stop.
            raise InterruptedCallError(
                "a second interrupt has cut off a message between the chief and another rank, so the coordinator "
                "cannot continue. Restart the job: a program that saves checkpoints resumes from the last one"
            )
        self._order.during("a message of parameter servers")

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if get_ident() != main_thread().ident:
            return
        self._is_torn = self._is_torn or isinstance(error, KeyboardInterrupt)
        self._order.__exit__(kind, error, trace)
        if error is None and self._order.is_asked and not self._order.is_inside:
            # It came between two messages. No other rank raises it with this one.
            INTERRUPTS.deliver(is_own=True)
