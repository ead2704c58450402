"""The communicator of one rank, without MPI."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from mpidist.comm.calls.order import CallOrder
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.group.communicator import Channel, Communicator
from mpidist.failures.deaths import Process, this_process
from mpidist.recorder.calls import Calls, LoneCalls

if TYPE_CHECKING:
    from mpidist.comm.calls.messages import BeginMax

T = TypeVar("T")


class SoloCommunicator(Communicator):
    """One rank, without MPI: the communicator of a program that no launcher has started."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.host = socket.gethostname()
        self.node_index = 0
        self.node_sizes: tuple[int, ...] = (1,)
        self.nodes: Sequence[int] = (0,)
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
        """Local. Do nothing: there is no other rank."""

    def barrier(self) -> None:
        """Collective. Returns at once."""

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. A list of `value` alone."""
        return [value]

    def gather_object(self, value: T, flag: int = 0) -> tuple[int, list[T]]:
        """Collective. The flag, and a list of `value` alone."""
        return flag, [value]

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
    def split(self, color: int, key: int = 0, *, is_part: bool = False) -> Communicator:
        """Collective. Another communicator of one rank."""
        return SoloCommunicator()

    def __repr__(self) -> str:
        return "SoloCommunicator()"
