"""The first message of a worker that has joined, to the coordinator and to each server."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from mpidist.parameter_server.heap.layout import Slots
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Call, Message

_NAME = "joined"


def joined(first: int) -> Message:
    """Local. The message, which has no answer.

    Args:
        first: The rank whose slots this worker has, which was the first worker in its place.
    """
    return Call(0, _NAME, pickle.dumps(first))


def take_joined(station: Station, slots: Slots, arrive: Callable[[int], None] | None = None) -> None:
    """Local. Receive messages of workers that join: each has the slots of the first worker in its place.

    Everything that earlier workers in this place have pushed there is applied by then, or dropped.

    Args:
        station: The station of this process.
        slots: The slots of each heap.
        arrive: A function that is called with the rank of a worker that has joined.
    """

    def take(rank: int, message: Message) -> None:
        if isinstance(message, Call):
            slots.joined[rank] = int(pickle.loads(message.arguments))
            if arrive is not None:
                arrive(rank)

    # Not by the queue, which delays messages in a pause: the next message of this rank names its slots.
    station.route([(Call, _NAME)], take)
