"""The communicator over MPI. Importing this module initializes MPI; no other module imports `mpi4py.MPI`."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from mpi4py import MPI

from mpidist import launch
from mpidist.comm import ending
from mpidist.comm.communicator import Channel, Communicator, SoloCommunicator
from mpidist.comm.deaths import WATCH, Process, this_process
from mpidist.comm.resource import Claim, Identity, end_all, give_back_offered, new_identity, offered
from mpidist.comm.shared_file import SharedFile, open_shared
from mpidist.errors import LauncherError

__all__ = ["MPI", "MpiCommunicator", "open_mpi_communicator"]

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")

# The user's communicator carries our duplicates of it, one per purpose, as an MPI attribute (MPI 4.1, section 7.7). A
# table keyed by handles would be wrong: MPI may use the handle of a freed communicator again. When the user frees the
# communicator the attribute goes, and with it the duplicates that nobody uses any more.
_DUPLICATES = MPI.Comm.Create_keyval()
# Garbage is collected once in so many creations: strategies refer to themselves, and what garbage holds is not given
# back. MPICH ends a program with more than 2,000 communicators.
_COLLECTED_EVERY = 64
# Tags of a channel. MPI promises no more than 32,767 (MPI 4.1, section 9.1.2); a tag is used again after so many calls.
_TAGS = 1 << 14


class _Introduction(NamedTuple):
    """A rank's words to the other ranks of a new communicator.

    Attributes:
        leader: The first rank of its node.
        process: Its process.
        identity: Of the communicator, if the first rank says it.
        offered: What it has dropped; see `mpidist.comm.resource`.
    """

    leader: int
    process: Process
    identity: Identity
    offered: dict[Identity, int]


@dataclass
class _Duplicates:
    """The attribute of a user's communicator.

    Attributes:
        by_purpose: Our duplicates of it.
        farewell: By which its ranks leave the program together, over a channel of the first duplicate.
    """

    by_purpose: dict[str, MpiCommunicator]
    farewell: ending.Farewell | None


class _Handles:
    """MPI communicators that are freed together, in the order of creation; alive as long as anybody uses one of them.

    Collective. Args:
        identity: See `Claim`.
        mpi: The communicators. More may be appended.
    """

    def __init__(self, identity: Identity, mpi: Sequence[MPI.Intracomm]) -> None:
        self._mpi = list(mpi)
        self._claim = Claim(self, identity, mpi[0].size, functools.partial(_free, self._mpi))
        self.append = self._mpi.append
        self.free = self._claim.give_back
        self.drop = self._claim.drop


def _free(handles: Sequence[MPI.Intracomm]) -> None:
    for handle in handles:
        handle.Free()


class MpiCommunicator(Communicator):
    """A group of MPI ranks and their nodes.

    Args:
        mpi: An intracommunicator that nobody else uses. It is freed by `close`.
        node_color: Ranks with equal colors count as one node. Default: the ranks that share memory according to MPI, if
            each of them can really open a file that another has made there. In different containers on one host they
            cannot.
    """

    # Whether other users of the same ranks have it, too: nobody closes it then.
    is_shared = False

    def __init__(self, mpi: MPI.Intracomm, node_color: int | None = None) -> None:
        self.mpi: Any = mpi
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.host = MPI.Get_processor_name()
        if node_color is None:
            node = cast(MPI.Intracomm, mpi.Split_type(MPI.COMM_TYPE_SHARED, key=mpi.rank))
            if not _shares_files(node):
                node.Free()
                node = cast(MPI.Intracomm, mpi.Split(mpi.rank))
        else:
            node = cast(MPI.Intracomm, mpi.Split(node_color, key=mpi.rank))
        identity = new_identity()
        if identity[0] % _COLLECTED_EVERY == _COLLECTED_EVERY - 1:
            gc.collect()
        told: list[_Introduction] = mpi.allgather(_Introduction(
            node.bcast(mpi.rank), this_process(self.host), identity, offered()
        ))
        give_back_offered([one.offered for one in told])
        leaders = [one.leader for one in told]
        order = sorted(set(leaders))
        self.node_index = order.index(leaders[mpi.rank])
        self.node_sizes: tuple[int, ...] = tuple(leaders.count(leader) for leader in order)
        self.processes = tuple(one.process for one in told)
        self._handles = _Handles(told[0].identity, [mpi, node])
        self._node: MpiCommunicator | None = _NodeCommunicator(
            node, self._handles, [one.process for one in told if one.leader == leaders[mpi.rank]]
        )
        self._lane: MpiCommunicator | None = None
        self._siblings: dict[str, MpiCommunicator] = {}
        self._channel: MPI.Intracomm | None = None
        self._tag = 0
        self._flag = bytearray(8)

    @property
    def node(self) -> Communicator:
        """Local. See `Communicator.node`."""
        # None in the node's own communicator: a reference to itself would leave it to the garbage collector.
        return self if self._node is None else self._node

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        if WATCH.dead:
            self.require_whole("a barrier")
        self.mpi.Barrier()

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all ranks, in the order of the ranks."""
        if WATCH.dead:
            self.require_whole("an exchange between ranks")
        return cast("list[T]", self.mpi.allgather(value))

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Collective. The picklable value of rank `root`."""
        if WATCH.dead:
            self.require_whole("an exchange between ranks")
        return cast(T, self.mpi.bcast(value, root))

    def all_reduce_max(self, value: int) -> int:
        """Collective. The largest of the ranks' integers."""
        if WATCH.dead:
            self.require_whole("an agreement between ranks")
        self._flag[:] = value.to_bytes(8, "little", signed=True)
        self.mpi.Allreduce(MPI.IN_PLACE, [self._flag, 1, MPI.INT64_T], MPI.MAX)
        return int.from_bytes(self._flag, "little", signed=True)

    def close(self) -> None:
        """Collective. See `Communicator`; nothing where others use it, too."""
        if not self.is_shared:
            super().close()

    def drop(self) -> None:
        """Local. See `Resource.drop`; nothing where others use it, too."""
        if not self.is_shared:
            super().drop()

    def open_lane(self) -> Communicator | None:
        """Collective at the first call, then Local. See `Communicator.open_lane`."""
        if len(self.node_sizes) == 1:
            return None
        lanes = min(self.node_sizes)
        if self._lane is None:
            self.require_whole("opening lanes between nodes")
            # Kept, since all strategies over these ranks use it. Ranks without a lane share one color that no lane has,
            # since all ranks must take part in Split. In its lane each rank counts as a node of its own.
            mpi = cast(MPI.Intracomm, self.mpi.Split(min(self.node.rank, lanes), self.node_index))
            self._lane = MpiCommunicator(mpi, node_color=mpi.rank)
        return self._lane if self.node.rank < lanes else None

    def open_sibling(self, purpose: str) -> Communicator:
        """Collective at the first call for a purpose, then Local. See `Communicator.open_sibling`."""
        if purpose not in self._siblings:
            self.require_whole(f"opening a communicator for {purpose}")
            self._siblings[purpose] = MpiCommunicator(self.mpi.Dup())
        return self._siblings[purpose]

    def open_channel(self) -> Channel:
        """Collective. See `Communicator.open_channel`."""
        if self._channel is None:
            self.require_whole("opening a channel")
            self._channel = self.mpi.Dup()
            self._handles.append(self._channel)
        self._tag += 1
        return Channel(self, self._channel, self._tag % _TAGS)

    def split(self, color: int, key: int = 0) -> Communicator:
        """Collective. A communicator of the ranks with the same color."""
        self.require_whole("splitting a communicator")
        return MpiCommunicator(self.mpi.Split(color, key))

    def _end(self, *, is_collective: bool) -> None:
        lane = [] if self._lane is None else [self._lane]
        end_all((*self._siblings.values(), *lane), is_collective=is_collective)
        if is_collective and not MPI.Is_finalized():
            self._handles.free()
        else:
            self._handles.drop()

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size}, nodes={self.node_sizes})"


