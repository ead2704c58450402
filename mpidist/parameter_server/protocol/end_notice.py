"""The notice of the end of the chief's program, for workers and servers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakMethod

from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Call, Message

_NAME = "end"


class EndNotice(NamedTuple):
    """The end of the chief's program.

    Attributes:
        code: The exit code of the program.
        lost: The ranks that are dead, or treated as dead. Where there are none, all ranks end the window together.
        is_agreed: Whether all ranks end with the code, and not the chief alone, which ends the job by it.
    """

    code: int
    lost: tuple[int, ...]
    is_agreed: bool = False

    def message(self) -> Message:
        """Local. The message, which has no answer."""
        return Call(0, _NAME, pickle.dumps(tuple(self)))


def take_end(station: Station, note: Callable[[EndNotice], None]) -> None:
    """Local. Receive the notice of the end.

    Args:
        station: The station of this process.
        note: A method that is called with the notice, unless its object is deleted: a program may drop its strategy.
    """
    reference = WeakMethod(note)

    def take(_: int, message: Message) -> None:
        told = reference()
        if told is not None and isinstance(message, Call):
            told(EndNotice(*pickle.loads(message.arguments)))

    station.route([(Call, _NAME)], take)
