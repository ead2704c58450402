"""The bytes of messages that this process has sent for closures: what they cost beside the payload of variables."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# So many closures have an account of their own; older ones are in the sum alone.
KEPT = 1000


@dataclass(slots=True)
class Sent:
    """The amount that this process has sent.

    Attributes:
        messages: The number of messages.
        bytes: The bytes of these messages, all told.
        given: The bytes among them that are the user's: pickled arguments, results and errors.
    """

    messages: int = 0
    bytes: int = 0
    given: int = 0

    def add(self, size: int, given: int) -> None:
        """Local. Count a message."""
        self.messages += 1
        self.bytes += size
        self.given += given


class ClosureTraffic:
    """The messages that this process has sent to ranks of a job with parameter servers, itself among them.

    Attributes:
        total: All of them.
        closures: By the number of a closure those that are about it, of the last `KEPT` closures. What a function asks
            of a server while it runs is about it as well.
    """

    def __init__(self) -> None:
        self.total = Sent()
        self.closures: OrderedDict[int, Sent] = OrderedDict()

    def note(self, closure: int, size: int, given: int) -> None:
        """Local. Note a message.

        Args:
            closure: The number of the closure that it is about; 0 if it is about none.
            size: Its bytes.
            given: Those of them that are the user's.
        """
        self.total.add(size, given)
        if closure:
            found = self.closures.get(closure)
            if found is None:
                found = self.closures[closure] = Sent()
                if len(self.closures) > KEPT:
                    self.closures.popitem(last=False)
            found.add(size, given)