class _NodeCommunicator(MpiCommunicator):
    """The ranks of one node. Their node is this communicator itself.

    Args:
        mpi: Over the ranks of the node.
        handles: Of the whole communicator, of which this one is a part.
        processes: Of the ranks of the node.
    """

    def __init__(self, mpi: MPI.Intracomm, handles: _Handles, processes: Sequence[Process]) -> None:
        self.mpi = mpi
        self.rank = mpi.rank
        self.size = mpi.size
        self.host = processes[mpi.rank].host
        self.node_index = 0
        self.node_sizes = (mpi.size,)
        self.processes = tuple(processes)
        self._node = None
        self._handles = handles
        self._siblings = {}
        self._lane = None
        self._channel = None
        self._tag = 0
        self._flag = bytearray(8)

    def _end(self, *, is_collective: bool) -> None:
        """Local. Nothing: it is closed with the communicator that it is a part of."""


def open_mpi_communicator(user: MPI.Intracomm | None, purpose: str) -> Communicator:
    """Collective. Our duplicate of `user` (default: all ranks) for a purpose; see `communicator.open_communicator`."""
    if user is None:
        _check_launcher()
        user = MPI.COMM_WORLD
    elif not isinstance(user, MPI.Intracomm) or user == MPI.COMM_NULL:
        raise TypeError(
            f"`communicator` must be an mpi4py intracommunicator, got {user!r}: pass MPI.COMM_WORLD, or a communicator "
            "made from it by Split or Dup"
        )
    if user.size == 1:
        return SoloCommunicator()
    duplicates = cast("_Duplicates | None", user.Get_attr(_DUPLICATES))
    if duplicates is None:
        duplicates = _Duplicates({}, None)
        user.Set_attr(_DUPLICATES, duplicates)
    if purpose not in duplicates.by_purpose:
        mpi = user.Dup()
        # An error of MPI becomes a Python exception, and the job ends with its traceback. MPI's default handler would
        # end the process without one.
        mpi.Set_errhandler(MPI.ERRORS_RETURN)
        # Messages between processes that share no communicator of ours are reported there: a death must not end us.
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        communicator = MpiCommunicator(mpi)
        communicator.is_shared = True
        # One rank's environment counts for all: a rank without hooks takes no leave, and others would wait for it.
        if not communicator.all_reduce_max(int(ending.is_switched_off())):
            ending.install(
                communicator.rank, communicator.size, communicator.host, MPI.COMM_WORLD.Abort, MPI.Is_finalized,
                _find_dead_ranks,
            )
        WATCH.watch(communicator.processes, communicator.rank)
        WATCH.take_notices(has_other_hosts=len({process.host for process in communicator.processes}) > 1)
        if duplicates.farewell is None:
            duplicates.farewell = ending.Farewell(communicator.open_channel().mpi)
        duplicates.by_purpose[purpose] = communicator
    return duplicates.by_purpose[purpose]


