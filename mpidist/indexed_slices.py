"""`IndexedSlices`: some rows of an array, as a sparse gradient or update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray, as_array


@dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of a larger array. A row may occur several times; all its occurrences count in a sum.

    The rows lie in host memory, since the ranks exchange them there. CuPy arrays are copied to it.

    Attributes:
        values: The rows, of shape (rows, ...).
        indices: Integers of shape (rows,): the place of each row along the first axis of the whole array.
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
                    f"`indices` must be from 0 to {shape[0] - 1}, got {int(indices.min())} to {int(indices.max())}"
                )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Local. The dtype of the values."""
        return self.values.dtype

    def to_dense(self) -> AnyArray:
        """Local. The whole array. Its rows are sums of the rows with their index, and zero where there is none.

        Raises:
            ValueError: There is no `dense_shape`.
        """
        if self.dense_shape is None:
            raise ValueError(
                "IndexedSlices without `dense_shape` cannot be made dense. Pass `dense_shape`, the shape of the whole "
                "array"
            )
        dense = np.zeros(self.dense_shape, self.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense


def _on_host(array: Any) -> AnyArray:
    # `np.asarray` refuses CuPy arrays: they want an explicit `get`.
    return as_array(array.get() if hasattr(array, "__cuda_array_interface__") else array)
