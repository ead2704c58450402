"""Lookup of embeddings: rows of a table by their ids, alone or combined, and their gradients as rows of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import described, number
from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.scatter import row_numbers
from mpidist.variables.variable import BaseVariable

_COMBINERS = ("sum", "mean", "sqrtn")


def embedding_lookup(
    params: BaseVariable, ids: npt.ArrayLike, max_norm: float | None = None, name: str | None = None
) -> AnyArray:
    """Local or Collective, as the variable's `value()` is. Rows of a table.

    From parameter servers only these rows are fetched, each row once, by one request to each server.

    Args:
        params: The table, of at least one dimension.
        ids: Numbers of rows, integers of any shape, in any order; a number may occur several times.
        max_norm: Rows of larger Euclidean norm are scaled down to it. The table is not changed.
        name: Kept for code written for tf.distribute; it changes nothing.

    Returns:
        Shape `ids.shape + params.shape[1:]`, of the table's dtype: a new array.

    Raises:
        ValueError: An id is negative, or the table has no such row; or `max_norm` is not above 0.
        TypeError: The ids are not integers, or `params` is no variable.
    """
    del name
    table = _require_table(params)
    return _clipped(table.sparse_read(ids), np.ndim(arrays.as_array(ids)), max_norm)


def embedding_lookup_sparse(
    params: BaseVariable, sp_ids: Sequence[npt.ArrayLike], sp_weights: Sequence[npt.ArrayLike] | None = None,
    combiner: str | None = None, max_norm: float | None = None,
) -> AnyArray:
    """Local or Collective, as `embedding_lookup` is. Rows of a table, combined into one row for each example.

    Args:
        params: The table, of at least one dimension and floating dtype.
        sp_ids: For each example its ids, any number of them. tf.nn has a SparseTensor here.
        sp_weights: For each example the weights of its ids; default 1.
        combiner: "sum" adds the weighted rows; "mean", the default, divides this sum by the sum of the weights, and
            "sqrtn" by the root of the sum of their squares.
        max_norm: See `embedding_lookup`; each row is clipped before it is weighted.

    Returns:
        Shape `(len(sp_ids), *params.shape[1:])`; zeros for an example without ids.

    Raises:
        ValueError: There is no such combiner, or the weights do not fit the ids; see also `embedding_lookup`.
        TypeError: See `embedding_lookup`.
    """
    table = _require_table(params)
    ids, shares, examples = _shares(table, sp_ids, sp_weights, combiner)
    rows = _clipped(table.sparse_read(ids), 1, max_norm)
    combined = np.zeros((len(sp_ids), *table.shape[1:]), table.dtype)
    np.add.at(combined, examples, _weighted(arrays.to_host(rows), shares))
    return combined


def embedding_gradient(
    params: BaseVariable, ids: Any, gradient: npt.ArrayLike,
    sp_weights: Sequence[npt.ArrayLike] | None = None, combiner: str | None = None,
) -> IndexedSlices:
    """Local. The gradient of a table, as rows, from the gradient of a lookup's result (without `max_norm`).

    Args:
        params: The table.
        ids: The ids that were given to `embedding_lookup`; or to `embedding_lookup_sparse`, with its combiner.
        gradient: The gradient with respect to the lookup's result, in its shape.
        sp_weights: The weights that were given to `embedding_lookup_sparse`.
        combiner: None for a gradient of `embedding_lookup`.

    Returns:
        A row for each id, in their order; an id that occurs several times has as many rows.

    Raises:
        ValueError: The gradient has another shape than the result; see also the lookup.
        TypeError: See the lookup.
    """
    table = _require_table(params)
    given = arrays.to_host(arrays.as_array(gradient))
    if combiner is None:
        if sp_weights is not None:
            raise ValueError(f"`sp_weights` need a `combiner`, one of {', '.join(_COMBINERS)}")
        numbers = row_numbers(table, ids)
        _require_shape(given, (*numbers.shape, *table.shape[1:]))
        values = given.reshape(numbers.size, *table.shape[1:])
        return IndexedSlices(values, numbers.reshape(-1), table.shape)
    ids_of, shares, examples = _shares(table, ids, sp_weights, combiner)
    _require_shape(given, (len(ids), *table.shape[1:]))
    return IndexedSlices(_weighted(given[examples], shares), ids_of, table.shape)


def _require_table(params: BaseVariable) -> BaseVariable:
    if not isinstance(params, BaseVariable):
        raise TypeError(f"`params` must be a variable of mpidist, the table, got {described(params)}")
    return params


def _require_shape(given: AnyArray, expected: tuple[int, ...]) -> None:
    if given.shape != expected:
        raise ValueError(f"`gradient` must have the shape of what was looked up, {expected}, got {given.shape}")


def _clipped(rows: AnyArray, ids_ndim: int, max_norm: float | None) -> AnyArray:
    """Rows of which none has a larger norm; their first dimensions are those of the ids."""
    if max_norm is None:
        return rows
    limit = number("max_norm", max_norm)
    if not limit > 0:
        raise ValueError(f"`max_norm` must be above 0, got {max_norm!r}")
    xp = arrays.namespace(rows)
    axes = tuple(range(ids_ndim, rows.ndim))
    # Squares of half precision overflow early.
    wide = rows.astype(np.promote_types(rows.dtype, np.float32))
    norms = xp.sqrt((wide * wide.conj()).real.sum(axis=axes, keepdims=True))
    clipped: AnyArray = (wide * (limit / xp.maximum(norms, limit))).astype(rows.dtype)
    return clipped


def _shares(
    table: BaseVariable, ids: Any, weights: Any, combiner: str | None
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """The ids of all examples one after another, the weight of each in its example, and the numbers of the examples."""
    chosen = "mean" if combiner is None else combiner
    if chosen not in _COMBINERS:
        raise ValueError(f"`combiner` must be one of {', '.join(_COMBINERS)}, got {described(combiner)}")
    if table.dtype.kind not in "fcV":
        raise TypeError(f"variable {table.name!r}: rows of dtype {table.dtype} are not combined; use a floating dtype")
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, np.ndarray)):
        raise TypeError(f"`sp_ids` must be a list with the ids of each example, got {described(ids)}")
    numbers = [row_numbers(table, one) for one in ids]
    if wrong := [one for one in numbers if one.ndim != 1]:
        raise ValueError(f"`sp_ids` must have a list of ids for each example, got ids of shape {wrong[0].shape}")
    given = [np.ones(len(one)) for one in numbers] if weights is None else _weights(weights, numbers)
    counts = [len(one) for one in numbers]
    shares = [_normalised(one, chosen) for one in given]
    return (
        np.concatenate([np.empty(0, np.int64), *numbers]), np.concatenate([np.empty(0), *shares]),
        np.repeat(np.arange(len(numbers)), counts),
    )


def _normalised(weights: AnyArray, combiner: str) -> AnyArray:
    if combiner == "sum":
        return weights
    total = float(np.sum(weights)) if combiner == "mean" else float(np.sqrt(np.dot(weights, weights)))
    # As in TensorFlow, weights that cancel each other give zeros.
    return weights / total if total else np.zeros_like(weights)


def _weights(weights: Any, numbers: Sequence[AnyArray]) -> list[AnyArray]:
    if isinstance(weights, (str, bytes)) or not isinstance(weights, (Sequence, np.ndarray)):
        raise TypeError(f"`sp_weights` must be a list with the weights of each example, got {described(weights)}")
    given = [np.asarray(one) for one in weights]
    if any(one.dtype.kind not in "iuf" for one in given if one.size):
        raise TypeError(f"`sp_weights` must be numbers, got {described(weights)}")
    if [one.shape for one in given] != [one.shape for one in numbers]:
        raise ValueError(
            f"`sp_weights` must have a weight for each id: expected {[len(one) for one in numbers][:8]} of the first "
            f"examples, got shapes {[one.shape for one in given][:8]}"
        )
    return [one.astype(np.float64) for one in given]


def _weighted(rows: AnyArray, shares: AnyArray) -> AnyArray:
    factors = shares.reshape(-1, *(1 for _ in rows.shape[1:]))
    weighted: AnyArray = (rows * factors).astype(rows.dtype)
    return weighted