def _find_dead_ranks(error: BaseException) -> list[str]:
    """The names of the ranks whose death an error of MPI reports (MPI 5.0, chapter 12; before it, ULFM)."""
    if not isinstance(error, MPI.Exception):
        return []
    classes = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")}
    if error.Get_error_class() not in classes:
        return []
    try:
        world = MPI.COMM_WORLD.Get_group()
        failed = MPI.COMM_WORLD.Get_failed()
        ranks = MPI.Group.Translate_ranks(failed, list(range(failed.size)), world)
    except (MPI.Exception, NotImplementedError):
        ranks = []
    return [f"rank {rank} of {MPI.COMM_WORLD.size}" for rank in ranks] or ["a rank"]


def _check_launcher() -> None:
    place = launch.read()
    if place is not None and place.size > 1 and MPI.COMM_WORLD.size == 1:
        # MPICH's text has many lines, Open MPI's ends in a NUL.
        library = " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split())
        raise LauncherError(
            f"launcher and MPI library do not match: {place.launcher} started {place.size} ranks, but {library} sees "
            "1. Start the program with the mpirun of the MPI that mpi4py loads (`python -c 'from mpi4py import MPI; "
            "print(MPI.Get_library_version())'`); under srun choose the --mpi= of that library (pmix for Open MPI, "
            "pmi2 for MPICH)"
        )


def _shares_files(node: MPI.Intracomm) -> bool:
    """Whether every rank of the node can open a file that the node's first rank has made in shared memory."""
    for has_name in (False, True):
        file = None
        # If the file cannot be made, the other ranks cannot open it, and every rank counts as a node of its own.
        with contextlib.suppress(OSError):
            file = SharedFile(SHARED_MEMORY, has_name=has_name) if node.rank == 0 else None
        shown = node.bcast(None if file is None else file.shown)
        is_seen = shown is not None
        try:
            if shown is not None:
                os.close(open_shared(shown, SHARED_MEMORY))
        except OSError:
            is_seen = False
        # Not `allreduce`: mpi4py holds the interpreter's lock in it.
        everywhere = all(node.allgather(is_seen))
        if file is not None:
            file.close()
        if everywhere:
            return True
    return False
