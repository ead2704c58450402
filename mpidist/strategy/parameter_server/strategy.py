"""`ParameterServerStrategy`: variables on servers, which workers update asynchronously."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

from mpidist import context
from mpidist.arguments import described, flag
from mpidist.cluster.launch_line import warn_of_deaths
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.roles.server_roles import ServerRoles, agree_on_roles
from mpidist.comm.group import agreement
from mpidist.comm.group.communicator import SERVED
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.group.resource import end_all
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.comm.windows.window import Window, open_window
from mpidist.errors import DeadRankError
from mpidist.failures import ending
from mpidist.failures.deaths import WATCH
from mpidist.failures.exit_code import watch_code
from mpidist.observe.output import flush, say
from mpidist.options import RunOptions
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.heap.join_notice import take_joined
from mpidist.parameter_server.heap.layout import slots_of
from mpidist.parameter_server.options import ServerOptions, pace_of
from mpidist.parameter_server.protocol.end_notice import EndNotice
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Send
from mpidist.parameter_server.protocol.thread_guard import Whole
from mpidist.parameter_server.server.server import VariableServer
from mpidist.parameter_server.worker.worker import Worker
from mpidist.strategy.base import Strategy
from mpidist.strategy.parameter_server.extended import ServedExtended
from mpidist.strategy.parameter_server.invitation import Invitation, checked_directory, invite
from mpidist.strategy.parameter_server.parts import Parts, open_parts, station_of
from mpidist.strategy.parameter_server.worker_places import WorkerPlaces
from mpidist.strategy.replica import ReplicaContext
from mpidist.variables.arena import Arena
from mpidist.variables.making.partitioners import Partitioner
from mpidist.variables.replicas import Replicas
from mpidist.variables.variable import Home

T = TypeVar("T")

_LAST_SECONDS = 0.2  # for messages of the end, after a death


class ParameterServerStrategy(Strategy):
    """Collective. Variables are on parameter servers. A coordinator gives functions to workers, which update them.

    On the chief, and on an evaluator, the program continues: it makes variables in `scope()` and gives functions to a
    `ClusterCoordinator`. The ranks of workers and servers serve inside this constructor, and exit when the chief's
    program ends. Of the arguments after `serve` the chief's values count.

    Args:
        cluster_resolver: Describes the chief, the workers and the servers (the job "ps"); default: TF_CONFIG where it
            is set. A process without a launcher is all of them.
        variable_partitioner: A function that chooses the number of shards of each variable along its first axis, for
            instance one of `mpidist.experimental.partitioners`. A variable of several shards is a `ShardedVariable`.
            Default: each variable is on one server. The chief's value counts.
        communicator: An mpi4py communicator of the ranks that take part; default: all ranks of the job.
        serve: Whether workers and servers serve inside the constructor; with False they return from it, and then call
            `serve`.
        options: The memory and the transport of the servers.
        staleness: The largest number of other functions' updates that may be applied between a function's reads and its
            own update; further updates wait for it. At most `staleness` + 1 functions run at a time. Default: no limit.
        synchronous: Whether all workers read the same version of the variables, and the mean of their gradients makes
            the next one, in one step of the optimizer.
        backup_workers: The number of workers for whose gradients an update does not wait, with `synchronous`; gradients
            that come later are dropped.
        join_directory: A directory of this user's for workers that join the running job, each in the place of a lost
            one: `mpidist worker --join DIRECTORY`. The chief writes a file there with the secret of the job, which is
            removed at its end. Ranks then communicate by sockets, and listen at TCP ports. Default: no worker can join.

    Raises:
        ValueError: The cluster does not fit, or the options do not; on every rank.
        LauncherError: Tasks and ranks do not fit together.
        RuntimeError: The other ranks serve a strategy that was made before.
        OSError: A host has too little shared memory for the heaps of its servers, or `join_directory` cannot be used;
            on every rank.
        HeapFullError: There is no memory for the slots of a heap; on every rank.

    Attributes:
        roles: The role of each rank.
        options: The options of the chief.
        pace: `staleness`, `synchronous` and `backup_workers`, the chief's.
        places: The places of the workers, with the rank that has each.
        invitation: On the chief, the invitation to workers that join; None without `join_directory`.
        chief: The home of variables on the chief; None on other ranks.
    """

    _extended_class = ServedExtended

    def __init__(  # noqa: PLR0913  # keywords
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        communicator: object | None = None,
        serve: bool = True,
        options: ServerOptions | None = None,
        staleness: int | None = None,
        synchronous: bool = False,
        backup_workers: int = 0,
        join_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise ValueError(f"`cluster_resolver` must be a ClusterResolver, got {cluster_resolver!r}")
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise ValueError(
                "`variable_partitioner` must be a function of shape and dtype, as those of "
                f"mpidist.experimental.partitioners are, got {described(variable_partitioner)}"
            )
        if options is not None and not isinstance(options, ServerOptions):
            raise ValueError(f"`options` must be ServerOptions, got {options!r}")
        flag("serve", serve)
        pace = pace_of(staleness, synchronous, backup_workers)
        directory = checked_directory(join_directory)
        ranks = open_communicator(communicator)
        self.roles = roles = agree_on_roles(ranks, cluster_resolver)
        warn_of_deaths(ranks)
        # A `Server` does not have them, and the places of slots must be the same on all ranks.
        given = options or ServerOptions(), pace, directory
        self.options, self.pace, directory = roles.group.broadcast_object(given, roles.chief)
        if roles.workers:
            # An evaluator has none.
            self.pace.require_workers(len(roles.workers))
        self._be_alone(WorkerPlaces(roles))
        is_evaluator = roles.task_type == "evaluator"
        replicas = Replicas(SoloCommunicator())
        homes = [] if is_evaluator else self._open(roles, directory, replicas, variable_partitioner)
        super().__init__(replicas, homes[0] if homes else Arena(replicas), cluster_resolver=roles.resolver)
        for home in homes[1:]:
            home.set_strategy(self)
        if serve and ranks.size > 1:
            # An evaluator continues as well: it ends with the chief.
            needed = () if is_evaluator else (roles.chief, *roles.servers)
            others = (roles.group.processes[one] for one in needed if one != roles.group.rank)
            ending.tolerate_deaths(others, leads=self.chief is not None)
            SERVED.add(ranks)
        self._settle(ParameterServerStrategy)
        if serve and self.chief is None and not is_evaluator:
            self._serve_and_leave()
            # The lines below are the chief's.
            sys.exit(self._code)

    def _be_alone(self, places: WorkerPlaces) -> None:
        """Set this rank up without parts, as an evaluator; see `_have`."""
        self.places = places
        self.chief: Chief | None = None
        self.invitation: Invitation | None = None
        self._station: Station | None = None
        self._worker: Worker | None = None
        self._has_ended = self._is_whole_group = False
        self._code = 0

    def _open(
        self, roles: ServerRoles, directory: Path | None, replicas: Replicas, partitioner: Partitioner | None
    ) -> list[Home]:
        """Open what this rank serves or uses; returns its homes, as `_have`."""
        rank, group = roles.group.rank, roles.group
        pushers = list(dict.fromkeys((roles.chief, *roles.workers)))
        slots = slots_of(self.options.heap_bytes, pushers, self.options.slot_bytes)
        heap_bytes = self.options.heap_bytes if rank in roles.servers else 0
        window = open_window(group, heap_bytes, self.options.window, directory is not None)
        whole = Whole(replicas.communicator.order) if rank == roles.chief else None
        station = station_of(window, self.places, (roles.chief, *roles.servers), whole)
        make = functools.partial(VariableServer, station, roles.chief, slots, self.options.copy_bytes)
        try:
            # It raises on all ranks, and so does inviting.
            agreement.together(
                group, "allocating memory for the slots of heaps", make if rank in roles.servers else _nothing
            )
            if directory is not None:
                self.invitation = invite(window, slots, self, directory)
        except Exception:
            window.close()
            raise
        if directory is not None:
            take_joined(station, slots, None if self.invitation is None else self.invitation.note)
        homes = self._have(open_parts(
            self, station, slots, self.note_end, partitioner=partitioner,
            worker=roles.workers.index(rank) if rank in roles.workers else None,
        ))
        if self.chief is not None:
            atexit.register(_end_all, weakref.ref(self))
            watch_code()
        return homes

    def _have(self, parts: Parts) -> list[Home]:
        """Set up the parts of this process: on a rank of the job's beginning, and on a worker that has joined.

        Returns:
            The homes of variables on this rank, none on a server. Outside of functions it is the first one: a process
            that is chief and worker makes its variables as the chief.
        """
        self._station, self._listener, self._worker, self.chief = parts
        return [home for home in (self.chief, self._worker) if home is not None]

    @property
    def replica(self) -> ReplicaContext:
        """Local. The replica context inside `run`."""
        return self._replica_context

    def inside(self) -> AbstractContextManager[None]:
        """Local. The context in which a worker runs a function."""
        return self.at_home(cast(Worker, self._worker))

    def _serve_and_leave(self) -> None:
        try:
            self.serve()
        except DeadRankError as error:
            if self._worker is None or not self._worker.is_fenced or ending.is_switched_off():
                raise
            say(str(error))
            flush()
            time.sleep(ending.FORWARD_SECONDS)
            # By a signal, since Open MPI's launcher may end the job after an exit code.
            os.kill(os.getpid(), signal.SIGKILL)

    def serve(self) -> None:
        """Local. Serve as a worker or a server until the chief's program has ended.

        Raises:
            RuntimeError: On the chief, and on an evaluator.
            DeadRankError: The chief or a server is dead.
        """
        station = self._station
        if station is None or self.chief is not None:
            raise RuntimeError(f"serve() is for workers and servers, this rank is {self.roles.task_type}")
        try:
            self._serve(station)
        except DeadRankError:
            raise
        except BaseException as error:
            # Others may wait for its answers, and the program may handle the error.
            station.leave(repr(error))
            raise
        finally:
            if self._worker is not None:
                self._worker.stop()

    def _serve(self, station: Station) -> None:
        while not self._has_ended:
            self._listener.look()
            if self._worker is None:
                station.step(0.05)
                continue
            while station.step():
                pass
            if self._worker.is_fenced:
                raise counted_as_lost(station)
            if not self._worker.work():
                station.step(0.05)
        self._leave(station)

    def _leave(self, station: Station) -> None:
        """Leave the window at the end of the chief's program."""
        if self._is_whole_group:
            with station.awaited(set(range(station.window.size)) - {station.window.rank}, "end the window"):
                station.window.close()
            return
        # Hydra was seen to end all ranks when several end at the same moment after a death, the chief among them.
        while self.roles.chief not in station.window.lost():
            station.window.poll(0.05)
        station.window.drop()

    def run(
        self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> T:
        """Local. Call `fn` in a function that `ClusterCoordinator.schedule` runs; see `Strategy.run`.

        Raises:
            RuntimeError: The call is outside such a function.
        """
        entry = context.innermost()
        if self.roles.task_type != "evaluator" and (entry is None or entry.home is not self._worker):
            raise RuntimeError(
                "strategy.run outside a scheduled function: the chief computes nothing itself. Put the call into a "
                "function, and give that to ClusterCoordinator(strategy).schedule(function)"
            )
        return super().run(fn, args, kwargs, options)

    def work_here(self) -> bool:
        """Local. Run the next closure, where one process is chief and worker; False if there is none."""
        return self.chief is not None and self._worker is not None and self._worker.work()

    def give_up(self, rank: int) -> None:
        """Local. On the chief: treat a worker as dead from now on, even if its process is alive."""
        station = cast(Station, self._station)
        station.lost.add(rank)
        station.window.forget(rank)
        process = self.places.process_of(rank)
        WATCH.note(process, f"rank {rank} of {station.window.size} (process {process.number} on {process.host})")

    def note_end(self, end: EndNotice) -> None:
        """Local. Note that the chief's program has ended."""
        self._has_ended, self._is_whole_group = True, not end.lost
        # In a whole group the chief ends the job, if it has failed.
        self._code = end.code if end.lost or end.is_agreed else 0
        if end.is_agreed:
            self._listener.end_together()
        self._end_lost(end.lost)

    def _end_lost(self, lost: Iterable[int]) -> None:
        """End processes of this host that are treated as dead: the launcher would wait for them."""
        WATCH.note_end()
        for rank in lost:
            WATCH.end(self.places.process_of(rank))

    def end_service(self) -> None:
        """Local. On the chief: let workers and servers exit; later calls change nothing."""
        station = self._station
        if station is None or self.chief is None or self._has_ended or station.window.is_closed:
            return
        # A thread of the coordinator's may be in the window.
        with self.chief.lock:
            self._end_service(self.chief, station)

    def _end_service(self, chief: Chief, station: Station) -> None:
        self._has_ended = True
        if self.invitation is not None:
            self.invitation.close()
        window: Window = station.window
        lost = window.lost() | station.lost | station.left.keys()
        end = EndNotice(ending.exit_code(), tuple(lost), chief.others.is_agreed)
        chief.exit_code_file.write(end.code)
        if lost & {*self.roles.servers}:
            # All others raise the error of that themselves.
            return
        # A save in the background.
        chief.wait_for_snapshot()
        self._end_lost(lost)
        for rank in range(window.size):
            if rank != window.rank and rank not in lost:
                station.send(Send(rank, end.message()))
        if not lost:
            with station.awaited(set(range(window.size)) - {window.rank}, "end the window"):
                window.close()
            return
        # Messages are sent on while this process is in the window. The window ends with the process: others wait for
        # that, and would take a farewell message for a sign of life.
        window.poll(_LAST_SECONDS)

    def _end(self, *, is_collective: bool) -> None:
        # What `on_close` was given may still use the servers.
        end_all([self._extended], is_collective=is_collective)
        self.end_service()
        super()._end(is_collective=is_collective)
        group, station = self.roles.group, self._station
        if station is not None:
            self._listener.silence()
        if self.invitation is not None:
            self.invitation.close()
        if station is not None and station.left:
            # A rank that has left takes part in nothing.
            station.window.drop()
            group.drop()
        elif station is not None and station.window.is_closed and is_collective:
            group.close()
        else:
            group.drop()


def counted_as_lost(station: Station) -> DeadRankError:
    """Local. The error of a worker that is alive, and treated as dead."""
    return DeadRankError(
        f"the coordinator has declared {station.name_of(station.window.rank)} lost (`closure_timeout` exceeded, or its "
        "connection lost) and reassigned its work. This process exits"
    )


def _nothing() -> None:
    """Nothing."""


def _end_all(reference: weakref.ref[ParameterServerStrategy]) -> None:
    strategy = reference()
    if strategy is not None and strategy.chief is not None and strategy.chief.lock.is_ours():
        strategy.end_service()
