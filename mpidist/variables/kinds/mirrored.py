"""The mirrored variable: one value for all replicas, which collective writes keep the same (ON_WRITE)."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context
from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import same_on_all, together
from mpidist.errors import mark_shared
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist.recorder.calls import Calls, noted
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.memory.slab import SlabRange
from mpidist.variables.reading import BLOCK_BYTES, LoadedInBlocks, block_range, read_together
from mpidist.variables.scatter import ONE_WRITER, apply_rows, checked_rows
from mpidist.variables.variable import BaseVariable, Read
from mpidist.variables.whole_numbers import changed, changed_rows

S = TypeVar("S", bound="MirroredVariable")
T = TypeVar("T")


class _Claim:
    """An owner of the memory of a variable on a GPU."""


class MirroredVariable(BaseVariable, LoadedInBlocks):
    """A variable of an arena.

    `mpidist.Variable` makes it in a strategy's scope. On one rank, or without a strategy, it is a plain variable.

    Args:
        arena: The arena of its strategy.
        address: The memory of the variable in the arena.
        shape: The shape of the value.
        name: A name for display and errors.
        trainable: Whether `trainable_variables` lists it.
        aggregation: How the replicas' values are combined when they write in replica context. NONE takes the first
            replica's, so that replicas cannot drift apart.
        sparse_gradient: Whether its gradients are `IndexedSlices`; see `mpidist.Variable`.

    Attributes:
        claim: While anybody refers to it, no other variable gets this one's memory.
    """

    def __init__(
        self,
        arena: ArenaMemory,
        address: SlabRange,
        shape: tuple[int, ...],
        *,
        name: str,
        trainable: bool = True,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        sparse_gradient: bool = False,
    ) -> None:
        self.home = self.arena = arena
        self.address = address
        self.shape = shape
        self.dtype: np.dtype[Any] = address.slab.dtype
        self.name = name
        self.trainable = trainable
        self.synchronization = VariableSynchronization.ON_WRITE
        self.aggregation = aggregation
        self.sparse_gradient = sparse_gradient
        self.number = address.number
        self._flat = address.readable
        self._view = self._flat.reshape(shape)
        # On a GPU it is of the variable alone, since CuPy's views do not refer to each other.
        self.claim: object = self._flat if arena.namespace is np else _Claim()

    def when_unused(self, call: Callable[..., object], *args: object) -> None:
        """Local. Call a function after the last reference to the variable, its claim, or a view in host memory."""
        weakref.finalize(self.claim, call, *args).atexit = False

    def value(self) -> AnyArray:
        """Local. A live view, read-only, valid until the next write or optimizer step.

        In host memory it stays what it is when the variable is dropped: its memory is used again after the last view.
        """
        return self._view

    def numpy(self) -> AnyArray:
        """Local. A copy of `value()` in host memory. In another thread it waits for the end of a step or a write."""
        with self.arena.guard:
            return super().numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        with self.arena.guard:
            return super().__array__(dtype, copy)

    def read_rows(self, rows: AnyArray) -> AnyArray:
        """Local. See `Scatter.read_rows`."""
        with self.arena.guard:
            return super().read_rows(rows)

    @property
    def calls(self) -> Calls:
        """Local. The record of these ranks' collective calls, with the time limit of the strategy's options."""
        return self.arena.calls

    @noted("assign")
    def write_array(self, array: AnyArray) -> None:
        """Collective. See `BaseVariable.write_array`."""
        self._change("assign to variable number", array, np.copyto)

    @noted("assign_add")
    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Collective. See `BaseVariable.add_array`."""
        name = f"{method} to variable number"
        if self.dtype.kind in "iu":
            self._change(
                name, array, np.copyto,
                lambda delta: self._on_all(lambda: changed(self.name, self._view, delta, method)),
            )
        else:
            self._change(name, array, lambda target, delta: np.add(target, delta, out=target))

    def reader(self) -> Read:
        """Local. See `BaseVariable.reader`: live views; of a variable on a GPU copies in host memory."""
        return self._read if self.arena.namespace is np else self._read_device

    @property
    def device(self) -> str:
        """Local. The place of the value: host memory, or one of the visible GPUs."""
        index = arrays.device_index(self._view)
        return "/device:CPU:0" if index is None else f"/device:GPU:{index}"

    def coerce(self, value: npt.ArrayLike) -> AnyArray:
        """Local. See `BaseVariable.coerce`; the array is in the same memory as the variable, host or GPU."""
        return arrays.move(super().coerce(value), self.arena.namespace)

    @noted("restoring a variable")
    def load(self, read: Read) -> None:
        """Collective. Each rank of a node reads and writes its slice of the node's copy."""
        start, stop = self.loaded_here
        data = read_together(self, read, start, stop)
        # Before: another rank may still be reading the old value. After: all slices must be there when one is read.
        with self.arena.guard:
            self.arena.barrier()
            self.put(start, data)
            self.arena.barrier()
        self.note_loaded()

    @property
    def loaded_here(self) -> tuple[int, int]:
        """Local. See `LoadedInBlocks.loaded_here`; ranks take turns, since some of them may have a block more."""
        if not self.address.slab.is_shared:
            return 0, self.size
        node, number = self.group.node, self.address.number
        turn = node.rank
        if isinstance(number, int) and self.size * self.dtype.itemsize > BLOCK_BYTES:
            turn -= number
        return block_range(self.size, self.dtype.itemsize, turn % node.size, node.size)

    def put(self, start: int, data: AnyArray) -> None:
        """Local. See `LoadedInBlocks.put`."""
        np.copyto(self.address.writable[start : start + data.size], arrays.move(data, self.arena.namespace))

    def _read(self, start: int, stop: int) -> AnyArray:
        return self._flat[start:stop]

    def _read_device(self, start: int, stop: int) -> AnyArray:
        return arrays.to_host(self._flat[start:stop])

    def _on_all(self, call: Callable[[], T]) -> T:
        """The value of a call that raises an OverflowError on every rank, or on none."""
        try:
            return call()
        except OverflowError as error:
            raise mark_shared(error) from None

    def _change(
        self, name: str, array: AnyArray, change: Callable[[AnyArray, AnyArray], object],
        prepare: Callable[[AnyArray], AnyArray] | None = None,
    ) -> None:
        """Change the value by one rank's array.

        Args:
            name: The name of the change.
            array: The array of this replica.
            change: A function that writes, on one rank per copy.
            prepare: A function that makes the written value from the one array, on every rank before the first one
                writes.
        """
        context.require_collectives()
        if context.in_replica():
            array = self._aggregate(array)
        elif self.arena.options.check:
            self._require_same(array, array.tobytes())
        if prepare is None:
            array = self.arena.first_value(array, self.address.slab)
        else:
            # The ranks of one node need not have the same array.
            array = prepare(self.arena.collective.broadcast(array))
        target = self.address.writable.reshape(self.shape)
        self.arena.write(self.address.slab, lambda: change(target, array), name, self.address.number)

    @noted("scatter")
    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Collective. See `Scatter.scatter`."""
        context.require_collectives()
        in_replica = context.in_replica()
        aggregates = in_replica and self.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if aggregates and kind in ONE_WRITER:
            raise mark_shared(NotImplementedError(
                f"variable {self.name!r}: scatter_{kind} inside `run` is defined for the aggregations NONE and "
                f"ONLY_FIRST_REPLICA, which take the first replica's rows, and not for {self.aggregation.name}. Call "
                "it outside `run`"
            ))
        rows = together(
            self.group, f"scatter_{kind} of variable {self.name!r}", lambda: checked_rows(self, kind, sparse_delta)
        )
        slab = self.address.slab
        if aggregates:
            rows = self.arena.combine_rows(rows, ReduceOp.from_variable_aggregation(self.aggregation))
        else:
            if self.arena.options.check and not in_replica:
                self._require_same(rows.values, rows.values.tobytes() + rows.indices.tobytes())
            if self.dtype.kind in "iu" or not (slab.is_shared and len(self.group.node_sizes) == 1):
                rows = self.group.broadcast_object(rows)
        if self.dtype.kind in "iu":
            self._on_all(lambda: changed_rows(self.name, kind, self._view, rows.values, rows.indices))
        target = self.address.writable.reshape(self.shape)
        self.arena.write(
            slab, lambda: apply_rows(kind, target, rows.values, rows.indices),
            f"scatter_{kind} to variable number", self.address.number,
        )
        return self

    def _require_same(self, array: AnyArray, content: bytes) -> None:
        text = np.array2string(arrays.to_host(array), threshold=8, edgeitems=2)
        same_on_all(
            self.group, f"the value written to variable {self.name!r} in cross-replica context",
            f"{text} (checksum {zlib.crc32(content):#x})",
            "Compute it the same way on every rank, or write it inside `run` with an aggregation.",
        )

    def _aggregate(self, array: AnyArray) -> AnyArray:
        if self.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            op = ReduceOp.from_variable_aggregation(self.aggregation)
            return self.arena.combine(array, op).astype(self.dtype, copy=False)
        return array

    def __repr__(self) -> str:
        return (
            f"<mpidist.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}, "
            f"numpy={self._view!s}>"
        )


def create_mirrored(
    arena: ArenaMemory, initial: AnyArray, place: tuple[int, SlabRange],
    make: Callable[[ArenaMemory, SlabRange, tuple[int, ...]], MirroredVariable],
) -> MirroredVariable:
    """Collective. A new variable whose value is the first replica's `initial`.

    Args:
        arena: The arena of the variable.
        initial: The value; its shape and dtype are those of `place`.
        place: The number and the address that `arena.create` or `arena.place` has returned.
        make: A function that makes the variable; it takes the first arguments of `MirroredVariable`.
    """
    number, address = place
    variable = make(arena, address, initial.shape)
    variable.when_unused(arena.release, number)
    arena.register(number, variable)
    array = arena.first_value(arrays.move(initial, arena.namespace), address.slab)
    arena.write(
        address.slab, lambda: np.copyto(address.writable.reshape(initial.shape), array),
        "first value of variable number", number, number,
    )
    return variable
