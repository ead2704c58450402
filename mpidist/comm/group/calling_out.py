"""Calling out: a rank that has failed makes all others leave the call in which they wait.

Ranks of its node that wait in memory find it in their page. Ranks of other nodes get a message, and look for it while
they wait for the comparison of a step between nodes. A rank that waits in another call of MPI stays there.
"""

from __future__ import annotations

from array import array
from typing import Any

from mpidist.comm.group.communicator import Communicator
from mpidist.errors import RankError, mark_shared


class CallingOut:
    """Collective. The ranks that have come out, on one communicator.

    Args:
        group: The ranks.
        sibling: The same ranks, on a communicator without other messages.
    """

    def __init__(self, group: Communicator, sibling: Communicator) -> None:
        order = group.order
        self._page = order.page
        self._rank, self._size = group.rank, group.size
        # Ranks that are still to come out may wait in MPI until this one lets it continue; any call of MPI does.
        self._progress = (lambda: False) if sibling.mpi is None else sibling.mpi.Iprobe
        self._mpi: Any = None
        self._tag = self._turn = 0
        self._out: set[int] = set()
        self._sent: list[tuple[Any, array[int]]] = []
        if order.is_across:
            _, self._mpi, self._tag = sibling.open_channel()
            order.listen(self.look)

    @property
    def is_possible(self) -> bool:
        """Local. Whether ranks can come out at all."""
        return self._page is not None or self._mpi is not None

    @property
    def is_called(self) -> bool:
        """Local. Whether a rank has called out, or has come out, and all are to come out."""
        if self._page is not None and self._page.is_called_out:
            return True
        if self._mpi is None:
            return False
        self._receive()
        return bool(self._out)

    def look(self) -> None:
        """Local. Come out of a call in which this rank waits.

        Raises:
            RankError: A rank has failed, and makes this call no more; on every rank.
        """
        if self.is_called:
            raise mark_shared(RankError("a call is abandoned: another rank has failed and will not make it"))

    def call(self) -> None:
        """Local. Call all ranks out of what they wait in, and show that this one has come out."""
        if self._page is not None:
            self._page.call_out()
        if self._mpi is not None and self._rank not in self._out:
            self._out.add(self._rank)
            for other in set(range(self._size)) - {self._rank}:
                words = array("q", [self._rank, self._turn])
                self._sent.append((self._mpi.Isend(words, other, self._tag), words))

    def are_out(self) -> bool:
        """Local. Whether all ranks have come out; it does not block in MPI, so that a rank may poll it."""
        self._progress()
        if self._mpi is None:
            return self._page is not None and self._page.are_out()
        self._receive()
        return len(self._out) == self._size

    def take_back(self) -> None:
        """Local. Take the call to this node back; this rank is in no hurry any more."""
        if self._page is not None:
            self._page.end_call()

    def end(self) -> None:
        """Collective. All ranks have met: what was called before counts no more."""
        self.take_back()
        self._turn += 1
        self._out.clear()
        self._sent = [(request, words) for request, words in self._sent if not request.Test()]

    def _receive(self) -> None:
        while self._mpi.Iprobe(tag=self._tag):
            words = array("q", [0, 0])
            self._mpi.Recv(words, tag=self._tag)
            rank, turn = words
            if turn == self._turn:
                self._out.add(rank)
