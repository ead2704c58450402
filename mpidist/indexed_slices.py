"""Some rows of an array: a sparse gradient or update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray


@dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of a larger array; a row may occur more than once, and then counts more than once in a sum.

    Rows are in host memory, through which those of all ranks go: CuPy's arrays are copied there.

    Attributes:
        values: Shape (rows, ...), one entry per index.
        indices: Shape (rows,), integers: where each row belongs along the first axis.
        dense_shape: Shape of the whole array, None where nobody needs it.

    Raises:
        ValueError: Shapes do not fit together, or an index is out of range.
        TypeError: Indices that are no integers.
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
                raise ValueError(f"rows of shape {values.shape[1:]} do not fit into an array of shape {shape}")
            if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < shape[0]:
                raise ValueError(
                    f"`indices` must be from 0 to {shape[0] - 1}, got {int(indices.min())} to {int(indices.max())}"
                )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Local. Of the values."""
        return self.values.dtype

    def to_dense(self) -> AnyArray:
        """Local. The whole array: zero where there is no row, the sum where there are several.

        Raises:
            ValueError: There is no `dense_shape`.
        """
        if self.dense_shape is None:
            raise ValueError("IndexedSlices without `dense_shape` cannot be made dense")
        dense = np.zeros(self.dense_shape, self.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense


def _on_host(array: Any) -> AnyArray:
    # CuPy's arrays have to be asked; `np.asarray` refuses them.
    return np.asarray(array.get() if hasattr(array, "__cuda_array_interface__") else array)
