"""The split variable: each logical device has a tile of its array, mirrored over the replicas (ON_WRITE)."""

from __future__ import annotations

import math
import zlib
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context
from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import same_on_all, together
from mpidist.indexed_slices import IndexedSlices
from mpidist.recorder.calls import Calls, noted
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.logical_devices import LogicalDevices
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.reading import LoadedInBlocks
from mpidist.variables.scatter import checked_rows
from mpidist.variables.tiles import Tiling
from mpidist.variables.variable import BaseVariable, Read

S = TypeVar("S", bound="SplitVariable")


class SplitVariable(BaseVariable, LoadedInBlocks):
    """A variable whose value is cut into tiles, one for each logical device of a replica.

    `mpidist.Variable(value, partition_dimensions=[1, 2])` makes it in the scope of a `TPUStrategy`. `shape` is the
    shape of the whole array. `value()` and arithmetic use this device's tile. `assign` takes the whole array, and the
    scatter methods take whole rows; each device writes its tile of them. `numpy()` returns the whole array.

    Args:
        home: The home of the strategy's variables.
        tile: This device's tile, a variable over the same logical device of all replicas.
        tiling: The partition of the array into tiles.
        devices: The logical devices of this rank's replica.
    """

    def __init__(self, home: ArenaMemory, tile: BaseVariable, tiling: Tiling, devices: LogicalDevices) -> None:
        self.home = self.arena = home
        self.tile, self.tiling = tile, tiling
        self._devices = devices
        self.name, self.shape, self.dtype = tile.name, tiling.shape, tile.dtype
        self.trainable, self.sparse_gradient = tile.trainable, tile.sparse_gradient
        self.synchronization, self.aggregation = tile.synchronization, tile.aggregation
        self.number = None if tile.number is None else f"{tile.number} (split)"
        self._width = math.prod(self.shape[1:])
        ranks = home.communicator.size
        self.bounds = tuple(self.shape[0] * rank // ranks * self._width for rank in range(ranks + 1))

    @property
    def saved_dtype(self) -> np.dtype[Any]:
        """Local. See `BaseVariable.saved_dtype`."""
        return self.tile.saved_dtype

    @property
    def calls(self) -> Calls:
        """Local. The record of the calls that all ranks make together."""
        return self.arena.calls

    @property
    def device(self) -> str:
        """Local. The device on which this rank's tile is stored."""
        return self.tile.device

    def value(self) -> AnyArray:
        """Local. This device's tile: a live view, read-only, valid until the next write or optimizer step."""
        return self.tile.value()

    @noted("putting a split variable together")
    def numpy(self) -> AnyArray:
        """Collective. A copy of the whole value in host memory."""
        own = np.ascontiguousarray(self.tile.numpy())
        whole = np.empty(self.shape, self.dtype)
        tiles = self._devices.collective.all_gather(own.reshape(1, -1), 0)
        for number, tile in enumerate(tiles):
            tiling = self.tiling.of(number)
            whole[tiling.slices] = tile.reshape(tiling.tile_shape)
        return whole

    def read_rows(self, rows: AnyArray) -> AnyArray:
        """Local. Raise ValueError: a logical device does not have all rows."""
        del rows
        raise ValueError(
            f"variable {self.name!r} is cut into tiles, and this logical device has one of shape "
            f"{self.tiling.tile_shape}: rows of the whole cannot be read here. Use "
            "mpidist.parallel.vocabulary_parallel_embedding(ids, variable.value()), or `numpy()`, which is Collective"
        )

    def write_array(self, array: AnyArray) -> None:
        """Collective. See `BaseVariable.write_array`."""
        self._require_same(array)
        self.tile.write_array(self._own(array))

    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Collective. See `BaseVariable.add_array`."""
        self._require_same(array)
        self.tile.add_array(self._own(array), method)

    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Collective. See `Scatter.scatter`; rows are whole rows of the whole array."""
        rows = together(
            self.group, f"scatter_{kind} of variable {self.name!r}", lambda: checked_rows(self, kind, sparse_delta)
        )
        own = self.tiling.slices[0]
        here = (rows.indices >= own.start) & (rows.indices < own.stop)
        columns = slice(None), *self.tiling.slices[1:]
        values = rows.values[here][columns]
        self.tile.scatter(kind, IndexedSlices(values, rows.indices[here] - own.start, self.tiling.tile_shape))
        return self

    def coerce(self, value: npt.ArrayLike) -> AnyArray:
        """Local. See `BaseVariable.coerce`; returns the whole value, in host memory."""
        return super().coerce(arrays.to_host(arrays.as_array(value)))

    @noted("reading a split variable for a checkpoint")
    def reader(self) -> Read:
        """Collective. See `BaseVariable.reader`; each rank gets the rows within its `bounds` from its replica."""
        group, collective = self.group, self._devices.collective
        first = group.rank - self._devices.device
        edges = [self.shape[0] * rank // group.size for rank in range(group.size + 1)]
        tile = self.tile.reader()(0, self.tile.size).reshape(self.tiling.tile_shape)
        sent = []
        for device in range(self._devices.count):
            rows = self._rows_of(self._devices.device, edges[first + device], edges[first + device + 1])
            sent.append(np.ascontiguousarray(tile[rows]).reshape(-1))
        begin, end = edges[group.rank], edges[group.rank + 1]
        own = np.empty((end - begin, *self.shape[1:]), tile.dtype)
        for device, piece in enumerate(collective.all_to_all(sent)):
            rows, tiling = self._rows_of(device, begin, end), self.tiling.of(device)
            low = rows.start + tiling.offset[0] - begin
            place = slice(low, low + rows.stop - rows.start), *tiling.slices[1:]
            target = own[place]
            target[...] = piece.reshape(target.shape)
        elements, before = own.reshape(-1), begin * self._width
        return lambda start, stop: elements[start - before : stop - before]

    @noted("restoring a variable")
    def load(self, read: Read) -> None:
        """Collective. See `BaseVariable.load`; each rank reads the rows of the part of its tile that it writes."""
        start, stop = self.loaded_here
        data = together(
            self.group, f"reading variable {self.name!r}",
            lambda: self._checked(self.tiling.read(read, start, stop), stop - start),
        )
        self.tile.load(lambda low, high: data[low - start : high - start])

    @property
    def is_loaded_beside_others(self) -> bool:
        """Local. See `LoadedInBlocks.is_loaded_beside_others`."""
        return isinstance(self.tile, MirroredVariable) and self.tile.is_loaded_beside_others

    @property
    def loaded_here(self) -> tuple[int, int]:
        """Local. See `LoadedInBlocks.loaded_here`; the elements of the tile."""
        return self.tile.loaded_here if isinstance(self.tile, MirroredVariable) else (0, self.tile.size)

    def put(self, start: int, data: AnyArray) -> None:
        """Local. See `LoadedInBlocks.put`."""
        if isinstance(self.tile, MirroredVariable):
            self.tile.put(start, data)

    def through(self, read: Read) -> Read:
        """Local. See `LoadedInBlocks.through`; reads the tile's elements of the whole array."""
        return lambda start, stop: self.tiling.read(read, start, stop)

    def _checked(self, data: AnyArray, count: int) -> AnyArray:
        if data.size != count or not np.can_cast(data.dtype, self.saved_dtype, "same_kind"):
            kind = ValueError if data.size != count else TypeError
            raise kind(
                f"variable {self.name!r}: reading must give {count} values that cast to {self.saved_dtype}, got "
                f"{data.size} of {data.dtype}. Check what `read` returns"
            )
        return data

    def _rows_of(self, device: int, begin: int, end: int) -> slice:
        """The rows of a device's tile, as indices in the tile, that are among the rows [begin, end) of the array."""
        tiling = self.tiling.of(device)
        top, count = tiling.offset[0], tiling.tile_shape[0]
        low, high = (min(max(edge - top, 0), count) for edge in (begin, end))
        return slice(low, high)

    def _own(self, array: AnyArray) -> AnyArray:
        return np.ascontiguousarray(self.tiling.take(array))

    def _require_same(self, array: AnyArray) -> None:
        context.require_collectives()
        if self.arena.options.check and not context.in_replica():
            same_on_all(
                self.group, f"the value written to variable {self.name!r} in cross-replica context",
                f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):#x} (checksum)",
                "Compute it the same way on every rank.",
            )

    def __repr__(self) -> str:
        return (
            f"<mpidist.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}, "
            f"partition_dimensions={list(self.tiling.dimensions)}, tile {self.tiling.device}={self.value()!s}>"
        )
