"""The values of variables on all ranks: which of them differ, by checksums, and those of the first rank for all."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from mpidist.keras.backends.choice import serving
from mpidist.keras.binding import ModelBinding
from mpidist.options import ReduceOp

# No width of a layer is likely to be a multiple of it: rows of a matrix that have changed places are then seen.
_LANES = 1021


def checksum(array: np.ndarray[Any, Any]) -> int:
    """Local. A checksum of 32 bits of an array's bytes.

    Large arrays are first added up in lanes of words, which takes the time of reading them; `crc32` alone takes ten
    times as long.

    >>> checksum(np.zeros(3)) != checksum(np.ones(3))
    True
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    rows = data.size // (8 * _LANES)
    if rows < 2:
        return zlib.crc32(data.data)
    whole = rows * 8 * _LANES
    lanes = np.add.reduce(data[:whole].view(np.uint64).reshape(rows, _LANES), axis=0)
    return zlib.crc32(data[whole:].data, zlib.crc32(lanes.data))


def differing(binding: ModelBinding, variables: list[Any], name: str) -> list[int]:
    """Collective. The numbers of the variables that the ranks have with different values.

    Args:
        binding: The binding of the model.
        variables: The variables, the same on all ranks.
        name: The name of the call.
    """
    sums = [checksum(serving.as_array(variable)) for variable in variables]
    pairs = np.array([sums, [-one for one in sums]], np.int64)
    most = binding.extended.all_reduce(ReduceOp.MAX, pairs, name=name)
    return [number for number in range(len(variables)) if most[0, number] != -most[1, number]]


def share_values(binding: ModelBinding | None, variables: list[Any], what: str) -> None:
    """Collective. Give variables the values of the first replica.

    Raises:
        ValueError: The ranks have other variables.
    """
    if binding is None or binding.size == 1:
        return
    binding.together(what, lambda: [(tuple(variable.shape), str(variable.dtype)) for variable in variables], list)
    others = [variables[number] for number in differing(binding, variables, f"checksums of {what}")]
    values = [np.asarray(serving.as_array(variable), order="C") for variable in others]
    for variable, value in zip(others, binding.extended.broadcast(values), strict=True):
        variable.assign(value)
