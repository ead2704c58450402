"""Groups: the ranks that train together, and the evaluator, which is alone and is notified when they have ended."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from typing import Any

from mpidist.cluster.roles.placement import EVALUATOR_GROUP, TRAINING_GROUP, Placement
from mpidist.cluster.signals import SIGNALS, Notice
from mpidist.comm.group.communicator import Channel, Communicator
from mpidist.failures.deaths import WATCH, Process
from mpidist.failures.ending import stand_apart
from mpidist.failures.farewell import Farewell
from mpidist.first_rank import note_role
from mpidist.observe.output import say

# The notice of the end is a small message: it is sent at once, or its receiver has ended.
_SENT_SECONDS = 1.0
# The chief's messages: the signals of the job's end; that its program has ended; and which ranks have died.
_LISTEN, _END = "listen", "end"


def enter_group(communicator: Communicator, placement: Placement) -> Communicator:
    """Collective. The communicator of this rank's group; its rank 0 is the chief.

    Args:
        communicator: All ranks that have a place.
        placement: The place of this rank.

    Returns:
        `communicator` itself where it is the group in its order already; otherwise the caller closes it.
    """
    if placement.as_launched:
        return communicator
    group = communicator.split(placement.group, placement.replica_key)
    places = communicator.all_gather_object((placement.group, placement.replica_key))
    # The first by key.
    _, chief = min((key, rank) for rank, (color, key) in enumerate(places) if color == TRAINING_GROUP)
    evaluators = [rank for rank, (color, _) in enumerate(places) if color == EVALUATOR_GROUP]
    if not evaluators:
        note_role(group.rank)
        return group
    channel = communicator.open_channel()
    if communicator.rank == chief:
        atexit.register(_tell_end, channel, evaluators, os.getpid())
        _FOLLOWERS.append(_Followers(channel, evaluators, os.getpid()))
    is_evaluator = placement.group == EVALUATOR_GROUP
    if not is_evaluator:
        group.own(_Survival(group, [communicator.processes[rank] for rank in evaluators]))
    note_role(group.rank, _End(channel, chief) if is_evaluator else None)
    if is_evaluator:
        stand_apart()
    return group


class _End:
    """Answers an evaluator's question whether the chief has ended, by its message or its death.

    From the chief's message on, its signals do not end this process: it ends with the job.

    Args:
        channel: Between the chief and the evaluators.
        chief: The rank of the chief in the channel's communicator.
    """

    def __init__(self, channel: Channel, chief: int) -> None:
        self._channel = channel
        self._chief = chief
        self._has_come = False
        # This notice is not read: the ranks that train got the same signals.
        self._notice = Notice()

    def __call__(self) -> bool:
        if not self._has_come:
            self._has_come = self._look()
        return self._has_come

    def _look(self) -> bool:
        communicator, mpi, tag = self._channel
        if communicator.is_closed or communicator.processes[self._chief] in WATCH.dead:
            return True
        try:
            # From one sender: after the death of another rank a probe for any sender may be an error.
            while mpi.iprobe(source=self._chief, tag=tag):
                kind, said = mpi.recv(source=self._chief, tag=tag)
                if kind == _END:
                    for process, name in said:
                        WATCH.note(process, name)
                    return True
                self._listen(said)
            return False
        except Exception as error:
            # After a death the chief ends without a farewell, perhaps before this rank has read its message.
            if not WATCH.learn(error):
                raise
        return True

    def _listen(self, numbers: list[int]) -> None:
        before, self._notice = self._notice, Notice()
        # In another thread they keep the effect that they have.
        with contextlib.suppress(ValueError):
            SIGNALS.tell(self._notice, [signal.Signals(number) for number in numbers])
        SIGNALS.silence(before)


class _Followers:
    """The evaluators, as the chief knows them.

    Args:
        channel: Between the chief and the evaluators.
        evaluators: Their ranks in the channel's communicator.
        process: The process of the chief.
    """

    def __init__(self, channel: Channel, evaluators: list[int], process: int) -> None:
        self._channel = channel
        self._evaluators = evaluators
        self._process = process
        self._numbers: list[int] = []
        # Small messages, which are sent at once; they are kept until they are complete.
        self._sent: list[Any] = []

    def tell(self, numbers: list[int]) -> None:
        """Local. Send the evaluators the signals that the chief handles now, without waiting for the delivery."""
        communicator, mpi, tag = self._channel
        if communicator.is_closed or os.getpid() != self._process or numbers == self._numbers:
            return
        self._numbers = numbers
        alive = [rank for rank in self._evaluators if communicator.processes[rank] not in {*WATCH.dead, *WATCH.gone}]
        # One may have died on another host without this rank's knowledge.
        with contextlib.suppress(Exception):
            self._sent = [request for request in self._sent if not request.test()[0]]
            self._sent += [mpi.isend((_LISTEN, numbers), rank, tag) for rank in alive]


class _Survival:
    """Collective. Lets the training ranks continue after the death of an evaluator, and exit without it.

    Args:
        group: The ranks that train.
        evaluators: The processes of the evaluators.
    """

    def __init__(self, group: Communicator, evaluators: list[Process]) -> None:
        mpi = group.open_channel().mpi
        self._farewell = None if mpi is None else Farewell(mpi, group.processes)
        self._evaluators = evaluators
        WATCH.spared.update(dict.fromkeys(evaluators, _tell_loss if group.rank == 0 else _leave_it_to_the_chief))

    def Free(self) -> None:
        """Local. The group has ended."""
        self._farewell = None
        for process in self._evaluators:
            WATCH.spared.pop(process, None)


def _tell_loss(name: str) -> None:
    say(f"{name}, the evaluator, has died; the training continues")


def _leave_it_to_the_chief(_: str) -> None:
    """One rank logs it."""


_FOLLOWERS: list[_Followers] = []


def tell_evaluators_of_signals() -> None:
    """Local. On the chief: tell evaluators which signals this process handles, so that they do not end by these."""
    for one in _FOLLOWERS:
        one.tell(sorted(SIGNALS.numbers()))


def _tell_end(channel: Channel, evaluators: list[int], process: int) -> None:
    """Local. Notify the evaluators that this program has ended, and which ranks have died.

    No other message reaches an evaluator on another host, and at its own end it would wait for dead ranks.

    Args:
        channel: Between the chief and the evaluators.
        evaluators: Their ranks in the channel's communicator.
        process: The chief's; a child that was forked from it sends nothing.
    """
    communicator, mpi, tag = channel
    if communicator.is_closed or os.getpid() != process:
        return
    alive = [rank for rank in evaluators if communicator.processes[rank] not in {*WATCH.dead, *WATCH.gone}]
    dead = [(tuple(process), name) for process, name in WATCH.dead.copy().items() if isinstance(process, Process)]
    # An evaluator may have died on another host without this rank's knowledge.
    with contextlib.suppress(Exception):
        waiting = [mpi.isend((_END, dead), rank, tag) for rank in alive]
        end = time.monotonic() + _SENT_SECONDS
        while (waiting := [request for request in waiting if not request.test()[0]]) and time.monotonic() < end:
            time.sleep(1e-3)
