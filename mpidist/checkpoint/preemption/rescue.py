"""Rescue: an exception that comes on a rank after a notice of the job's end does not lose the last checkpoint.

The notice itself may be the cause: what reaches a rank reaches its children too, and a loader raises whose workers have
died. The others are then in the next step, or about to begin it, and wait in a call that the failed one never makes.
It calls them out of it, before they have changed anything; all go back to the end of the last step that was complete
on all of them, and save that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.preemption.calling_out import CallingOut, Counts
from mpidist.checkpoint.preemption.exchange import Exchange
from mpidist.checkpoint.walk.states import GeneratorState, Stateful
from mpidist.cluster.signals import SIGNALS, Notice
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MpidistError, RankError
from mpidist.failures.deaths import WATCH
from mpidist.failures.watchdog import WATCHDOG
from mpidist.recorder.calls import CODES, NEXT, may_have_one_name

# The signal that has ended a child may reach this rank this much later.
NOTICE_SECONDS = 1.0
# Ranks leave their waits, or end their step, within this time, or within this many of the longest steps.
PATIENCE_SECONDS, PATIENCE_STEPS = 10.0, 5
_LOOK_SECONDS = 0.01
_WATCH_SECONDS = 0.25
# By `Rescue.count`.
_FIRST_STEP = 2

logger = logging.getLogger("mpidist")


class StuckError(RuntimeError):
    """After a notice of the job's end the program did not reach its next step, and the time is nearly over."""


class Facts(NamedTuple):
    """The facts that ranks exchange after they have been called out.

    Attributes:
        steps: The complete steps.
        exchanges: The number of exchanges of notices that the rank has made.
        reason: Its notice; 0 if it has none.
        counts: The counts of its communicators, by their identities.
    """

    steps: int
    exchanges: int
    reason: int
    counts: dict[Hashable, Counts]


