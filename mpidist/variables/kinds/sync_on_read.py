"""The sync-on-read variable: each replica has its own value, and reading across replicas aggregates (ON_READ)."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context
from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import together
from mpidist.errors import mark_shared
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.reading import LoadedInBlocks, read_together
from mpidist.variables.variable import BaseVariable, Read
from mpidist.variables.whole_numbers import changed, fitting

S = TypeVar("S", bound="SyncOnReadVariable")
_WIDE = np.dtype(np.int64)


class _Reading(threading.local):
    """A flag of each thread: whether its reads in replica context aggregate."""

    aggregates = False


_reading = _Reading()


@contextmanager
def variable_sync_on_read_context() -> Iterator[None]:
    """Local. A context in which also a read in replica context aggregates an ON_READ variable, which is Collective."""
    before, _reading.aggregates = _reading.aggregates, True
    try:
        yield
    finally:
        _reading.aggregates = before


class OnReadVariable(BaseVariable):
    """A variable of which every replica has its own component (ON_READ), as metrics use it."""

    @property
    @abstractmethod
    def component(self) -> AnyArray:
        """Local. This replica's own value, read-only, whatever the context."""

    @abstractmethod
    def aggregate(self) -> AnyArray:
        """Collective. The components of all replicas, combined; in either context. A copy, read-only.

        Raises:
            ValueError: The aggregation is NONE.
        """

    @abstractmethod
    def accumulate(self, delta: AnyArray) -> None:
        """Local. Add to this replica's own component, whatever the context."""

    @abstractmethod
    def clear(self) -> None:
        """Local. Set this replica's own component to zero, whatever the context."""


