"""Served variables: arrays in the heaps of parameter servers, which the coordinator makes and workers update."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.kinds.sync_on_read import OnReadVariable
from mpidist.variables.scatter import checked_rows
from mpidist.variables.variable import BaseVariable, Home, Read
from mpidist.variables.whole_numbers import SUBTRACT

S = TypeVar("S", bound="ServedVariable")

# A variable's versions begin with two numbers: the last version that is whole, and the last one that was begun.
HEADER_BYTES = 64


class ServedPlace(NamedTuple):
    """The place of a variable on its server. It travels with functions that name the variable.

    Attributes:
        number: The number of the variable; a slot of an optimizer has a number, too.
        server: The rank of its server.
        header: The place of its version in the heap.
        buffers: The beginnings of its two buffers. Version v is in buffer v % 2.
        shape: The shape of the value.
        dtype: The name of its dtype.
        block_rows: The number of consecutive rows with one version, for a table, whose rows are changed in place and
            which has one buffer. 0 for another variable.
        versions: The place of these versions in the heap, a number of eight bytes each. An odd one is that of rows
            which are being changed.
    """

    number: int
    server: int
    header: int
    buffers: tuple[int, int]
    shape: tuple[int, ...]
    dtype: str
    block_rows: int = 0
    versions: int = 0

    @property
    def size(self) -> int:
        """Local. The number of elements."""
        return int(math.prod(self.shape))

    @property
    def bytes(self) -> int:
        """Local. The size of the value."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def width(self) -> int:
        """Local. The number of elements in a row."""
        return int(math.prod(self.shape[1:]))


class ServedHome(Home, Protocol):
    """The home of served variables, as the coordinator or a worker has it."""

    def here(self) -> ServedHome:
        """Local. The home that reads and writes for the code that runs: itself but for functions in one process."""
        return self

    def pull(self, place: ServedPlace) -> AnyArray:
        """Local. The value of a variable, in an array that the caller does not change."""
        ...

    def push(self, kind: str, place: ServedPlace, array: AnyArray) -> None:
        """Local. Let the server change a variable: in a closure when it is applied, on the coordinator at once.

        Args:
            kind: "assign" or "add"; of integers also "sub", as `BaseVariable.add_array` under `SUBTRACT`.
            place: The place of the variable.
            array: The array of the variable's shape and dtype.

        Raises:
            OverflowError: A sum of integers does not fit, on the coordinator. In closures the server reports it.
        """
        ...

    def pull_rows(self, place: ServedPlace, rows: AnyArray) -> AnyArray:
        """Local. Some rows of a variable; of a table only these are fetched, each of them whole.

        Args:
            place: The place of the variable.
            rows: Their numbers, int64 of shape (n,), in any order; they exist.

        Returns:
            Shape (n, `place.width`): a new array.
        """
        ...

    def push_rows(self, kind: str, place: ServedPlace, rows: IndexedSlices) -> None:
        """Local. As `push`, of some rows.

        Args:
            kind: See `Scatter.scatter`.
            place: The place of the variable.
            rows: The rows of `checked_rows`.
        """
        ...

    def load(self, place: ServedPlace, read: Read) -> None:
        """Local. Set a variable to what `read` gives, piece by piece; see `BaseVariable.load`."""
        ...

    def pause(self) -> AbstractContextManager[None]:
        """Local. Inside, no update of a closure is decided: everything that is read there is of one moment."""
        ...

    def begin_snapshot(self, shares: Mapping[int, Any]) -> Callable[[], dict[int, Any] | None]:
        """Local. Let the servers save their state of this moment, while it continues to change.

        Args:
            shares: The part that each server saves, by its rank: a picklable `SavedShare` of
                `parameter_server.server.snapshot`.

        Returns:
            A function that any thread may call. It returns by rank what the shares have returned, or None while this
            process has not taken the message of every server; and raises the error that a share has raised.
        """
        ...

    def look_at_snapshot(self) -> None:
        """Local. Take the messages that have come while servers save; do not wait."""
        ...

    def wait_for_snapshot(self) -> None:
        """Local. Wait until the servers have saved.

        Raises:
            DeadRankError: A server is dead.
        """
        ...

    def device_of(self, place: ServedPlace) -> str:
        """Local. The device string of a variable, such as "/job:ps/replica:0/task:0/device:CPU:0"."""
        ...


