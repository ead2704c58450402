"""Layers over a vocabulary whose entries are distributed over the logical devices of a replica."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import described
from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp
from mpidist.parallel.devices import Devices, matrix

EmbeddingBackward = Callable[[npt.ArrayLike], IndexedSlices]
LossBackward = Callable[[npt.ArrayLike], AnyArray]


def vocabulary_parallel_embedding(
    ids: npt.ArrayLike, table: npt.ArrayLike
) -> tuple[AnyArray, EmbeddingBackward]:
    """Collective over the replica. Look up rows of a table whose rows are distributed over the logical devices.

    Args:
        ids: Indices of rows of the whole table, integers of any shape, the same on all logical devices.
        table: This device's rows, shape (entries / devices, ...), of a table with partition_dimensions=[devices, 1].

    Returns:
        The rows, shape `ids.shape + table.shape[1:]`, the same on all logical devices; and `backward`, a Local function
        of their gradient that returns the gradient of this device's rows, as `IndexedSlices` of the tile.

    Raises:
        ValueError: An id is no row of the whole table.
        TypeError: Ids are no integers, or the table is no array of floats.
        RuntimeError: The call is in cross-replica context.
    """
    layer = "vocabulary_parallel_embedding"
    devices, rows = Devices(layer), matrix(table, "table", layer, least=1)
    numbers = _numbers(ids, "ids", len(rows) * devices.count, layer)
    xp = arrays.namespace(rows)
    own = numbers.reshape(-1) - devices.device * len(rows)
    here = np.flatnonzero((own >= 0) & (own < len(rows)))
    found = xp.zeros((own.size, *rows.shape[1:]), rows.dtype)
    found[arrays.move(here, xp)] = rows[arrays.move(own[here], xp)]
    shape = (*numbers.shape, *rows.shape[1:])

    def backward(gradient: npt.ArrayLike) -> IndexedSlices:
        given = matrix(gradient, "gradient", layer, least=1)
        if given.shape != shape:
            raise ValueError(f"{layer}: `gradient` must have the shape of the result, {shape}, got {given.shape}")
        flat = arrays.to_host(given).reshape(own.size, *rows.shape[1:])
        return IndexedSlices(flat[here].astype(rows.dtype, copy=False), own[here], rows.shape)

    return devices.sum(found).reshape(shape), backward


def vocabulary_parallel_softmax_cross_entropy(
    logits: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[AnyArray, LossBackward]:
    """Collective over the replica. Compute losses of logits whose entries are distributed over the logical devices.

    Args:
        logits: This device's logits, shape (..., entries / devices), as `column_parallel_matmul` returns them.
        labels: The index of the right entry of each example, integers of shape (...), the same on all logical devices.

    Returns:
        The loss of each example, shape (...), the same on all logical devices; and `backward`, a Local function of the
        losses' gradient that returns the gradient of this device's logits.

    Raises:
        ValueError: Labels have another shape, or a label is no entry of the whole vocabulary.
        TypeError: Labels are no integers, or logits are no array of floats.
        RuntimeError: The call is in cross-replica context.
    """
    layer = "vocabulary_parallel_softmax_cross_entropy"
    devices, given = Devices(layer), matrix(logits, "logits", layer, least=1)
    width, shape = given.shape[-1], given.shape[:-1]
    numbers = _numbers(labels, "labels", width * devices.count, layer)
    if numbers.shape != shape:
        raise ValueError(
            f"{layer}: `labels` must have the shape of `logits` without the last dimension, {shape}, got "
            f"{numbers.shape}"
        )
    xp = arrays.namespace(given)
    flat = given.reshape(-1, width)
    own = numbers.reshape(-1) - devices.device * width
    here = np.flatnonzero((own >= 0) & (own < width))
    examples, entries = arrays.move(here, xp), arrays.move(own[here], xp)
    # The largest logit of all devices is subtracted: without that, exponentials overflow.
    least = xp.full(len(flat), -np.inf, flat.dtype) if not width else flat.max(axis=1)
    shifted = flat - devices.sum(least, ReduceOp.MAX)[:, None]
    exponentials = xp.exp(shifted)
    sums = xp.zeros((2, len(flat)), flat.dtype)
    sums[0] = exponentials.sum(axis=1)
    sums[1, examples] = shifted[examples, entries]
    total, right = devices.sum(sums)
    losses: AnyArray = (xp.log(total) - right).reshape(shape)

    def backward(gradient: npt.ArrayLike) -> AnyArray:
        factor = arrays.as_array(gradient)
        if factor.shape != shape:
            raise ValueError(f"{layer}: `gradient` must have the shape of the losses, {shape}, got {factor.shape}")
        made = exponentials / total[:, None]
        made[examples, entries] -= 1
        made *= factor.reshape(-1, 1)
        result: AnyArray = made.reshape(given.shape)
        return result

    return losses, backward


def _numbers(given: npt.ArrayLike, name: str, end: int, layer: str) -> AnyArray:
    numbers = arrays.to_host(arrays.as_array(given))
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{layer}: `{name}` must be integers, got {described(given)}")
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
        raise ValueError(
            f"{layer}: `{name}` must be from 0 to {end - 1}, got {int(numbers.min())} to {int(numbers.max())}"
        )
    return numbers.astype(np.int64, copy=False)
