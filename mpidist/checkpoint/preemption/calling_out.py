"""Calling out: a rank that has failed makes all others leave the call in which they wait.

Ranks of its node that wait in memory find it in their page. Ranks of other nodes get a message, and look for it while
they wait for the comparison of a step between nodes. A rank that waits in another call of MPI stays there.

A communicator may have parts, as the logical devices of a replica, whose ranks wait for each other in pages of their
own. A rank calls out in the pages of its parts as well: who comes out there calls out in its other parts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from mpidist.comm.calls.signature_page import CallPage
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_barrier import NodeBarrier
from mpidist.errors import RankError, mark_shared


class Counts(NamedTuple):
    """The counts of a communicator's calls, which differ between ranks after some of them have come out of one.

    Attributes:
        calls: The number of signed calls.
        noted: The number of all calls.
        barriers: The number of barriers of the node.
        comparisons: The number of comparisons between nodes that were begun.
        broken: The call that the rank has left in the middle; empty if there is none.
    """

    calls: int
    noted: int
    barriers: int
    comparisons: int
    broken: str

    @classmethod
    def of(cls, communicator: Communicator) -> Counts:
        """Local. The counts of this rank."""
        order = communicator.order
        barriers = order.barrier.count if isinstance(order.barrier, NodeBarrier) else 0
        return cls(order.number, communicator.calls.number, barriers, order.comparisons, order.broken)


class CallingOut:
    """Collective. The ranks that have come out, on one communicator.

    Args:
        group: The ranks.
        sibling: A communicator of the same ranks, without other messages.
    """

    def __init__(self, group: Communicator, sibling: Communicator) -> None:
        order, self._group = group.order, group
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
            RankError: A rank has failed, and will not make this call; on every rank.
        """
        if self.is_called:
            raise mark_shared(RankError("a call is abandoned: another rank has failed and will not make it"))

    def call(self) -> None:
        """Local. Call all ranks out of the calls in which they wait, and show that this one has come out."""
        for page in self._pages():
            page.call_out()
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
        """Local. Withdraw the call to this node: its ranks may wait again."""
        for page in self._pages():
            page.end_call()

    @property
    def communicators(self) -> list[Communicator]:
        """Local. The ranks' communicator, and its parts in which this rank is."""
        return [self._group, *self._group.parts]

    def go_on(self, of_ranks: Sequence[Mapping[Hashable, Counts]], meet: Callable[[], object]) -> None:
        """Collective. After all have come out, let each communicator continue with the same counts on all its ranks.

        Args:
            of_ranks: For each rank the counts of its communicators, by their identities.
            meet: Collective. No rank uses a page before all have called it.
        """
        of_each = [
            (one.order, [held[key] for held in of_ranks if (key := one.order.identity) in held])
            for one in self.communicators
        ]
        for order, counts in of_each:
            order.go_on_at(max(one.calls for one in counts), max(one.noted for one in counts))
            if isinstance(order.barrier, NodeBarrier):
                order.barrier.go_on_at(max(one.barriers for one in counts))
        self.take_back()
        meet()
        for order, counts in of_each:
            order.catch_up(max(one.comparisons for one in counts))

    def end(self) -> None:
        """Collective. All ranks have met: what was called before counts no more."""
        self.take_back()
        self._turn += 1
        self._out.clear()
        self._sent = [(request, words) for request, words in self._sent if not request.Test()]

    def _pages(self) -> list[CallPage]:
        return [one.order.page for one in self.communicators if one.order.page is not None]

    def _receive(self) -> None:
        while self._mpi.Iprobe(tag=self._tag):
            words = array("q", [0, 0])
            self._mpi.Recv(words, tag=self._tag)
            rank, turn = words
            if turn == self._turn:
                self._out.add(rank)
