"""Sharded variables: arrays whose rows are on several parameter servers, a shard on each."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from mpidist.arguments import described
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import slices_of
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableSynchronization
from mpidist.variables.kinds.served import ServedHome, ServedVariable
from mpidist.variables.scatter import checked_rows
from mpidist.variables.variable import BaseVariable, Read

S = TypeVar("S", bound="ShardedVariable")


class ShardedVariable(BaseVariable):
    """Local. A variable that is cut along its first axis into shards, which are variables themselves.

    A `ParameterServerStrategy` with a `variable_partitioner` makes it. It is read, written and updated as one variable,
    and a checkpoint holds it as one. Each server applies a change of several shards as a whole, but not all servers at
    the same time. Iteration yields the shards, as in tf.distribute.

    Args:
        variables: The shards in their order: served variables of one strategy and one dtype, whose shapes differ only
            in the first dimension.
        name: A name for display and errors.

    Attributes:
        variables: The shards.
        rows: For each shard the rows of the whole variable that it holds.
        served: The home of the shards.

    Raises:
        TypeError: `variables` is no list of variables of parameter servers.
        ValueError: The variables do not fit together, or one is already a shard.
    """

    synchronization = VariableSynchronization.ON_WRITE
    is_sharded_variable = True

    def __init__(self, variables: Sequence[ServedVariable], name: str = "ShardedVariable") -> None:
        if not isinstance(variables, (list, tuple)) or not variables:
            raise TypeError(f"expected a list of variables of parameter servers as shards, got {described(variables)}")
        for one in variables:
            if not isinstance(one, ServedVariable):
                raise TypeError(f"expected variables of parameter servers as shards of {name!r}, got {described(one)}")
            self._require_fitting(one, variables[0], name)
        self.variables = list(variables)
        first = self.variables[0]
        self.rows = slices_of([one.shape[0] for one in variables])
        self.home = first.home
        self.served: ServedHome = first.served
        self.shape = (self.rows[-1].stop, *first.shape[1:])
        self.dtype = first.dtype
        self.name = name
        self.trainable = first.trainable
        self.aggregation = first.aggregation
        self.sparse_gradient = first.sparse_gradient
        for one in variables:
            one.owner = weakref.ref(self)

    @staticmethod
    def _require_fitting(one: ServedVariable, first: ServedVariable, name: str) -> None:
        if one.dtype != first.dtype or not one.shape or one.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"expected shards of {name!r} of one dtype, whose shapes differ in the first dimension only, got "
                f"{first.shape} of {first.dtype} and {one.shape} of {one.dtype}"
            )
        if one.whole is not one:
            raise ValueError(f"variable {one.name!r} is a shard of {one.whole.name!r} already")
        if one.home is not first.home:
            raise ValueError(f"the shards {first.name!r} and {one.name!r} belong to different strategies")

    @property
    def key(self) -> int:
        """Local. The number of its first shard, which identifies the sharded variable."""
        return int(self.variables[0].place.number)

    @property
    def parts(self) -> tuple[BaseVariable, ...]:
        """Local. The shards."""
        return tuple(self.variables)

    @property
    def device(self) -> str:
        """Local. The servers of the shards, in their order."""
        return ", ".join(one.device for one in self.variables)

    def value(self) -> AnyArray:
        """Local. A copy of the whole value, read-only. This process fetches all shards."""
        whole = np.concatenate([one.value() for one in self.variables])
        whole.flags.writeable = False
        return whole

    def write_array(self, array: AnyArray) -> None:
        """Local. See `BaseVariable.write_array`."""
        for one, rows in zip(self.variables, self.rows, strict=True):
            one.write_array(array[rows])

    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Local. See `BaseVariable.add_array`."""
        for one, rows in zip(self.variables, self.rows, strict=True):
            one.add_array(array[rows], method)

    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Local. See `Scatter.scatter`. Only the servers of these rows get a message."""
        given = checked_rows(self, kind, sparse_delta)
        for one, rows in zip(self.variables, self.rows, strict=True):
            here = rows_within(given, rows)
            if len(here.indices):
                one.scatter(kind, here)
        return self

    def read_rows(self, rows: AnyArray) -> AnyArray:
        """Local. See `BaseVariable.read_rows`. Each server gets one request, for its rows."""
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for one, part in zip(self.variables, self.rows, strict=True):
            here = np.flatnonzero((rows >= part.start) & (rows < part.stop))
            if len(here):
                found[here] = one.read_rows(rows[here] - part.start)
        return found

    def __getitem__(self, key: Any) -> Any:
        """Local. Index the whole array. A number or a slice of rows reads only the shards that hold these rows."""
        first, *rest = key if isinstance(key, tuple) and key else (key,)
        if isinstance(first, (int, np.integer)) and not isinstance(first, (bool, np.bool_)):
            row = int(first)
            if not -self.shape[0] <= row < self.shape[0]:
                raise IndexError(f"row {row} of variable {self.name!r} of shape {self.shape} is out of bounds")
            key = (0, *rest)
            return self.read_rows(np.array([row % self.shape[0]]))[key]
        if isinstance(first, slice):
            key = (slice(None), *rest)
            return self._rows_between(np.arange(self.shape[0])[first])[key]
        return self.value()[key]

    def _rows_between(self, numbers: AnyArray) -> AnyArray:
        """Rows at equal distances."""
        if self.sparse_gradient:
            return self.read_rows(numbers)
        found = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        for one, part in zip(self.variables, self.rows, strict=True):
            here = np.flatnonzero((numbers >= part.start) & (numbers < part.stop))
            if len(here):
                found[here] = one.value()[numbers[here] - part.start]
        return found

    def __iter__(self) -> Iterator[Any]:
        """Local. The shards, as in tf.distribute; the rows are those of `value()`."""
        return iter(self.variables)

    def reader(self) -> Read:
        """Local. See `BaseVariable.reader`."""
        readers: dict[int, Read] = {}

        def read(start: int, stop: int) -> AnyArray:
            pieces = [np.empty(0, self.dtype)]
            for number, low, high in self._spans(start, stop):
                if number not in readers:
                    # One shard at a time is here.
                    readers.clear()
                    readers[number] = self.variables[number].reader()
                pieces.append(readers[number](low, high))
            return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

        return read

    def load(self, read: Read) -> None:
        """Local. See `BaseVariable.load`."""
        width = self._width
        for one, rows in zip(self.variables, self.rows, strict=True):
            one.load(_shifted(read, rows.start * width))

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards of the elements [start, stop), by number, with the range in each."""
        width = self._width
        for number, rows in enumerate(self.rows):
            low, high = max(start, rows.start * width), min(stop, rows.stop * width)
            if low < high:
                yield number, low - rows.start * width, high - rows.start * width

    @property
    def _width(self) -> int:
        return int(math.prod(self.shape[1:]))

    def __repr__(self) -> str:
        return (
            f"<mpidist.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}, "
            f"{len(self.variables)} shards on {self.device}>"
        )


def rows_within(given: IndexedSlices, rows: slice) -> IndexedSlices:
    """Local. Those of some rows that a shard has, in their order, with their numbers in the shard.

    Args:
        given: Rows of the whole variable.
        rows: The rows of the shard.
    """
    here = (given.indices >= rows.start) & (given.indices < rows.stop)
    return IndexedSlices(given.values[here], given.indices[here] - rows.start)


def served_parts(variable: BaseVariable) -> list[ServedVariable]:
    """Local. The shards of a variable on servers, or itself; none of another variable."""
    return [one for one in variable.parts if isinstance(one, ServedVariable)]


def _shifted(read: Read, by: int) -> Read:
    return lambda start, stop: read(start + by, stop + by)
