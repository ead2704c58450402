"""The bytes of messages that this process sends for closures: what they cost beside the payload of variables."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import OWN_WRITE, Do, Failed, Finished, Message, Send
from mpidist.parameter_server.protocol.wire import encode
from mpidist.recorder.recorder import RECORDER


@dataclass
class Sent:
    """The amount that this process has sent.

    Attributes:
        messages: The number of messages.
        bytes: The bytes of these messages.
        given: The bytes among them that are the user's: pickled arguments, results and errors.
    """

    messages: int = 0
    bytes: int = 0
    given: int = 0


@dataclass
class Traffic:
    """The messages that this process has sent to ranks of a job with parameter servers, itself among them.

    Attributes:
        total: The bytes of all of them.
        closures: By the number of a closure those that are about it. What a function asks of a server while it runs is
            about it as well.
    """

    total: int = 0
    closures: defaultdict[int, Sent] = field(default_factory=lambda: defaultdict(Sent))

    def note(self, message: Message) -> None:
        """Note a message."""
        size, runs = len(encode(message)), RECORDER.closure
        self.total += size
        if closure := closure_of(message) or (runs.number if runs else 0):
            sent = self.closures[closure]
            sent.messages += 1
            sent.bytes += size
            sent.given += given_by_user(message)


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """The messages of the stations that are made meanwhile."""
    traffic, send_on = Traffic(), Station.send

    def send(station: Station, one: Send) -> None:
        traffic.note(one.message)
        send_on(station, one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Station, "send", send)
        yield traffic


def closure_of(message: Message) -> int:
    """The number of the closure that a message is about; 0 if it is about none."""
    # Push, Commit and Applied of an own write have the number of the write.
    return 0 if getattr(message, "attempt", OWN_WRITE) == OWN_WRITE else int(getattr(message, "closure", 0))


def given_by_user(message: Message) -> int:
    """The bytes of a message that are the user's: the pickled arguments, result or error of a closure."""
    if isinstance(message, Do):
        return len(message.arguments)
    if isinstance(message, Finished):
        return len(message.result)
    return len(message.error) + len(message.traceback) if isinstance(message, Failed) else 0
