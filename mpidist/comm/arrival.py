"""Arrival: before a collective call begins, every rank says that it is there; who is late is named.

A collective of MPI cannot be given up once it has begun, so ranks meet before it: each sends a few bytes to rank 0,
which lets all go on, or tells those that wait who is missing. It costs two small messages per rank and call, and is
therefore there only under `timeout_seconds`.
"""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn, cast

from mpidist.comm.agreement import name_ranks
from mpidist.comm.communicator import Communicator
from mpidist.errors import CollectiveTimeoutError, MismatchError, mark_shared

_HERE, _GO, _LATE, _DIFFERENT, _WAITING, _ASKED = "here", "go", "late", "different", "waiting", "asked"
_TAG = 1
# As long as all are in time nobody sleeps, but gives its core away between looks; then a nap is short beside the wait.
_SPIN_SECONDS = 0.002
_NAP_SECONDS = 0.0002


class Arrival:
    """The ranks' meeting point.

    Collective. Args:
        communicator: The ranks.
        timeout_seconds: How long a rank waits for the others.
    """

    def __init__(self, communicator: Communicator, timeout_seconds: float) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self._timeout = timeout_seconds
        self._hosts = communicator.all_gather_object(communicator.host)
        self._mpi: Any = communicator.split(0, communicator.rank).mpi if communicator.size > 1 else None
        self._count = 0
        self._broken: str | None = None
        self._left = time.perf_counter()

    def wait(self, call: str) -> None:
        """Collective. Return when every rank has called.

        Args:
            call: Its name.

        Raises:
            CollectiveTimeoutError: Some rank did not come in time, in this call or an earlier one; on every rank that
                waited, and on the late one when it comes. Messages may be on their way: the ranks cannot go on
                together, and should end.
            MismatchError: The ranks make different calls.
        """
        if self._mpi is None:
            return
        if self._broken is not None:
            raise mark_shared(CollectiveTimeoutError(f"{call}: the ranks no longer meet, since {self._broken}"))
        self._count += 1
        if self._rank == 0:
            self._lead(call)
        else:
            self._follow(call)

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
                # Whoever came before this rank must know that rank 0 is not the one missing.
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
        """Ask those who have arrived whether they still wait: they may have given up while this rank was away."""
        for rank in range(1, self._size):
            self._send(_ASKED, "", rank)
        answers: dict[int, str] = {}
        while len(answers) < self._size - 1:
            # Who has given up has said so, and takes no more messages.
            if not self._take_message(answers):
                os.sched_yield()

    def _take_message(self, calls: dict[int, str]) -> bool:
        """Note which call a rank has arrived in; whether there was a message."""
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
                # Rank 0 came later than this rank: its own time limit ends after this one's.
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
            f"(call {self._count} of this collective). Look there: a rank that has ended, computes longer, or makes "
            "other calls. A longer `timeout_seconds` waits longer"
        )

    def _fail(self, kind: str, text: str) -> None:
        for rank in range(1, self._size):
            self._send(kind, text, rank)
        self._raise(kind, text)

    def _raise(self, kind: str, text: str) -> NoReturn:
        self._broken = text
        raise mark_shared(MismatchError(text) if kind == _DIFFERENT else CollectiveTimeoutError(text))

    def _send(self, kind: str, text: str, rank: int) -> None:
        # Below the eager limit of every MPI: it does not wait for a receiver that may never come.
        self._mpi.send((self._rank, kind, text[:1000]), rank, _TAG)

    def _next_message(self) -> tuple[int, str, str] | None:
        """Who sent the next message that has come, its kind and its text."""
        found = self._mpi.improbe()
        return None if found is None else cast("tuple[int, str, str]", found.recv())
