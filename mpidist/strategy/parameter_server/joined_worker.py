"""A worker that joins a running job: `mpidist worker --join DIRECTORY`. It needs no launcher, and no MPI."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.roles.server_roles import ServerRoles
from mpidist.cluster.spec import ClusterSpec
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.comm.windows.sockets.addresses import watch_silence
from mpidist.comm.windows.sockets.handshake import NEWCOMER, RefusedError, greet
from mpidist.comm.windows.sockets.join_file import JoinFile, connect, read
from mpidist.comm.windows.sockets.joined_window import JoinedWindow
from mpidist.comm.windows.sockets.listener import Door, Opened, listen, send_away
from mpidist.comm.windows.sockets.newcomers import Newcomer, ask
from mpidist.errors import DeadRankError, LauncherError
from mpidist.failures.deaths import Process, this_process
from mpidist.observe.output import flush, say
from mpidist.options import WindowOptions
from mpidist.parameter_server.heap.join_notice import joined
from mpidist.parameter_server.heap.layout import Slots
from mpidist.parameter_server.protocol.end_notice import EndNotice
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Do, Message, Send
from mpidist.parameter_server.worker.worker import Worker
from mpidist.strategy.base import Strategy
from mpidist.strategy.parameter_server.invitation import PYTHON, Welcome
from mpidist.strategy.parameter_server.parts import open_parts, station_of
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy, counted_as_lost
from mpidist.strategy.parameter_server.worker_places import WorkerPlaces
from mpidist.variables.replicas import Replicas
from mpidist.version import __version__

# Within these seconds the chief closes its connection to a worker that a server has already turned away.
_VERDICT_SECONDS = 5.0


class _Others(SoloCommunicator):
    """The ranks of the job, which this process shares no communicator with.

    Args:
        rank: The rank of this process.
        processes: The processes of all ranks that have begun the job.
    """

    def __init__(self, rank: int, processes: tuple[Process, ...]) -> None:
        super().__init__()
        self.rank = rank
        self.size = len(processes)
        self.processes = processes


class _JoinedWorker(Worker):
    """A worker whose environment may not be that of the job: its lack of a module is no error of the program."""

    _lack: ImportError | None = None

    def _call(self, function: int, pickled: bytes, do: Do | None = None) -> Any:
        try:
            return super()._call(function, pickled, do)
        except ImportError as error:
            self._lack = error
            raise

    def _send(self, message: Message) -> None:
        if self._lack is None:
            super()._send(message)
            return
        raise LauncherError(
            f"this worker leaves the job, since a function cannot import here what it needs: {self._lack}. Other "
            "workers take over. Modules are searched where the chief searches them, which is in "
            f"{', '.join(filter(None, sys.path))}: start it in the job's environment, on a host that has these "
            "directories"
        ) from self._lack


class JoinedStrategy(ParameterServerStrategy):
    """Local. The strategy of a job, as functions see it on a worker that has joined.

    Args:
        window: The window to the others.
        welcome: The chief's answer.
    """

    def __init__(self, window: JoinedWindow, welcome: Welcome) -> None:
        rank, index = window.rank, welcome.place
        self._window = window
        cluster = SimpleClusterResolver(ClusterSpec(welcome.cluster), task_type="worker", task_id=index)
        group = _Others(rank, tuple(welcome.neighbours.processes))
        self.roles = ServerRoles("worker", index, group, welcome.chief, welcome.workers, welcome.servers, cluster)
        self.options = welcome.options
        self.pace = welcome.pace
        places = WorkerPlaces(self.roles)
        places.give(index, welcome.introduction.process, rank)
        self._be_alone(places)
        station = station_of(window, places, (welcome.chief, *welcome.servers))
        slots = Slots(*welcome.slots, {rank: welcome.first})
        # The chief does not request its signals, which end this process alone.
        homes = self._have(open_parts(self, station, slots, self.note_end, worker=index, kind=_JoinedWorker))
        Strategy.__init__(self, Replicas(SoloCommunicator()), homes[0], cluster_resolver=cluster)
        for other in (*welcome.servers, welcome.chief):
            station.send(Send(other, joined(welcome.first)))
        window.note_joined()
        self._settle(JoinedStrategy)

    def note_end(self, end: EndNotice) -> None:
        """Local. See `ParameterServerStrategy.note_end`; this process ends no others."""
        self._has_ended = True
        self._code = end.code

    def serve(self) -> None:
        """Local. See `ParameterServerStrategy.serve`."""
        try:
            super().serve()
        except DeadRankError:
            # After the notice of the end other ranks may exit before this process has got it.
            if self._has_ended:
                return
            if self._window.is_given_up_by(self.roles.chief):
                raise counted_as_lost(cast(Station, self._station)) from None
            raise

    @property
    def code(self) -> int:
        """Local. The chief's exit code."""
        return self._code

    def _leave(self, station: Station) -> None:
        station.window.drop()


