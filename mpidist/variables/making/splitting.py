"""The creation of a split variable: every rank takes its tile of the initial value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import exchange, require_same
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.kinds.mirrored import MirroredVariable, create_mirrored
from mpidist.variables.kinds.split import SplitVariable
from mpidist.variables.logical_devices import LogicalDevices
from mpidist.variables.making.creation import initial_array, traits_of
from mpidist.variables.making.initial import ShardedInitial
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.tiles import Tiling, tiling
from mpidist.variables.variable import BaseVariable


class _First(NamedTuple):
    """The initial value of a split variable on one rank: the whole array, or only the tile."""

    array: AnyArray
    tiling: Tiling
    is_whole: bool


def create_split(  # noqa: PLR0913  # tf.Variable's arguments
    home: ArenaMemory,
    tiles: ArenaMemory,
    devices: LogicalDevices,
    initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike],
    partition_dimensions: Any,
    *,
    name: str | None = None,
    dtype: npt.DTypeLike | None = None,
    trainable: bool | None = None,
    synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
    sparse_gradient: bool = False,
) -> SplitVariable:
    """Collective. Create a variable over all ranks, with the initial value of the first replica's logical device 0.

    Args:
        home: The home of the variable.
        tiles: The arena of tiles, over the same logical device of all replicas.
        devices: The logical devices of this rank's replica.
        initial_value: See `creation.create_variable`. A function that makes shards, with `shape` and `dtype`, is called
            for the tile only.
        partition_dimensions: Number of parts of each dimension.
        name: See `creation.create_variable`, also for the other arguments.
        dtype: The dtype.
        trainable: Whether optimizers train the variable.
        synchronization: AUTO or ON_WRITE.
        aggregation: The way in which replicas' values are combined.
        sparse_gradient: Whether the gradients of tiles are `IndexedSlices`.

    Raises:
        ValueError: The value cannot be split in this way, or variables of this kind cannot be split; on every rank.
        TypeError: See `creation.create_variable`; or `partition_dimensions` is no list of numbers.
        MismatchError: An argument other than the value differs between ranks.
    """
    given_name, name = name, "Variable" if name is None else name
    owner = f"variable {name!r}"
    first: _First | None = None
    described: Any = None
    error: Exception | None = None
    try:
        traits = traits_of(f"{owner}: ", trainable, synchronization, aggregation, sparse_gradient)
        if traits.is_on_read:
            raise ValueError(f"{owner}: `partition_dimensions` is for ON_WRITE variables, got ON_READ; leave it out")
        first = _first_value(
            initial_value, partition_dimensions, dtype, name, traits.aggregation, devices, has_rows=sparse_gradient
        )
        described = (
            given_name, traits, first.tiling.shape, first.tiling.dimensions, first.array.dtype.name, first.is_whole
        )
    except Exception as caught:
        error = caught
    require_same(
        exchange(home.communicator, "making a split variable", described, error),
        f"name, kind, shape, `partition_dimensions` and dtype of {owner}",
        "Build the same model on every rank, in the same order.",
    )
    made = cast(_First, first)
    array = made.array
    if made.is_whole:
        # Also if each rank has drawn its own random numbers, the tiles must be those of one array.
        array = np.ascontiguousarray(made.tiling.take(devices.first(array)))
    make = partial(
        MirroredVariable, name=name, trainable=traits.trainable, aggregation=traits.aggregation,
        sparse_gradient=traits.sparse_gradient,
    )
    tile = create_mirrored(tiles, array, tiles.create(name, array.shape, array.dtype), make)
    return SplitVariable(home, tile, made.tiling, devices)


def _first_value(
    value: Any, partition_dimensions: Any, dtype: npt.DTypeLike | None, name: str, aggregation: VariableAggregation,
    devices: LogicalDevices, *, has_rows: bool,
) -> _First:
    owner = f"variable {name!r}"
    if isinstance(value, ShardedInitial) and value.is_partitioned:
        cut = tiling(value.shape, partition_dimensions, devices.device, devices.count, owner)
        tile = value.shard(cut.tile_shape, cut.offset)
        array = initial_array(tile, dtype, name, aggregation, has_rows=has_rows)
        return _First(_trained(array, owner), cut, is_whole=False)
    array = arrays.to_host(initial_array(value, dtype, name, aggregation, has_rows=has_rows))
    cut = tiling(array.shape, partition_dimensions, devices.device, devices.count, owner)
    return _First(_trained(array, owner), cut, is_whole=True)


def _trained(array: AnyArray, owner: str) -> AnyArray:
    if array.dtype.kind in "biu" or not array.shape:
        raise ValueError(
            f"{owner}: `partition_dimensions` is for trained variables of at least one dimension and floating dtype, "
            f"got dtype {array.dtype} and shape {array.shape}. Leave it out: each logical device then has the whole"
        )
    return array
