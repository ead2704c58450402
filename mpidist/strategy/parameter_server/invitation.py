"""The chief's side of joining: it invites workers by a file, and sends each its place and its initial state."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import shlex
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpidist.arguments import described
from mpidist.cluster.spec import Addresses
from mpidist.comm.group import agreement
from mpidist.comm.windows.sockets.join_file import JoinFile, WrittenFile
from mpidist.comm.windows.sockets.joined_window import Neighbours
from mpidist.comm.windows.sockets.newcomers import Desk, Introduction, Newcomer
from mpidist.comm.windows.sockets.window import SocketWindow
from mpidist.comm.windows.window import Window
from mpidist.parameter_server.heap.layout import Slots
from mpidist.parameter_server.options import Pace, ServerOptions
from mpidist.version import __version__

if TYPE_CHECKING:
    from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

logger = logging.getLogger("mpidist")

# It may find others silent for once this time, and must then have joined.
_PATIENCE = 3

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class Welcome(NamedTuple):
    """The data that a joining worker needs.

    Attributes:
        introduction: The introduction of the worker.
        place: The index of its place.
        first: The rank whose slots it has.
        chief: The chief's rank.
        workers: The ranks that were workers at the beginning.
        servers: The ranks of the servers.
        neighbours: The window's ranks.
        slots: The slots of each heap: the ranks that push from the beginning, and the size of a slot.
        options: The options of the chief's strategy.
        pace: The pace of the chief's strategy.
        cluster: The dictionary of `ClusterSpec.as_dict`.
        path: The places where the chief looks for modules.
        directory: Its working directory.
    """

    introduction: Introduction
    place: int
    first: int
    chief: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    neighbours: Neighbours
    slots: tuple[tuple[int, ...], int]
    options: ServerOptions
    pace: Pace
    cluster: Mapping[str, Addresses]
    path: list[str]
    directory: str


def checked_directory(given: object) -> Path | None:
    """Local. The directory in which the file of the job is to be.

    Raises:
        TypeError: `given` is no path.
        ValueError: `given` is empty.
    """
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"`join_directory` must be the path of a directory, or None, got {described(given)}")
    if not os.fspath(given) or not isinstance(os.fspath(given), str):
        raise ValueError(f"`join_directory` must be the path of a directory, such as 'job', got {described(given)}")
    return Path(given).absolute()


class Invitation:
    """The chief's invitation to workers. A worker has no place before the coordinator gives it one.

    Args:
        strategy: The strategy of the chief.
        window: The window of the chief.
        slots: The slots of each heap.
        desk: The desk at which workers ask.
        file: The file by which they find the desk.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, window: SocketWindow, slots: Slots, desk: Desk, file: WrittenFile
    ) -> None:
        self._strategy = strategy
        self._window = window
        self._slots = slots
        self._desk = desk
        self.file = file
        # The ranks that were given to processes that have not joined yet, with the times when that is over, and those
        # that have, and are not taken.
        self._given: dict[int, float] = {}
        self._arrived: list[int] = []

    @property
    def command(self) -> str:
        """Local. The line by which a worker joins."""
        return f"mpidist worker --join {shlex.quote(str(self.file.path.parent))}"

    def note(self, rank: int) -> None:
        """Local. Note that a worker has joined; see `take_joined`."""
        if self._given.pop(rank, None) is not None:
            self._arrived.append(rank)

    def arrived(self) -> list[int]:
        """Local. The ranks that have joined since the last call; each has its place now."""
        arrived, self._arrived = self._arrived, []
        for rank in arrived:
            self._strategy.places.take(rank)
        return arrived

    def before(self, rank: int) -> list[int]:
        """Local. The ranks that had the place of a rank before it."""
        ranks = self._strategy.places.all_of(self._strategy.places.index_of(rank))
        return ranks[: ranks.index(rank)]

    def look(self, living: Collection[int], has_work: Callable[[int], bool]) -> None:
        """Local. Answer processes that ask for a place, as far as that can be decided now.

        Args:
            living: The ranks of workers that are not lost.
            has_work: Whether a rank has work that has not ended: its update may still be in its slots.
        """
        now, dead = time.monotonic(), self._window.lost()
        for rank in [rank for rank, end in self._given.items() if rank in dead or now > end]:
            what = "has ended before it had joined" if rank in dead else "did not arrive; its place is free again"
            logger.warning("%s (rank %d) %s", self._strategy.places.name_of(rank), rank, what)
            del self._given[rank]
            self._strategy.give_up(rank)
        while (request := self._desk.first()) is not None:
            reason = _why_not(request.newcomer)
            taken = {self._strategy.places.index_of(rank) for rank in self._given}
            ranks = self._strategy.places.ranks
            free = [index for index, rank in enumerate(ranks) if rank not in living and index not in taken]
            if not reason and not free:
                reason = (
                    f"no place is free: all {len(ranks)} workers of the job are running, or are being replaced. A new "
                    "worker takes the place of a lost one"
                )
            if reason:
                process = request.newcomer.process
                logger.warning("process %d on %s may not join: %s", process.number, process.host, reason)
                request.refuse(reason)
                self._desk.pop()
                continue
            clear = [index for index in free if not any(map(has_work, self._strategy.places.all_of(index)))]
            if not clear:
                return
            self._desk.pop()
            welcome = self._welcome(request.newcomer, clear[0])
            logger.warning(
                "process %d on %s joins as worker %d (rank %d)", request.newcomer.process.number,
                request.newcomer.process.host, clear[0], welcome.introduction.rank,
            )
            request.welcome(welcome.introduction, pickle.dumps(welcome))

    def _welcome(self, newcomer: Newcomer, index: int) -> Welcome:
        strategy, window = self._strategy, self._window
        roles, before = strategy.roles, strategy.places.all_of(index)
        rank = strategy.places.give(index, newcomer.process)
        self._given[rank] = time.monotonic() + _PATIENCE * strategy.options.window.silence_seconds
        introduction = Introduction(rank, newcomer.process, newcomer.address, tuple(before))
        first = roles.group.size
        addresses = {one: window.door.addresses[one] for one in (roles.chief, *roles.servers)}
        return Welcome(
            introduction, index, before[0], roles.chief, roles.workers, roles.servers,
            Neighbours(window.heap_sizes[:first], tuple(roles.group.processes), addresses),
            (tuple(self._slots.ranks), self._slots.slot_bytes), strategy.options, strategy.pace,
            roles.resolver.cluster_spec().as_dict(), sys.path, str(Path.cwd()),
        )

    def close(self) -> None:
        """Local. Invite no process any more, and refuse those that ask."""
        self.file.remove()
        self._desk.close()