def work(directory: str) -> int:
    """Local. Join the job of a directory as a worker, and serve until its program has ended.

    Args:
        directory: The job's `join_directory`.

    Returns:
        The exit code of the job's chief.

    Raises:
        LauncherError: There is no such job any more, or it refuses this process; the text says why.
        DeadRankError: The chief or a server is dead, or this worker is treated as dead.
    """
    place = Path(directory).absolute()
    with _leaving_at_signals(), _entered(place) as (window, welcome):
        _look_like(welcome)
        _meet(window, welcome)
        strategy = JoinedStrategy(window, welcome)
        try:
            strategy.serve()
        finally:
            strategy.drop()
        return strategy.code


@contextlib.contextmanager
def _leaving_at_signals() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end the worker: they are no error of the function that it runs.

    Its death notifies the others, which take over its work. A program that has handlers of its own keeps them.
    """
    process = os.getpid()

    def leave(number: int, _: object) -> None:
        if os.getpid() == process:
            say(f"this worker leaves the job at {signal.Signals(number).name}; other workers take over")
            flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _meet(window: JoinedWindow, welcome: Welcome) -> None:
    """Connect to all others, before this worker gets any function."""
    unreached = window.meet()
    if not unreached:
        return
    # A server may have closed its connection to a lost worker before the chief closes its own.
    if window.is_given_up_by(welcome.chief, _VERDICT_SECONDS):
        raise LauncherError(
            "the coordinator has declared this worker lost: it took too long to join. Its place is free for others: "
            "start a worker again"
        )
    names = {welcome.chief: "the chief", **{rank: f"ps {index}" for index, rank in enumerate(welcome.servers)}}
    told = []
    for rank in unreached:
        process, address = welcome.neighbours.processes[rank], welcome.neighbours.addresses[rank]
        where = f"port {address.port} of {', '.join(one.partition('/')[0] for one in address.interfaces)}"
        told.append(f"{names[rank]} (rank {rank}, process {process.number} on {process.host}, {where})")
    raise LauncherError(
        f"this worker cannot reach {' and '.join(told)} from {socket.gethostname()}, and a worker connects to the "
        "chief and to all servers. The job continues without it. Open these ports between the hosts "
        "(`WindowOptions(ports=...)` limits the ports), or start the worker on another host"
    )


@contextlib.contextmanager
def _entered(place: Path) -> Iterator[tuple[JoinedWindow, Welcome]]:
    """The window of the job, with the chief's answer."""
    found = read(place)
    if found.version != __version__:
        raise LauncherError(
            f"the job of {place} runs mpidist {found.version}, and this worker is mpidist {__version__}: start it in "
            "the job's environment"
        )
    listeners, mine = listen(True, WindowOptions(ports=found.ports))
    try:
        link = connect(place, found, mine)
        try:
            greet(link, found.secret, NEWCOMER, found.rank)
            process = this_process(socket.gethostname())
            watch_silence(link, found.silence_seconds)
            data = ask(link, Newcomer(process, mine, __version__, PYTHON))
        except RefusedError as error:
            link.close()
            raise LauncherError(f"the job of {place} refuses this worker: {error}") from None
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    welcome: Welcome = pickle.loads(data)
    window = _open(found, welcome, listeners, link)
    try:
        yield window, welcome
    finally:
        window.drop()


def _open(
    found: JoinFile, welcome: Welcome, listeners: list[socket.socket], link: socket.socket
) -> JoinedWindow:
    introduction, neighbours = welcome.introduction, welcome.neighbours
    rank = introduction.rank
    addresses = {**neighbours.addresses, rank: introduction.address}
    for listener in listeners:
        send_away(listener)
    door = Door(listeners, found.secret, rank, addresses, found.silence_seconds, admits_later=True)
    link.setblocking(False)
    lifeline = Opened(welcome.chief, link, is_ours=False)
    return JoinedWindow(introduction, neighbours, door, lifeline, found.silence_seconds)


def _look_like(welcome: Welcome) -> None:
    """Prepare this process as the job's own workers: functions find modules and files where the chief finds them."""
    for one in welcome.path:
        if one not in sys.path and one:
            sys.path.append(one)
    with contextlib.suppress(OSError):
        # Else it is another host's.
        os.chdir(welcome.directory)
    if welcome.directory not in sys.path:
        sys.path.append(welcome.directory)
