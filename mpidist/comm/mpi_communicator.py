"""The communicator over MPI. Importing this module initializes MPI; no other module imports `mpi4py.MPI`."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any, TypeVar, cast

from mpi4py import MPI

from mpidist import launch
from mpidist.comm import ending
from mpidist.comm.communicator import Communicator, SoloCommunicator
from mpidist.errors import LauncherError

__all__ = ["MPI", "MpiCommunicator", "open_mpi_communicator"]

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")

# The user's communicator carries our duplicates of it, one per purpose, as an MPI attribute (MPI 4.1, section 7.7). A
# table keyed by handles would be wrong: MPI may use the handle of a freed communicator again.
_DUPLICATES = MPI.Comm.Create_keyval()


class MpiCommunicator(Communicator):
    """A group of MPI ranks and their nodes.

    Args:
        mpi: An intracommunicator that nobody else uses.
        node_color: Ranks with equal colors count as one node. Default: the ranks that share memory according to MPI, if
            each of them can really open a file that another has made there. In different containers on one host they
            cannot.
    """

    def __init__(self, mpi: MPI.Intracomm, node_color: int | None = None) -> None:
        self.mpi: Any = mpi
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.host = MPI.Get_processor_name()
        if node_color is None:
            node = cast(MPI.Intracomm, mpi.Split_type(MPI.COMM_TYPE_SHARED, key=mpi.rank))
            if not _token_is_seen(node):
                node.Free()
                node = cast(MPI.Intracomm, mpi.Split(mpi.rank))
        else:
            node = cast(MPI.Intracomm, mpi.Split(node_color, key=mpi.rank))
        leaders = mpi.allgather(node.bcast(mpi.rank))
        order = sorted(set(leaders))
        self.node_index = order.index(leaders[mpi.rank])
        self.node_sizes: tuple[int, ...] = tuple(leaders.count(leader) for leader in order)
        self._node_mpi = node
        self._node: Communicator | None = None
        self._lane: MpiCommunicator | None = None
        self._flag = bytearray(8)

    @property
    def node(self) -> Communicator:
        """Local. See `Communicator.node`."""
        if self._node is None:
            self._node = _NodeCommunicator(self._node_mpi, self.host)
        return self._node

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        self.mpi.Barrier()

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all ranks, in the order of the ranks."""
        return cast("list[T]", self.mpi.allgather(value))

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Collective. The picklable value of rank `root`."""
        return cast(T, self.mpi.bcast(value, root))

    def all_reduce_max(self, value: int) -> int:
        """Collective. The largest of the ranks' integers."""
        self._flag[:] = value.to_bytes(8, "little", signed=True)
        self.mpi.Allreduce(MPI.IN_PLACE, [self._flag, 1, MPI.INT64_T], MPI.MAX)
        return int.from_bytes(self._flag, "little", signed=True)

    def open_lane(self) -> Communicator | None:
        """Collective at the first call, then Local. See `Communicator.open_lane`."""
        if len(self.node_sizes) == 1:
            return None
        lanes = min(self.node_sizes)
        node_rank = self._node_mpi.rank
        if self._lane is None:
            # Kept for good: strategies come and go, and MPI libraries end after some thousand communicators (MPICH:
            # 2,000). Ranks without a lane share one color that no lane has, since all ranks must take part in Split.
            # In its lane each rank counts as a node of its own.
            mpi = cast(MPI.Intracomm, self.mpi.Split(min(node_rank, lanes), self.node_index))
            self._lane = MpiCommunicator(mpi, node_color=mpi.rank)
        return self._lane if node_rank < lanes else None

    def split(self, color: int, key: int = 0) -> Communicator:
        """Collective. A communicator of the ranks with the same color."""
        return MpiCommunicator(self.mpi.Split(color, key))

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size}, nodes={self.node_sizes})"


class _NodeCommunicator(MpiCommunicator):
    """The ranks of one node. Their node is this communicator itself."""

    def __init__(self, mpi: MPI.Intracomm, host: str) -> None:
        self.mpi = mpi
        self.rank = mpi.rank
        self.size = mpi.size
        self.host = host
        self.node_index = 0
        self.node_sizes = (mpi.size,)
        self._node = self
        self._node_mpi = mpi
        self._lane = None
        self._flag = bytearray(8)


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
    duplicates = cast("dict[str, MpiCommunicator] | None", user.Get_attr(_DUPLICATES))
    if duplicates is None:
        duplicates = {}
        user.Set_attr(_DUPLICATES, duplicates)
    if purpose not in duplicates:
        mpi = user.Dup()
        # An error of MPI becomes a Python exception, and the job ends with its traceback. MPI's default handler would
        # end the process without one.
        mpi.Set_errhandler(MPI.ERRORS_RETURN)
        communicator = MpiCommunicator(mpi)
        ending.install(
            communicator.rank, communicator.size, communicator.host, MPI.COMM_WORLD.Abort, mpi.Dup(), MPI.Is_finalized
        )
        duplicates[purpose] = communicator
    return duplicates[purpose]


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


def _token_is_seen(node: MPI.Intracomm) -> bool:
    """Whether every rank of the node can open a file that the node's first rank has written to shared memory."""
    token = secrets.token_hex(16) if node.rank == 0 else ""
    token = node.bcast(token)
    path = SHARED_MEMORY / f"mpidist-token-{token}"
    if node.rank == 0:
        # If the file cannot be written, the other ranks do not find it, and every rank counts as a node of its own.
        with contextlib.suppress(OSError):
            path.write_text(token)
    node.Barrier()
    try:
        seen = path.read_text() == token
    except OSError:
        seen = False
    everywhere = bool(node.allreduce(seen, MPI.LAND))
    if node.rank == 0:
        path.unlink(missing_ok=True)
    return everywhere
