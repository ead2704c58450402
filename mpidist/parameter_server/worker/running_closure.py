"""The reads and changes of a closure while it runs."""

from __future__ import annotations

from typing import NamedTuple

from mpidist.arrays import AnyArray
from mpidist.parameter_server.heap.push_slot import Pushed
from mpidist.parameter_server.heap.rows import RowChanges
from mpidist.parameter_server.protocol.messages import Do


class Added(NamedTuple):
    """An addition of a closure to a variable.

    Attributes:
        kind: "add" or "sub", as of `Change`.
        place: Where on the server what was added is.
    """

    kind: str
    place: int


class RunningClosure:
    """The reads and the changes of a running closure.

    Args:
        do: Its message.

    Attributes:
        do: The same.
        pushed: What it sends to servers, by their ranks.
        optimizers: The numbers of those whose steps it makes, in their order.
        values: The values of variables, by number, as this closure sees them.
        added: By the numbers of variables, what was changed and is not in `values`, since most closures never read it.
        stepped: The names of optimizers, by the numbers of the variables that they will change on the servers.
    """

    def __init__(self, do: Do) -> None:
        self.do = do
        self.pushed: dict[int, Pushed] = {}
        self.optimizers: list[int] = []
        self.values: dict[int, AnyArray] = {}
        self.added: dict[int, list[Added | RowChanges]] = {}
        self.stepped: dict[int, str] = {}

    def add_rows(self, kind: str, number: int, name: str, numbers: AnyArray, values: AnyArray) -> None:
        """Local. Note a change of rows; neighbouring changes of one variable are kept together.

        Args:
            kind: See `RowChanges.add`.
            number: The number of the variable.
            name: The name of the variable.
            numbers: See `RowChanges.add`.
            values: Likewise.
        """
        added = self.added.setdefault(number, [])
        last = added[-1] if added else None
        if not isinstance(last, RowChanges):
            last = RowChanges(name)
            added.append(last)
        last.add(kind, numbers, values)
