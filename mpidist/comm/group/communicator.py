"""The communicator: a group of ranks that the library owns, and the nodes on which they run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mpidist.comm.calls.order import CallOrder
from mpidist.comm.group.resource import Resource
from mpidist.failures.deaths import WATCH, Process
from mpidist.recorder.calls import Calls

if TYPE_CHECKING:
    from mpidist.comm.calls.messages import BeginMax

T = TypeVar("T")


class Channel(NamedTuple):
    """A place for messages between two ranks, which meet neither other channels' nor a collective's.

    Attributes:
        communicator: The ranks. It keeps the channel open.
        mpi: The mpi4py communicator for the messages.
        tag: The tag of the messages.
    """

    communicator: Communicator
    mpi: Any
    tag: int


class Communicator(Resource, Protocol):
    """A group of ranks. Its messages are separate from the user's own messages.

    `close` frees it. Do not close a communicator that `open_communicator` returned: it is shared, and freed with the
    user's communicator or at the end of the program.

    Attributes:
        rank: This process's rank, 0 to `size` - 1.
        size: Number of ranks.
        host: Name of this process's host.
        node_index: The number of this rank's node. Nodes are numbered in the order of their lowest ranks.
        node_sizes: Number of ranks of each node.
        nodes: The number of each rank's node.
        core_count: Number of cores that the ranks of this node could use together when it was opened. Each rank may be
            bound to a core of its own, or all of them to the same core.
        processes: The process of each rank.
        mpi: The mpi4py communicator, None in a single process.
        calls: The record of communicating calls on it.
        order: The checks that its calls are in one order on all ranks.
    """

    rank: int
    size: int
    host: str
    node_index: int
    node_sizes: tuple[int, ...]
    nodes: Sequence[int]
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
        """Local. Raise if ranks of this group may be unable to take part in a call, as far as this rank knows.

        Args:
            what: The operation, for the text of the error: "opening lanes between nodes".

        Raises:
            DeadRankError: A rank has died.
            InterruptedCallError: A call was interrupted, and other ranks may wait in it without end.
        """
        WATCH.require_alive(self.processes, what)
        self.order.require_whole(what)

    def share_directory(self, directory: str) -> None:
        """Local. Set the directory for the files by which hosts exchange their ranks' states, if the job has none.

        Args:
            directory: A directory on a shared file system, the same on all ranks.
        """
        ...

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        ...

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all ranks, in the order of the ranks."""
        ...

    def gather_object(self, value: T, flag: int = 0) -> tuple[int, list[T]]:
        """Collective. The largest of the ranks' flags; and on rank 0 their picklable values, in their order.

        The other ranks get an empty list.
        """
        ...

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Collective. The picklable value of rank `root`."""
        ...

    def all_reduce_max(self, value: int) -> int:
        """Collective. The largest of the ranks' integers. This is the cheapest way to agree on a flag."""
        ...

    def open_max(self) -> BeginMax:
        """Collective. Open a nonblocking maximum over the ranks, as by `MPI_Iallreduce`.

        Returns:
            `begin(numbers)`, Collective: it starts the reduction, and returns a function that waits for the maxima.
            Only one reduction may be pending at a time.
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
        """Collective. A channel for messages between two ranks; it is closed with this communicator."""
        ...

    def own(self, thing: Any) -> None:
        """Collective. Free an object with this communicator: all ranks then call its `Free()`, in the order of `own`.

        Args:
            thing: The object, which must not refer to this communicator.
        """
        ...

    @property
    def parts(self) -> Sequence[Communicator]:
        """Local. The open communicators of this rank that `split` has made with `is_part`, in their order."""
        return ()

    def split(self, color: int, key: int = 0, *, is_part: bool = False) -> Communicator:
        """Collective. A communicator of the ranks with the same color, ordered by key, then by rank.

        The caller closes it. With `is_part` its calls raise no interrupts: all ranks of this one make other calls.
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