class LightStates:
    """The states of iterators and random generators, as they were after the last complete step: a few microseconds.

    Other objects change in calls of all ranks only, or with the variables that they are made of.

    Args:
        checkpoint: The checkpoint that holds the objects.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._attributes: tuple[int, ...] = ()
        self._objects: list[Stateful] = []
        self._kept: list[tuple[Stateful, Any]] = []
        self._steps = -1

    def keep(self, steps: int) -> None:
        """Local. Keep the states as they are.

        Args:
            steps: The number of complete steps.
        """
        # Another iterator for each pass, say.
        attributes = tuple(map(id, vars(self._checkpoint).values()))
        if attributes != self._attributes:
            self._attributes = attributes
            # What cannot be saved is an error of the save, and not of a step.
            self._objects = []
            with contextlib.suppress(ValueError, MpidistError):
                self._objects = [one for one in self._checkpoint.find_objects().states.values() if _is_light(one)]
        self._kept = []
        for one in self._objects:
            with contextlib.suppress(Exception):
                self._kept.append((one, one.raw() if isinstance(one, GeneratorState) else one.state()))
        self._steps = steps

    def go_back(self, steps: int) -> None:
        """Local. Restore the objects to the end of a number of steps, if that state was kept."""
        if steps != self._steps:
            return
        for one, state in self._kept:
            if isinstance(one, GeneratorState):
                one.put_back(state)
            else:
                one.load_state(state)


def _is_light(state: Stateful) -> bool:
    return isinstance(state, GeneratorState) or type(state).__module__.startswith("mpidist.data.")


class Handler(Protocol):
    """The part of a handler that a rescue uses."""

    def look_again(self, steps: int) -> None:
        """Collective. Check for a notice as a step does, `steps` steps after the last one counted here."""
        ...

    def patience_seconds(self) -> float:
        """Local. The seconds that a step, and the work after it, may take after a notice."""
        ...

    def end_after(self, steps: int, reason: int) -> None:
        """Collective. Save the state after a number of steps, and end the program."""
        ...


class Rescue:
    """Local. Saves the last checkpoint after an exception, for one handler.

    Args:
        checkpoint: The checkpoint or manager that saves.
        group: The ranks that save together.
        sibling: A communicator of the same ranks, without pending messages.
        notice: The notice of this rank.
        exchange: The exchange of notices.
        handler: The handler of these steps.

    Attributes:
        complete: The number of complete steps.
        has_failed: Whether this rank makes no further step.
        is_between: Whether the last step has returned, and all its calls were made, and the next has not begun.
        is_inside: Whether a step has begun, and has not returned.
        count: The number of steps in this program; the beginning counts as one.
    """

    def __init__(
        self, checkpoint: Checkpoint, group: Communicator, sibling: Communicator, notice: Notice, exchange: Exchange,
        handler: Handler,
    ) -> None:
        self._states = LightStates(checkpoint)
        self._calling = CallingOut(group, sibling)
        self._group = group
        self._sibling = sibling
        self._notice = notice
        self._exchange = exchange
        # The hook must keep nothing alive: a handler that the program drops gets no more calls.
        self._handler = weakref.ref(handler)
        self._process = os.getpid()
        self.complete = 0
        self.has_failed = self.is_between = self.is_inside = False
        self.count = 0
        self._is_on = self._is_under_way = False
        self._hook: Callable[..., object] | None = None
        _rescues.add(self)

    def begin(self, complete: int, *, watches: bool) -> None:
        """Local. Be ready from now on.

        Args:
            complete: The number of steps that are complete.
            watches: Whether a program that reaches no further step after a notice gets an error.
        """
        self._is_on = True
        self.note_step(complete)
        self._previous_hook = sys.excepthook
        self._hook = sys.excepthook = functools.partial(_on_exception, weakref.ref(self), sys.excepthook)
        if watches:
            self._notice.on_first = self._watch

    def close(self) -> None:
        """Local. Rescue nothing any more."""
        self._is_on = False
        self._group.order.listen(None)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook

    def note_step(self, complete: int) -> None:
        """Local. Note that a step is complete.

        Args:
            complete: The number of complete steps.
        """
        self.complete = complete
        self.count += 1
        if self._is_on:
            self._states.keep(complete)
        # Not before a step of its own: a program may make a handler and drop the one that it had before.
        others = self._others() if self.count == _FIRST_STEP and self._group.rank == 0 else []
        if any(one.count >= _FIRST_STEP for one in others):
            logger.warning(
                "this program has several PreemptionCheckpointHandlers over the same ranks: the first one that is "
                "notified of the job's end saves only its own checkpoint and ends the program. Put all that is trained "
                "into one checkpoint, and `close` a handler that is no longer needed"
            )

    def _others(self) -> list[Rescue]:
        """The rescues of the program's other handlers over the same ranks."""
        return [one for one in _rescues if one is not self and one.is_over(self._group)]

    def is_over(self, group: Communicator) -> bool:
        """Local. Whether there is still a handler, and these are its ranks."""
        return self._is_on and self._handler() is not None and self._group.order is group.order

    def go_back(self, steps: int) -> None:
        """Local. Restore light objects to the end of a number of steps, if they are further on this rank."""
        self._states.go_back(steps)

    def look(self) -> None:
        """Local. Leave the calls before the next step, if another rank does not make that step.

        Raises:
            RankError: Another rank has failed, and calls the others; on every rank.
            SystemExit: The ranks have saved together.
        """
        if not self._is_on or self._is_under_way:
            return
        try:
            self._calling.look()
        except RankError as error:
            # The rank that called may have taken it back, since another one saves already. This rank was in no call,
            # and joins them; with the error they would wait for it in the save.
            if self.after(error, waits=False):
                raise

    def after(self, error: BaseException, *, waits: bool) -> bool:
        """Collective, where the ranks can meet. Save the last step that all have made, and end the program.

        It returns where there is nothing to do: no notice has come, or the ranks cannot meet any more.

        Args:
            error: The exception that has ended the step here.
            waits: Whether the notice may still arrive: the error has left the program, which would end.

        Returns:
            False where no notice says that the job is about to end, and no rank calls out the others.
        """
        handler = self._handler()
        is_own = self._is_on and not self._is_under_way and os.getpid() == self._process
        if not is_own or not isinstance(error, Exception) or handler is None:
            return True
        # Ranks would leave steps of different handlers, and each wait for the others in its own.
        if self._group.size > 1 and self._others():
            return True
        self._is_under_way = True
        try:
            if not self._knows_notice(NOTICE_SECONDS if waits else 0.0):
                return False
            # On servers the training continues without a dead worker.
            if self._group.order.broken or (WATCH.dead and self._group.size > 1):
                return True
            is_called = self._calling.is_called
            if not is_called:
                self._tell(error)
            if self._group.size == 1:
                handler.end_after(self.complete, self._notice.reason)
            elif self.is_between and not is_called:
                # The others reach the beginning of the next step.
                self.has_failed = True
                handler.look_again(0)
            if self._calling.is_possible:
                self._meet(handler)
        finally:
            self._is_under_way = False
        return True

    def _meet(self, handler: Handler) -> None:
        """Collective over the ranks that come. Call the others out, and save with them."""
        calling = self._calling
        calling.call()
        end = time.monotonic() + handler.patience_seconds()
        while not (are_out := calling.are_out()) and time.monotonic() < end:
            if WATCH.dead or self._are_saving():
                break
            time.sleep(_LOOK_SECONDS)
        if are_out:
            self._end_together(handler)
        calling.take_back()
        if self._are_saving():
            # They have ended the step in which this rank has failed.
            handler.look_again(int(self.is_inside))

    def _knows_notice(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (is_known := self._notice.reason > 0 or self._calling.is_called):
            if time.monotonic() > end or self._notice.is_closed:
                break
            time.sleep(_LOOK_SECONDS)
        return is_known

    def _tell(self, error: BaseException) -> None:
        logger.error(
            "after a notice that the job is about to end, rank %d has failed: the last step that was complete on all "
            "ranks is saved", self._group.rank, exc_info=error,
        )

    def _are_saving(self) -> bool:
        """Whether a rank has reached the end of its step, and waits in the save for this one."""
        identity, own = self._group.order.identity, self._group.calls.number
        states = [peer.state(identity) or 0 for peer in WATCHDOG.peers()]
        return any(may_have_one_name(state % NEXT, CODES["save"]) and state // NEXT > own for state in states)

    def _end_together(self, handler: Handler) -> None:
        mine: dict[Hashable, Counts] = {one.order.identity: Counts.of(one) for one in self._calling.communicators}
        everyone = self._sibling.all_gather_object(
            Facts(self.complete, self._exchange.count, self._notice.reason, mine)
        )
        if any(counts.broken for one in everyone for counts in one.counts.values()):
            return
        self._calling.go_on([one.counts for one in everyone], self._sibling.barrier)
        self._exchange.end(max(one.exchanges for one in everyone))
        handler.end_after(max(one.steps for one in everyone), max(one.reason for one in everyone))

    def meet(self) -> None:
        """Collective. All ranks are about to save: no rank is called out any more."""
        self._calling.end()

    def _watch(self) -> None:
        """Watch, from a notice on, whether the program reaches its next step.

        A Pool, for instance, waits without end for the result of a worker that a signal has ended.
        """
        threading.Thread(target=self._look, name="mpidist-patience", daemon=True).start()

    def _look(self) -> None:
        seen, begin = self.count, time.monotonic()
        while self._is_on and (handler := self._handler()) is not None:
            seconds = handler.patience_seconds()
            del handler
            time.sleep(_WATCH_SECONDS)
            # In calls, and where it saves, it waits for others.
            if seen != self.count or self._group.calls.depth or self._is_under_way:
                seen, begin = self.count, time.monotonic()
            elif time.monotonic() > begin + seconds:
                begin = time.monotonic()
                SIGNALS.raise_in_main_thread(StuckError(
                    f"the program has not reached its next step within {seconds:.0f} s after a notice that the job is "
                    "about to end"
                ))


# The handlers of this process.
_rescues: weakref.WeakSet[Rescue] = weakref.WeakSet()


def _on_exception(
    reference: weakref.ref[Rescue], previous: Callable[..., object], kind: type[BaseException], error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Rescue after an exception that leaves the program; a SystemExit that comes out of a hook ends the program."""
    rescue = reference()
    if rescue is not None:
        try:
            rescue.after(error, waits=True)
        except Exception as failure:
            logger.error("the last checkpoint could not be saved: %s", str(failure) or repr(failure))
    previous(kind, error, trace)
