"""The sharded state: one slot of an optimizer for one variable, of which each node has a part (ON_WRITE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context
from mpidist.arrays import AnyArray
from mpidist.errors import mark_shared
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.recorder.calls import Calls, noted
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.slab import SlabRange
from mpidist.variables.reading import LoadedInBlocks, read_together
from mpidist.variables.variable import BaseVariable, Read


class ShardedState(BaseVariable, LoadedInBlocks):
    """State of an optimizer under `shard_optimizer=True`: an array whose elements are on several nodes.

    Reading it is Collective: `value()`, `numpy()`, arithmetic and indexing put the whole together on every rank.
    `repr` and `str` do not communicate, and show which elements are here.

    Args:
        variable: The variable of the optimizer.
        address: The memory of the elements that are on this node.
        begin: The number of the first of these elements, in the flattened array.
        parts: The slices of all ranks, as `bounds` and `owners`; see `BaseVariable`.
        name: A name for display and errors.
    """

    def __init__(
        self, variable: MirroredVariable, address: SlabRange, begin: int,
        parts: tuple[tuple[int, ...], tuple[int, ...]], *, name: str,
    ) -> None:
        self.home = self.arena = variable.arena
        self.name, self.shape, self.dtype = name, variable.shape, address.slab.dtype
        self.trainable = False
        self.synchronization = VariableSynchronization.ON_WRITE
        self.aggregation = VariableAggregation.NONE
        self.number = address.number
        self.bounds, self.owners = self._edges, self._ranks = parts
        self._address, self._begin = address, begin
        place = self._ranks.index(self.group.rank)
        self._own = self._edges[place], self._edges[place + 1]

    @property
    def calls(self) -> Calls:
        """Local. The record of the calls that all ranks make together."""
        return self.arena.calls

    @property
    def here(self) -> AnyArray:
        """Local. The elements that are on this node, flat and read-only."""
        address = self._address
        return address.slab.readable[address.start : address.start + address.size]

    @noted("reading an optimizer's state")
    def value(self) -> AnyArray:
        """Collective. A copy of the whole value, read-only, on every rank."""
        order, owner = self.arena.communicator.order, self.arena.strategy_number
        with order.enter("value of variable number", self.number, None, owner, meets=False).surround():
            gathered = self.arena.collective.all_gather(self._slice())
        whole: AnyArray = self.arena.namespace.empty(self.size, self.dtype)
        at = 0
        # The slices have come in the order of the ranks, which need not be that of the nodes.
        for _, start, stop in sorted(zip(self._ranks, self._edges, self._edges[1:], strict=False)):
            whole[start:stop] = gathered[at : at + stop - start]
            at += stop - start
        if self.arena.namespace is np:
            whole.flags.writeable = False
        return whole.reshape(self.shape)

    @property
    def device(self) -> str:
        """Local. The place of the elements: host memory, or one of the visible GPUs."""
        index = arrays.device_index(self.here)
        return "/device:CPU:0" if index is None else f"/device:GPU:{index}"

    def coerce(self, value: npt.ArrayLike) -> AnyArray:
        """Local. See `BaseVariable.coerce`; the array is in the same memory as the state, host or GPU."""
        return arrays.move(super().coerce(value), self.arena.namespace)

    @noted("assign")
    def write_array(self, array: AnyArray) -> None:
        """Collective. See `BaseVariable.write_array`."""
        self._change("assign to variable number", array, np.copyto)

    @noted("assign_add")
    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Collective. See `BaseVariable.add_array`."""
        name = f"{method} to variable number"
        self._change(name, array, lambda target, delta: np.add(target, delta, out=target))

    def scatter(self, kind: str, sparse_delta: IndexedSlices) -> NoReturn:
        """Collective. Refuse: rows are not scattered into state of which each node has a part.

        Raises:
            NotImplementedError: Always.
        """
        del sparse_delta
        raise mark_shared(NotImplementedError(
            f"variable {self.name!r}: scatter_{kind} is not defined for an optimizer's state under "
            "shard_optimizer=True, of which each node has a part. Use `assign` with the whole value"
        ))

    def reader(self) -> Read:
        """Local. See `BaseVariable.reader`: live views of this rank's slice, which `bounds` and `owners` name."""
        return lambda start, stop: arrays.to_host(self.here[start - self._begin : stop - self._begin])

    @noted("restoring a variable")
    def load(self, read: Read) -> None:
        """Collective. Each rank reads and writes its slice."""
        start, stop = self._own
        data = read_together(self, read, start, stop)
        with self.arena.guard:
            self.arena.barrier()
            self.put(start, data)
            self.arena.barrier()

    @property
    def loaded_here(self) -> tuple[int, int]:
        """Local. See `LoadedInBlocks.loaded_here`."""
        return self._own

    def put(self, start: int, data: AnyArray) -> None:
        """Local. See `LoadedInBlocks.put`."""
        first = start - self._begin
        np.copyto(self._address.writable[first : first + data.size], arrays.move(data, self.arena.namespace))

    def _slice(self) -> AnyArray:
        start, stop = (edge - self._begin for edge in self._own)
        return self.here[start:stop]

    def _change(self, name: str, array: AnyArray, change: Callable[[AnyArray, AnyArray], Any]) -> None:
        context.require_collectives()
        # The first replica's counts, in either context, as for a variable without aggregation.
        array = self.arena.collective.broadcast(array).reshape(-1)
        target, begin = self._address.writable, self._begin
        self.arena.write(
            self._address.slab, lambda: change(target, array[begin : begin + target.size]), name, self.number
        )

    def __repr__(self) -> str:
        start, stop = self._begin, self._begin + self._address.size
        return (
            f"<mpidist.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}, elements "
            f"[{start}, {stop}) of {self.size} on this node; `numpy()`, which is Collective, reads all>"
        )
