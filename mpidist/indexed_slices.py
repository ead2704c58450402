"""`IndexedSlices`: some rows of an array, as a sparse gradient or update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray, as_array, move, namespace, to_host


@dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of a larger array. A row may occur several times; all its occurrences count in a sum.

    The rows are in host memory, where the ranks exchange them; CuPy arrays are copied to it.

    Attributes:
        values: The rows, of shape (rows, ...).
        indices: Integers of shape (rows,): the index of each row in the first dimension of the whole array.
        dense_shape: Shape of the whole array, None where it is not needed.

    Raises:
        ValueError: Shapes do not fit together, or an index is out of range.
        TypeError: The indices are not integers.
    """

    values: AnyArray
    indices: AnyArray
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        values, indices = _on_host(self.values), _on_host(self.indices)
        if indices.size == 0:
            indices = indices.astype(np.int64)
        if indices.dtype.kind not in "iu":
            raise TypeError(f"`indices` must be integers, got dtype {indices.dtype}")
        if indices.ndim != 1 or values.ndim == 0 or values.shape[0] != indices.shape[0]:
            raise ValueError(
                "`indices` must have one dimension and `values` one row for each of them, got shapes "
                f"{indices.shape} and {values.shape}"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        if self.dense_shape is not None:
            shape = tuple(int(n) for n in self.dense_shape)
            object.__setattr__(self, "dense_shape", shape)
            if not shape or values.shape[1:] != shape[1:]:
                raise ValueError(
                    f"rows of shape {values.shape[1:]} do not fit into an array of shape {shape}: expected rows of "
                    f"shape {shape[1:]}"
                )
            if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < shape[0]:
                raise ValueError(
                    f"`indices` must be between 0 and {shape[0] - 1}, got {int(indices.min())} to {int(indices.max())}"
                )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Local. The dtype of the values."""
        return self.values.dtype

    def to_dense(self) -> AnyArray:
        """Local. The whole array. Each of its rows is the sum of all rows with its index, and zero without any.

        Raises:
            ValueError: There is no `dense_shape`.
            OverflowError: A sum of integers does not fit their dtype.
        """
        if self.dense_shape is None:
            raise ValueError(
                "IndexedSlices without `dense_shape` cannot be made dense. Pass `dense_shape`, the shape of the whole "
                "array"
            )
        dense = np.zeros(self.dense_shape, self.dtype)
        found = first_misfit(np.add, dense, self.values, self.indices) if self.dtype.kind in "iu" else None
        if found is not None:
            limits = np.iinfo(self.dtype)
            raise OverflowError(
                f"a sum of rows of {self.dtype.name} does not fit its dtype: expected {limits.min} to {limits.max}, "
                f"got {found}. Make them of a wider dtype: values.astype(np.int64), or np.float64"
            )
        np.add.at(dense, self.indices, self.values)
        return dense


def first_misfit(change: np.ufunc, target: AnyArray, values: AnyArray, indices: AnyArray) -> int | None:
    """Local. A number that a change of rows of integers would make, and that their dtype does not hold.

    Args:
        change: `np.add`, `np.subtract` or `np.multiply`; a row that occurs several times is changed by each of them.
        target: The array of which rows would be changed, in host memory or on a GPU.
        values: The values of the rows, in host memory, of the same dtype.
        indices: The indices of the rows, in host memory.

    Returns:
        None if all of them fit.
    """
    if not values.size:
        return None
    rows, places, counts = np.unique(indices, return_inverse=True, return_counts=True)
    before = to_host(target[move(rows, namespace(target))])
    limits, most = np.iinfo(before.dtype), int(counts.max())
    largest, factor = _magnitude(before), _magnitude(values)
    multiplies = change is np.multiply
    bound = largest * factor**min(most, 64) if multiplies and factor > 1 else largest + factor * most
    is_positive = change is not np.subtract or limits.min < 0 or int(before.min()) >= factor * most
    if bound <= limits.max and is_positive:
        return None
    # Python's integers have no end; they are as slow as rare.
    after = before.astype(object)
    change.at(after, places.reshape(-1), values.astype(object))
    wrong = (after < limits.min) | (after > limits.max)
    return int(after[wrong][0]) if wrong.any() else None


def _magnitude(values: AnyArray) -> int:
    return max(int(values.max()), -int(values.min()))


def _on_host(array: Any) -> AnyArray:
    # `np.asarray` refuses CuPy arrays: they want an explicit `get`.
    return as_array(array.get() if hasattr(array, "__cuda_array_interface__") else array)
