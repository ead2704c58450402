"""The word of a worker that has joined: the first one that it sends to the coordinator and to each server."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from mpidist.parameter_server.heap.layout import Slots
from mpidist.parameter_server.protocol.messages import Call, Message

_NAME = "joined"


def joined(first: int) -> Message:
    """Local. The word of it, which nobody answers.

    Args:
        first: The rank whose slots this worker has, which was the first worker in its place.
    """
    return Call(0, _NAME, pickle.dumps(first))


class JoinTaker:
    """The role that takes it. It stands before others, which would keep it back, or refuse it.

    Args:
        note: Called with the rank that has joined, and the one whose slots it has.
    """

    def __init__(self, note: Callable[[int, int], None]) -> None:
        self._note = note

    def take(self, sender: int, message: Message) -> bool:
        """Local. See `Role.take`."""
        if isinstance(message, Call) and message.name == _NAME:
            self._note(sender, int(pickle.loads(message.arguments)))
            return True
        return False


def taker_of(slots: Slots) -> JoinTaker:
    """Local. The role of a server: what the workers before in this place have pushed is applied, or dropped."""

    def note(rank: int, first: int) -> None:
        slots.joined[rank] = first

    return JoinTaker(note)