class SyncOnReadVariable(OnReadVariable, LoadedInBlocks):
    """Collective. A variable of which every replica keeps its own component, in private memory.

    `mpidist.Variable(..., synchronization=ON_READ)` makes it in a strategy's scope. In replica context reads and writes
    touch this replica's component. In cross-replica context `value()` aggregates.

    Args:
        arena: The arena of the strategy.
        initial: First component: the first replica's; of the same shape and dtype on every rank.
        name: A name for display and errors.
        trainable: Whether `trainable_variables` lists it.
        aggregation: SUM, MEAN, ONLY_FIRST_REPLICA; with NONE it cannot be read in cross-replica context, and a
            checkpoint holds all its components.
    """

    takes_blocks = False

    def __init__(
        self,
        arena: ArenaMemory,
        initial: AnyArray,
        *,
        name: str,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self.home = self.arena = arena
        self.shape = initial.shape
        self.dtype: np.dtype[Any] = initial.dtype
        self.name = name
        self.trainable = False
        self.synchronization = VariableSynchronization.ON_READ
        self.aggregation = aggregation
        self.is_per_replica = aggregation is VariableAggregation.NONE
        self.number = self._number = arena.new_number()
        self._component = np.array(arena.collective.broadcast(arrays.to_host(initial)), order="C")

    @property
    def saved_dtype(self) -> np.dtype[Any]:
        """Local. The dtype of the aggregate: int64 for a SUM of integers, so that it holds the components' sum."""
        is_widened = self.aggregation is VariableAggregation.SUM and self.dtype.kind in "iu"
        return _WIDE if is_widened and self.dtype.itemsize < _WIDE.itemsize else self.dtype

    def coerce(self, value: npt.ArrayLike) -> AnyArray:
        """Local. See `BaseVariable.coerce`; the component is in host memory, and an array on a GPU is copied.

        In cross-replica context of the aggregate's dtype: what is read can be assigned.
        """
        given = arrays.as_array(value)
        takes_sum = self.dtype != self.saved_dtype and given.shape == self.shape and given.dtype.kind in "iu"
        if takes_sum and not self._is_in_replica():
            return fitting(self.name, arrays.to_host(given), self.saved_dtype)
        return arrays.to_host(super().coerce(value))

    @property
    def component(self) -> AnyArray:
        """Local. This replica's own value, read-only, whatever the context."""
        view: AnyArray = self._component.view()
        view.flags.writeable = False
        return view

    def value(self) -> AnyArray:
        """Local in replica context: this replica's component. Collective in cross-replica context: the aggregate.

        Inside `variable_sync_on_read_context` it is the aggregate in replica context, too.
        """
        # Without a strategy the aggregate is a copy of the component.
        is_own = context.in_replica() or (self.is_per_replica and self._is_in_replica())
        return self.component if is_own and not _reading.aggregates else self.aggregate()

    def aggregate(self) -> AnyArray:
        """Collective. The components of all replicas, combined; in either context. A copy, read-only.

        Raises:
            ValueError: The aggregation is NONE.
            OverflowError: A SUM needs more than 64 bits; on every rank.
        """
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self.name!r} is ON_READ with aggregation NONE: its components have no common value. "
                "Create it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA, or read it inside `run`"
            )
        # Metrics look alike: the reduction itself does not distinguish them.
        with self.arena.communicator.order.enter(
            "value of variable number", self._number, None, self.arena.strategy_number, meets=False,
            sign=~self._number,
        ):
            if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                result = self.arena.collective.broadcast(self._component.copy())
            else:
                op = ReduceOp.from_variable_aggregation(self.aggregation)
                result = self.arena.combine(self._component.astype(self.saved_dtype, copy=False), op)
        result.flags.writeable = False
        return result

    def _is_in_replica(self) -> bool:
        # A program begins in the replica context of the default strategy, whose `run` is a plain call.
        return context.in_replica() or (self.arena.is_default and context.innermost() is None)

    def accumulate(self, delta: AnyArray) -> None:
        """Local. Add to this replica's own component, whatever the context.

        Raises:
            OverflowError: A sum of integers does not fit its dtype. The component stays as it is.
        """
        self._add(delta, "accumulate")

    def _add(self, delta: AnyArray, method: str) -> None:
        if self.dtype.kind in "iu":
            delta = fitting(self.name, np.asarray(delta), self.dtype)
            self._component[...] = changed(self.name, self._component, delta, method)
        else:
            np.add(self._component, delta, out=self._component)

    def clear(self) -> None:
        """Local. Set this replica's own component to zero, whatever the context."""
        self._component[...] = 0

    def write_array(self, array: AnyArray) -> None:
        """Local in replica context: set this replica's component. Collective else: set all, so that `array` is read."""
        if self._is_in_replica():
            self._component[...] = array
        else:
            self._spread(self._first_value(array, "assign"))

    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Local in replica context: add to this replica's component. Collective else: add to all components.

        Raises:
            ValueError: In cross-replica context with aggregation SUM: it would be added once for each replica.
        """
        if not self._is_in_replica():
            if self.aggregation is VariableAggregation.SUM:
                raise ValueError(
                    f"variable {self.name!r}: {method} in cross-replica context is not defined for ON_READ with "
                    "aggregation SUM. Call it inside `run`, or assign the whole value"
                )
            array = self._first_value(array, method)
            # The components differ, and one of them may be too large.
            together(self.group, f"{method} of variable {self.name!r}", lambda: self._require_sum(array, method))
        self._add(array, method)

    def _require_sum(self, array: AnyArray, method: str) -> None:
        if self.dtype.kind in "iu":
            changed(self.name, self._component, array, method)

    def _first_value(self, array: AnyArray, method: str) -> AnyArray:
        """Collective. The first replica's array; arrays for other variables look alike."""
        order, owner = self.arena.communicator.order, self.arena.strategy_number
        with order.enter(f"{method} to variable number", self._number, None, owner, meets=False).surround():
            return self.arena.collective.broadcast(array)

    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Local. Refuse: rows are not scattered into ON_READ variables.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"variable {self.name!r}: scatter_{kind} is not supported for ON_READ variables; change a copy of "
            "`v.value()` inside `run` and assign it"
        )

    def reader(self) -> Read:
        """Collective. See `BaseVariable.reader`: of the aggregate; with NONE of this replica's component."""
        flat = (self.component if self.is_per_replica else self.aggregate()).reshape(-1)
        return lambda start, stop: flat[start:stop]

    def load(self, read: Read) -> None:
        """Collective. Set the components so that their aggregate is the saved value; with NONE set this replica's.

        Raises:
            OverflowError: The replicas cannot hold a SUM of integers in their components; on every rank.
        """
        self.put(0, read_together(self, read, 0, self.size))

    @property
    def loaded_here(self) -> tuple[int, int]:
        """Local. See `LoadedInBlocks.loaded_here`."""
        return 0, self.size

    def put(self, start: int, data: AnyArray) -> None:
        """Local. See `LoadedInBlocks.put`: takes the whole value."""
        del start
        self._spread(data.astype(self.saved_dtype, copy=False).reshape(self.shape))

    def _spread(self, array: AnyArray) -> None:
        """Set the components so that their aggregate is `array`: nothing is lost under SUM."""
        replicas = self.arena.replicas.communicator
        if self.aggregation is not VariableAggregation.SUM:
            self._component[...] = array
        elif self.dtype.kind in "iu":
            share, rest = np.divmod(array, replicas.size)
            try:
                # Every rank looks at the least and at the largest share.
                least, largest = (fitting(self.name, one, self.dtype) for one in (share, share + (rest > 0)))
            except OverflowError as error:
                raise mark_shared(error) from None
            self._component[...] = np.where(replicas.rank < rest, largest, least)
        else:
            # Other shares would be rounded, and so would their sums, which may even overflow.
            whole = array if replicas.rank == 0 else np.zeros_like(array)
            self._component[...] = np.where(_divides(array, replicas.size), array / replicas.size, whole)

    def __repr__(self) -> str:
        return (
            f"<mpidist.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}, "
            f"component on rank {self.group.rank}={self._component!s}>"
        )


def _divides(array: AnyArray, n: int) -> AnyArray:
    """Elements where `n` equal shares of a number are exact, and their sums in any order."""
    if array.dtype.kind != "f":
        return np.zeros(array.shape, "bool")
    share = array / n
    # A sum of k <= n shares of b bits has at most b + log2(n).
    room = np.finfo(array.dtype).nmant + 1 - (n - 1).bit_length()
    with np.errstate(invalid="ignore", over="ignore"):
        bits = np.ldexp(np.frexp(share)[0], max(room, 0))
        exact: AnyArray = (share * n == array) & (bits == np.trunc(bits)) & np.isfinite(array)
    return exact
