"""The communicator over MPI. No other module imports `mpi4py.MPI`, which starts MPI unless `mpi_start` has."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from mpi4py import MPI

from mpidist.comm.calls.messages import BeginMax, LargestNumbers
from mpidist.comm.calls.order import CallOrder
from mpidist.comm.calls.text import differing_calls, other_call
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.group import pages
from mpidist.comm.group.communicator import Channel, Communicator
from mpidist.comm.group.introduction import RankWords, introduce
from mpidist.comm.group.object_exchange import checksum_of, gather_data
from mpidist.comm.group.resource import Handles, end_all, give_back_offered, new_identity, offered
from mpidist.failures import job_directory
from mpidist.failures.deaths import WATCH, Process, this_process
from mpidist.recorder.calls import NEXT, Calls, noted

__all__ = ["MPI", "MpiCommunicator"]

T = TypeVar("T")

# Garbage is collected once in so many creations: strategies refer to themselves, and what garbage holds is not given
# back. MPICH ends a program with more than 2,000 communicators.
_COLLECTED_EVERY = 64
# Tags of a channel. MPI promises at most 32,767 (MPI 4.1, section 9.1.2); a tag is reused after this many calls.
_TAGS = 1 << 14
# A part of what ranks combine: a rank that finds other numbers in its place knows that another one is in another call.
_MARK = int.from_bytes(b"mpidist:", "big")
# A rank that polls something while it waits does so once in this many tests of its request.
_LOOKS = 64


class _Met(NamedTuple):
    """The numbers of all ranks, combined.

    Attributes:
        first: The least number of a rank's call.
        last: The largest number of a rank's call.
        least: The least value.
        largest: The largest value.
        length: The largest length.
    """

    first: int
    last: int
    least: int
    largest: int
    length: int


class MpiCommunicator(Communicator):
    """A group of MPI ranks and their nodes.

    Args:
        mpi: An intracommunicator for this object alone. It is freed by `close`.
        node_color: Ranks with equal colors count as one node. Default: the ranks that share memory according to MPI, if
            each of them can really open a file that another has made there. In different containers on one host they
            cannot.
        is_part: See `CallOrder`. Its ranks are those of another communicator, and know one another.
        known: The processes of that other communicator, which are kept once for both where they are the same.
    """

    # Whether other users of the same ranks share it: no user closes it then.
    is_shared = False

    def __init__(
        self, mpi: MPI.Intracomm, node_color: int | None = None, *, is_part: bool = False,
        known: tuple[Process, ...] = (),
    ) -> None:
        self.mpi: Any = mpi
        # The groups into which it is split are on the same nodes.
        self._node_color = node_color
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.host = MPI.Get_processor_name()
        identity = new_identity()
        if identity[0] % _COLLECTED_EVERY == _COLLECTED_EVERY - 1:
            gc.collect()
        node, told = introduce(mpi, node_color, RankWords(
            mpi.rank, this_process(self.host), identity, offered(), pages.show(),
            "" if is_part else job_directory.wanted(), own_cores(),
        ))
        give_back_offered(told.offers)
        sizes = Counter(told.leaders)
        order = {leader: number for number, leader in enumerate(sorted(sizes))}
        self.nodes = array("i", (order[leader] for leader in told.leaders))
        self.node_index = self.nodes[mpi.rank]
        self.node_sizes: tuple[int, ...] = tuple(sizes[leader] for leader in order)
        self.processes = known if known == told.processes else told.processes
        self._handles = Handles(told.identity, [mpi, node])
        self._job = job = "-".join(map(str, told.identity))
        pages.look(self.processes, mpi.rank, told.pages, told.job_directory, job)
        self.calls = pages.open_calls(told.identity, 0, self.processes, mpi.rank)
        self.order = CallOrder(self.calls, self.processes)
        self.order.is_part = is_part
        self.core_count = count_cores(told.cores)
        leader = told.leaders[mpi.rank]
        mine = [process for process, its in zip(self.processes, told.leaders, strict=True) if its == leader]
        calls = pages.open_calls(told.identity, 1 + leader, mine, node.rank)
        self._node: MpiCommunicator | None = _NodeCommunicator(node, self._handles, mine, calls, self.core_count)
        self._lane: MpiCommunicator | None = None
        self._siblings: dict[str, MpiCommunicator] = {}
        self._parts: list[weakref.ref[MpiCommunicator]] = []
        self._channel: MPI.Intracomm | None = None
        self._tag = 0

    @property
    def node(self) -> Communicator:
        """Local. See `Communicator.node`."""
        # None in the node's own communicator: a reference to itself would leave it to the garbage collector.
        return self if self._node is None else self._node

    def share_directory(self, directory: str) -> None:
        """Local. See `Communicator.share_directory`."""
        if self._job and len({process.host for process in self.processes}) > 1:
            pages.look(self.processes, self.rank, {}, directory, self._job)
        self._job = ""

    @noted("barrier")
    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        if WATCH.dead:
            self.require_whole("a barrier")
        self.mpi.Barrier()

    @noted("exchange between ranks")
    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all ranks, in the order of the ranks.

        Raises:
            MismatchError: The ranks are in different calls, of which this is a part; on every rank.
        """
        if WATCH.dead or self.order.broken:
            self.require_whole("an exchange between ranks")
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        met = self._meet(checksum_of(data, self.rank), 0, len(data))
        if met.first < met.last:
            # Ranks have caught an error that all of them had, after different numbers of calls.
            self.calls.go_on_at(met.last)
        if met.least == met.largest:
            # A copy: nobody else sees what the caller changes in its own.
            return [pickle.loads(data)] * self.size
        return gather_data(self.mpi, data, met.length)

    @noted("exchange between ranks")
    def gather_object(self, value: T, flag: int = 0) -> tuple[int, list[T]]:
        """Collective. See `Communicator.gather_object`.

        Raises:
            MismatchError: See `all_gather_object`.
        """
        if WATCH.dead or self.order.broken:
            self.require_whole("an exchange between ranks")
        largest = self._meet(flag, -NEXT).largest
        return largest, self.mpi.gather(value) or []

    @noted("broadcast of an object")
    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Collective. The picklable value of rank `root`.

        Raises:
            MismatchError: See `all_gather_object`.
        """
        if WATCH.dead or self.order.broken:
            self.require_whole("an exchange between ranks")
        sent = MPI.pickle.dumps(value) if self.rank == root else b""
        # The root waits here: if it sent at once, ranks in another call would take the bytes for theirs.
        data = bytearray(self._meet(len(sent), NEXT * (1 + root)).largest)
        data[: len(sent)] = sent
        self.mpi.Bcast([data, MPI.BYTE], root)
        return value if self.rank == root else cast(T, MPI.pickle.loads(data))

    @noted("agreement between ranks")
    def all_reduce_max(self, value: int) -> int:
        """Collective. The largest of the ranks' integers.

        Raises:
            MismatchError: See `all_gather_object`.
        """
        if WATCH.dead or self.order.broken:
            self.require_whole("an agreement between ranks")
        return self._meet(value, 0).largest

    def _meet(self, value: int, kind: int, length: int = 0) -> _Met:
        """Collective. Combine the ranks' integers, where all are in the same call and this kind of exchange.

        Whatever they combine by this is one call of MPI with as many bytes, so that it finds ranks in other calls.
        """
        calls = self.calls
        code, number = calls.code + kind, calls.number
        # The largest of the negative ones is the least.
        numbers = array("q", (_MARK, -_MARK, code, -code, number, -number, value, -value, length))
        self.mpi.Allreduce(MPI.IN_PLACE, [numbers, len(numbers), MPI.INT64_T], MPI.MAX)
        if numbers[0] != _MARK or numbers[1] != -_MARK:
            # Some rank is in a call in which it sends something else.
            raise other_call(calls)
        if numbers[2] != -numbers[3]:
            raise differing_calls(calls, self.order.number, self.mpi.allgather, self._go_on_at)
        return _Met(-numbers[5], numbers[4], -numbers[7], numbers[6], numbers[8])

    def _go_on_at(self, signed: int, noted: int) -> None:
        """Collective. Let all ranks continue with the same numbers of calls, after they were in different ones."""
        self.order.go_on_at(signed, noted)
        # No rank may compare its next call with the page before all have reset their part.
        self.mpi.Barrier()

    def close(self) -> None:
        """Collective. See `Communicator`; where others use it, too, it stays open."""
        if not self.is_shared:
            super().close()

    def drop(self) -> None:
        """Local. See `Resource.drop`; where others use it, too, it stays open."""
        if not self.is_shared:
            super().drop()

    def open_max(self) -> BeginMax:
        """Collective. See `Communicator.open_max`."""
        mpi = self.open_channel().mpi
        # MPI writes into it until the request is complete, even if this object is deleted by then.
        numbers = array("q")
        requests = self._handles.requests

        def begin(given: list[int]) -> LargestNumbers:
            numbers[:] = array("q", given)
            request = mpi.Iallreduce(MPI.IN_PLACE, [numbers, len(given), MPI.INT64_T], MPI.MAX)
            # mpi4py's request does not keep its buffer. Others may have a reduction of their own pending.
            requests[id(request)] = request, numbers

            def wait(look: Callable[[], None] | None = None) -> list[int]:
                looks = 0
                while look is not None and not request.Test():
                    looks += 1
                    # The rank that is waited for may need this core.
                    os.sched_yield()
                    if looks % _LOOKS == 0:
                        look()
                request.Wait()
                del requests[id(request)]
                return numbers.tolist()

            return wait

        return begin

    def open_lane(self) -> Communicator | None:
        """Collective at the first call, then Local. See `Communicator.open_lane`."""
        if len(self.node_sizes) == 1:
            return None
        lanes = min(self.node_sizes)
        if self._lane is None:
            # Kept, since all strategies over these ranks use it. Ranks without a lane share one color that no lane has,
            # since all ranks must take part in Split. In its lane each rank counts as a node of its own.
            self._lane = self._open_lanes(lanes)
        return self._lane if self.node.rank < lanes else None

    def _open_lanes(self, lanes: int) -> MpiCommunicator:
        with self._opens("opening lanes between nodes"):
            mpi = cast(MPI.Intracomm, self.mpi.Split(min(self.node.rank, lanes), self.node_index))
            return MpiCommunicator(mpi, node_color=mpi.rank, is_part=True)

    def _opens(self, name: str) -> CallOrder:
        """Local. Begin to make another communicator. An exception in the middle of that breaks this one."""
        self.require_whole(name)
        call = self.order.enter(name, None, None)
        call.is_under_way = True
        return call

    def open_sibling(self, purpose: str) -> Communicator:
        """Collective at the first call for a purpose, then Local. See `Communicator.open_sibling`."""
        if purpose not in self._siblings:
            with self._opens("opening a communicator"):
                self._siblings[purpose] = MpiCommunicator(self._duplicate(), is_part=True, known=self.processes)
        return self._siblings[purpose]

    def open_channel(self) -> Channel:
        """Collective. See `Communicator.open_channel`."""
        if self._channel is None:
            self._channel = self._duplicate()
            self._handles.append(self._channel)
        self._tag += 1
        return Channel(self, self._channel, self._tag % _TAGS)

    def own(self, thing: Any) -> None:
        """Collective. See `Communicator.own`."""
        self._handles.own(thing)

    @noted("duplicating a communicator")
    def _duplicate(self) -> MPI.Intracomm:
        self.require_whole("duplicating a communicator")
        return cast(MPI.Intracomm, self.mpi.Dup())

    def split(self, color: int, key: int = 0, *, is_part: bool = False) -> Communicator:
        """Collective. See `Communicator.split`."""
        with self._opens("splitting a communicator"):
            made = MpiCommunicator(self.mpi.Split(color, key), node_color=self._node_color, is_part=is_part)
        if is_part:
            self._parts = [*filter(_is_open, self._parts), weakref.ref(made)]
        return made

    @property
    def parts(self) -> Sequence[Communicator]:
        """Local. See `Communicator.parts`."""
        return [part for reference in filter(_is_open, self._parts) if (part := reference()) is not None]

    def _end(self, *, is_collective: bool) -> None:
        lane = [] if self._lane is None else [self._lane]
        end_all((*self._siblings.values(), *lane), is_collective=is_collective)
        if is_collective and not MPI.Is_finalized():
            self._handles.free()
        else:
            self._handles.drop()

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size}, nodes={self.node_sizes})"


def _is_open(reference: weakref.ref[MpiCommunicator]) -> bool:
    held = reference()
    return held is not None and not held.is_closed


class _NodeCommunicator(MpiCommunicator):
    """The ranks of one node. Their node is this communicator itself.

    Args:
        mpi: The communicator of mpi4py over the ranks of the node.
        handles: The handles of the whole communicator, of which this one is a part.
        processes: The processes of the ranks of the node.
        calls: The record of the communicating calls among them.
        core_count: See `Communicator`.
    """

    def __init__(
        self, mpi: MPI.Intracomm, handles: Handles, processes: Sequence[Process], calls: Calls, core_count: int
    ) -> None:
        self.mpi = mpi
        self._node_color = None
        self.core_count = core_count
        self.calls = calls
        self.order = CallOrder(calls, processes)
        self.order.is_part = True
        self.rank = mpi.rank
        self.size = mpi.size
        self.host = processes[mpi.rank].host
        self.node_index = 0
        self.node_sizes = (mpi.size,)
        self.nodes = array("i", bytes(4 * mpi.size))
        self.processes = tuple(processes)
        self._node = None
        self._job = ""
        self._handles = handles
        self._siblings = {}
        self._parts = []
        self._lane = None
        self._channel = None
        self._tag = 0

    def _end(self, *, is_collective: bool) -> None:
        """Local. Do nothing: it is closed with the communicator that it is a part of."""