def invite(
    window: Window, slots: Slots, strategy: ParameterServerStrategy, directory: Path
) -> Invitation | None:
    """Collective. Invite workers; None on all ranks but the chief.

    Args:
        window: The window to the others.
        slots: The slots of each heap.
        strategy: The strategy of this rank.
        directory: The directory of the file.

    Raises:
        ValueError: There is no other rank; on every rank.
        OSError: The directory cannot be used; on every rank.
    """
    roles = strategy.roles
    return agreement.together(
        roles.group, "inviting workers to join",
        functools.partial(_invite, window, slots, strategy, directory) if roles.group.rank == roles.chief else _nobody,
    )


def _invite(
    window: Window, slots: Slots, strategy: ParameterServerStrategy, directory: Path
) -> Invitation:
    if not isinstance(window, SocketWindow):
        raise ValueError(
            "`join_directory` is for a job of several ranks, which replaces lost workers; this process is alone. Leave "
            "it out, or start the job with mpirun"
        )
    door, options = window.door, strategy.options.window
    rank, host = window.rank, socket.gethostname()
    content = JoinFile(
        __version__, host, os.getpid(), rank, door.addresses[rank], door.secret, options.silence_seconds, options.ports
    )
    file = WrittenFile(directory, content, door.addresses[rank])
    desk = Desk(door.addresses[rank])
    door.open_desk(desk)
    invitation = Invitation(strategy, window, slots, desk, file)
    logger.info("workers join by: %s", invitation.command)
    return invitation


def _nobody() -> None:
    """This rank invites no worker."""


def _why_not(newcomer: Newcomer) -> str:
    """The reason for which a process cannot be a worker of this job, wherever there is room; empty if it can."""
    mine = (__version__, PYTHON)
    if (newcomer.version, newcomer.python) != mine:
        return (
            f"the job runs mpidist {mine[0]} and Python {mine[1]}, and this worker mpidist {newcomer.version} and "
            f"Python {newcomer.python}: functions are sent as Python's own code. Start it in the job's environment"
        )
    return ""
