"""Arrival: ranks meet before a collective call begins, and ranks that come too late are named.

MPI cannot cancel a collective operation that has begun (MPI 4.1, section 6.12). Ranks therefore meet before it: each
rank sends a few bytes to rank 0, which lets all ranks continue, or sends them the missing ranks. This costs
two small messages per rank and call, and is done only under `timeout_seconds`.
"""

from __future__ import annotations

import os
import time
from typing import NoReturn, cast

from mpidist.comm.group.agreement import name_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CollectiveTimeoutError, MismatchError, mark_shared
from mpidist.failures.deaths import WATCH

_HERE, _GO, _LATE, _DIFFERENT, _WAITING, _ASKED = "here", "go", "late", "different", "waiting", "asked"
# A rank that waits first yields its core between two looks, so that a call in which all ranks are on time stays fast.
# After this time it sleeps between looks: a nap is short compared with such a wait.
_SPIN_SECONDS = 0.002
_NAP_SECONDS = 0.0002


class Arrival:
    """Collective. A meeting point of ranks.

    Args:
        communicator: The ranks.
        timeout_seconds: The time that a rank waits for the others.
    """

    def __init__(self, communicator: Communicator, timeout_seconds: float) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self._timeout = timeout_seconds
        self._hosts = [process.host for process in communicator.processes]
        self._calls = communicator.calls
        self._channel = communicator.open_channel()
        self._mpi = self._channel.mpi
        self._count = 0
        self._broken: str | None = None
        self._left = time.perf_counter()

    @property
    def is_broken(self) -> bool:
        """Local. Whether a rank came too late, or made another call: the ranks no longer meet."""
        return self._broken is not None

    def wait(self, call: str) -> None:
        """Collective. Return when every rank has called.

        Args:
            call: The name of the collective call that follows.

        Raises:
            CollectiveTimeoutError: A rank did not come in time, in this call or an earlier one. Every rank that waited
                raises it, and so does the late rank when it comes. Messages may still be pending, so the ranks
                cannot continue together and should end.
            MismatchError: The ranks make different calls.
            DeadRankError: A rank has died.
        """
        if self._size == 1:
            return
        if self._broken is not None:
            raise mark_shared(CollectiveTimeoutError(
                f"{call}: not started, since the ranks are out of step after an earlier failure: {self._broken}"
            ))
        if WATCH.dead:
            self._channel.communicator.require_whole(call)
        self._count += 1
        self._calls.is_timed = True
        try:
            if self._rank == 0:
                self._lead(call)
            else:
                self._follow(call)
        finally:
            self._calls.is_timed = False

    def _lead(self, call: str) -> None:
        calls = {0: call}
        begin = time.perf_counter()
        told = {0}
        while len(calls) < self._size:
            if self._take_message(calls):
                continue
            waited = time.perf_counter() - begin
            if waited > self._timeout:
                missing = sorted(set(range(self._size)) - set(calls))
                self._fail(_LATE, self._describe(call, missing))
            if waited < _SPIN_SECONDS:
                os.sched_yield()
            else:
                # The ranks that are here must learn that rank 0 is not the missing one, or they would name it.
                for rank in calls.keys() - told:
                    told.add(rank)
                    self._send(_WAITING, "", rank)
                time.sleep(_NAP_SECONDS)
        if begin - self._left > self._timeout / 2:
            self._confirm()
        if len(set(calls.values())) > 1:
            listed = "; ".join(
                f"{one} on {name_ranks([r for r, other in calls.items() if other == one])}"
                for one in dict.fromkeys(calls.values())
            )
            self._fail(_DIFFERENT, f"the collective call must be the same on all ranks, got {listed}")
        for rank in range(1, self._size):
            self._send(_GO, "", rank)
        self._left = time.perf_counter()

    def _confirm(self) -> None:
        """Ask the ranks that have arrived whether they still wait: some may have timed out before rank 0 arrived."""
        for rank in range(1, self._size):
            self._send(_ASKED, "", rank)
        answers: dict[int, str] = {}
        while len(answers) < self._size - 1:
            # A rank that has timed out does not answer, but has sent a message about that: taking it raises.
            if not self._take_message(answers):
                os.sched_yield()

    def _take_message(self, calls: dict[int, str]) -> bool:
        """Note the call that a rank has arrived in. Returns whether there was a message."""
        message = self._next_message()
        if message is None:
            return False
        rank, kind, text = message
        if kind == _LATE:
            self._fail(kind, text)
        calls[rank] = text
        return True

    def _follow(self, call: str) -> None:
        self._send(_HERE, call, 0)
        begin = time.perf_counter()
        limit = self._timeout
        while True:
            message = self._next_message()
            waited = time.perf_counter() - begin
            if message is not None:
                _, kind, text = message
                if kind == _GO:
                    return
                if kind in (_LATE, _DIFFERENT):
                    self._raise(kind, text)
                if kind == _ASKED:
                    self._send(_HERE, call, 0)
                # Rank 0 came later than this rank, so its time limit ends later: it reports the missing ranks.
                limit = 2 * self._timeout + 1
            elif waited > limit:
                text = self._describe(call, [0])
                self._send(_LATE, text, 0)
                self._raise(_LATE, text)
            elif waited < _SPIN_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)

    def _describe(self, call: str, missing: list[int]) -> str:
        hosts = ", ".join(sorted({self._hosts[rank] for rank in missing})[:4])
        return (
            f"{call}: {name_ranks(missing)} (host {hosts}) did not arrive within {self._timeout:g} s "
            f"(call {self._count} of this collective). Such a rank has ended, makes other calls, or needs more time: "
            "look at its output, or set a larger `timeout_seconds`"
        )

    def _fail(self, kind: str, text: str) -> None:
        for rank in range(1, self._size):
            self._send(kind, text, rank)
        self._raise(kind, text)

    def _raise(self, kind: str, text: str) -> NoReturn:
        self._broken = text
        raise mark_shared(MismatchError(text) if kind == _DIFFERENT else CollectiveTimeoutError(text))

    def _send(self, kind: str, text: str, rank: int) -> None:
        # So short a message is sent eagerly by every MPI: `send` returns even if the receiver never comes. A long one
        # may wait for its receiver (MPI 4.1, section 3.4), and the rank that reports a failure would hang.
        self._mpi.send((self._rank, kind, text[:1000]), rank, self._channel.tag)

    def _next_message(self) -> tuple[int, str, str] | None:
        """The sender, the kind and the text of the next message, None if none has come."""
        # A matched probe: no other thread can take the message between the look and the receive (MPI 4.1, 3.8.2).
        found = self._mpi.improbe(tag=self._channel.tag)
        return None if found is None else cast("tuple[int, str, str]", found.recv())