class ServedVariable(BaseVariable):
    """A variable of a `ParameterServerStrategy`. Reading it fetches its value from its server.

    Args:
        home: The home of the strategy.
        place: The place of the variable.
        name: A name for display and errors.
        trainable: Whether `trainable_variables` lists it.
        aggregation: An attribute only: a closure runs on one worker, whose value counts.

    Attributes:
        place: The constructor's argument.
        owner: The `ShardedVariable` of which this is a shard.
    """

    synchronization = VariableSynchronization.ON_WRITE

    def __init__(
        self,
        home: ServedHome,
        place: ServedPlace,
        *,
        name: str,
        trainable: bool = True,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self.home = self.served = home
        self.place = place
        self.shape = place.shape
        self.dtype: np.dtype[Any] = named_dtype(place.dtype)
        self.name = name
        self.trainable = trainable
        self.aggregation = aggregation
        self.sparse_gradient = place.block_rows > 0
        self.owner: weakref.ref[BaseVariable] | None = None

    @property
    def whole(self) -> BaseVariable:
        """Local. The variable of which this one is a shard, else itself."""
        whole = None if self.owner is None else self.owner()
        return self if whole is None else whole

    @property
    def device(self) -> str:
        """Local. The server of the variable."""
        return self.served.device_of(self.place)

    def value(self) -> AnyArray:
        """Local. A copy of the value, read-only. In a closure it is fetched once, and has the closure's own writes."""
        view: AnyArray = self.served.here().pull(self.place).view()
        view.flags.writeable = False
        return view

    def write_array(self, array: AnyArray) -> None:
        """Local. See `BaseVariable.write_array`; in a closure it counts when the closure is applied."""
        self.served.here().push("assign", self.place, array)

    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Local. See `BaseVariable.add_array`; in a closure it counts when the closure is applied."""
        kind = "sub" if method == SUBTRACT and self.dtype.kind in "iu" else "add"
        self.served.here().push(kind, self.place, array)

    def read_rows(self, rows: AnyArray) -> AnyArray:
        """Local. See `BaseVariable.read_rows`. Each row is of one version; they need not be of the same one."""
        return self.served.here().pull_rows(self.place, rows).reshape(len(rows), *self.shape[1:])

    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Local. See `Scatter.scatter`; in a closure it counts when the closure is applied."""
        self.served.here().push_rows(kind, self.place, checked_rows(self, kind, sparse_delta))
        return self

    def reader(self) -> Read:
        """Local. See `BaseVariable.reader`."""
        flat = self.value().reshape(-1)
        return lambda start, stop: flat[start:stop]

    def load(self, read: Callable[[int, int], AnyArray]) -> None:
        """Local. See `BaseVariable.load`."""
        self.served.here().load(self.place, read)

    def __repr__(self) -> str:
        return (
            f"<mpidist.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}, "
            f"on {self.device}>"
        )


class ServedSum(ServedVariable, OnReadVariable):
    """The ON_READ variable of a metric: workers add to one array on a server. A SUM of integers is int64."""

    synchronization = VariableSynchronization.ON_READ

    @property
    def component(self) -> AnyArray:
        """Local. The sum: there is one for all workers."""
        return self.value()

    def aggregate(self) -> AnyArray:
        """Local. The sum."""
        return self.value()

    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Local. Refuse.

        Raises:
            NotImplementedError: Always.
        """
        del sparse_delta
        raise NotImplementedError(
            f"variable {self.name!r} is ON_READ: scatter_{kind} is for ON_WRITE variables, use assign_add"
        )

    def accumulate(self, delta: AnyArray) -> None:
        """Local. Add to the sum."""
        self.add_array(self.coerce(delta))

    def clear(self) -> None:
        """Local. Set the sum to zero."""
        self.write_array(np.zeros(self.shape, self.dtype))
