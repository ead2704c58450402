"""The parts of a process in a job with servers: its station, and those that make it a chief, a worker or a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpidist.comm.windows.window import Window
from mpidist.data.input_context import InputContext
from mpidist.failures.peers import Key
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.heap.layout import Slots
from mpidist.parameter_server.protocol.end_notice import EndNotice, take_end
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.signal_relay import Listener
from mpidist.parameter_server.queue.synchronous import versions_of
from mpidist.parameter_server.worker.worker import Worker
from mpidist.strategy.parameter_server.worker_places import WorkerPlaces
from mpidist.variables.making.partitioners import Partitioner

if TYPE_CHECKING:
    from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy


class Parts(NamedTuple):
    """The parts of a process.

    Attributes:
        station: The station.
        listener: The listener for signals to the chief.
        worker: The worker; None on other ranks.
        chief: The chief; None on other ranks.
    """

    station: Station
    listener: Listener
    worker: Worker | None
    chief: Chief | None


def station_of(
    window: Window, places: WorkerPlaces, needed: Sequence[int],
    whole: contextlib.AbstractContextManager[None] | None = None,
) -> Station:
    """Local. The station of this process.

    Args:
        window: The window to the others.
        places: The places of the workers.
        needed: The ranks of chief and servers.
        whole: See `Station`.
    """
    return Station(window, places.name_of, lambda one: Key(*places.process_of(one)), frozenset(needed), whole)


def open_parts(
    strategy: ParameterServerStrategy, station: Station, slots: Slots, note_end: Callable[[EndNotice], None], *,
    worker: int | None, partitioner: Partitioner | None = None, kind: type[Worker] = Worker,
) -> Parts:
    """Local. Make a worker or a chief of this process, or both, and listen to the chief.

    Args:
        strategy: The strategy of this rank, which knows its roles and options.
        station: The station of this process.
        slots: The slots of each heap.
        note_end: A function that is called at the end of the chief's program.
        worker: The index of the worker that this process is; None if it is none.
        partitioner: See `Chief`.
        kind: The class of the worker.
    """
    roles, options = strategy.roles, strategy.options
    made: Worker | None = None
    chief: Chief | None = None
    if worker is not None:
        made = kind(
            station, roles.chief, slots, roles.servers, InputContext(len(roles.workers), worker, 1),
            is_relaxed=options.consistency == "relaxed",
        )
    if station.window.rank == roles.chief:
        versions = versions_of(strategy.pace, len(roles.workers))
        chief = Chief(
            station, roles.servers, slots, versions, partitioner=partitioner, worker=made
        )
    listener = Listener(station, roles.chief)
    take_end(station, note_end)
    return Parts(station, listener, made, chief)
