"""Scatter writes: changes of some rows of a variable, with tf.Variable's seven methods; and reads of some rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import described
from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.whole_numbers import fitting

S = TypeVar("S", bound="Scatter")


class Scatter(ABC):
    """Methods of a variable that change rows, all by its method `scatter`, and that read rows.

    An index that occurs several times counts each time; under `scatter_update` the last occurrence holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Collective. Change rows by add, sub, mul, div, min, max or update.

        In cross-replica context the first replica's rows count. In replica context they are aggregated: SUM takes the
        rows of all replicas one after another, MEAN their values divided by the number of replicas, NONE and
        ONLY_FIRST_REPLICA the first replica's.

        Args:
            kind: "add", "sub", "mul", "div", "min", "max" or "update".
            sparse_delta: Any number of rows; shape and dtype must fit the variable.

        Returns:
            The variable.

        Raises:
            TypeError: `sparse_delta` is no IndexedSlices, its dtype does not cast, or integers would be divided.
            ValueError: The rows have another shape, or an index is out of range.
            OverflowError: Integers would wrap. In a closure it is raised where other errors of closures are.
            NotImplementedError: The variable is ON_READ; or `kind` is min, max or update in replica context with
                aggregation SUM or MEAN.
        """

    @abstractmethod
    def read_rows(self, rows: AnyArray) -> AnyArray:
        """Local or Collective, as `value()` is. Read rows that exist; `rows` is int64 of shape (n,)."""

    def sparse_read(self, indices: npt.ArrayLike, name: str | None = None) -> AnyArray:
        """Local or Collective, as `value()` is. Read some rows; from parameter servers only these rows are fetched.

        Args:
            indices: Numbers of rows, integers of any shape, in any order; a number may occur several times.
            name: Kept for code written for tf.distribute; it changes nothing.

        Returns:
            Shape `indices.shape + variable.shape[1:]`: the rows in the order of the indices.

        Raises:
            ValueError: The variable has no rows, or an index is out of range.
            TypeError: The indices are not integers.
        """
        numbers = row_numbers(self, indices)
        return self.read_rows(numbers.reshape(-1)).reshape(*numbers.shape, *self.shape[1:])

    def scatter_add(self: S, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> S:
        """Collective. Add rows; see `scatter`."""
        return self.scatter("add", sparse_delta)

    def scatter_sub(self: S, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> S:
        """Collective. Subtract rows; see `scatter`."""
        return self.scatter("sub", sparse_delta)

    def scatter_mul(self: S, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> S:
        """Collective. Multiply rows; see `scatter`."""
        return self.scatter("mul", sparse_delta)

    def scatter_div(self: S, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> S:
        """Collective. Divide rows; see `scatter`."""
        return self.scatter("div", sparse_delta)

    def scatter_min(self: S, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> S:
        """Collective. Replace elements by smaller ones; see `scatter`."""
        return self.scatter("min", sparse_delta)

    def scatter_max(self: S, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> S:
        """Collective. Replace elements by larger ones; see `scatter`."""
        return self.scatter("max", sparse_delta)

    def scatter_update(self: S, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> S:
        """Collective. Replace rows; see `scatter`."""
        return self.scatter("update", sparse_delta)


Apply = Callable[[AnyArray, AnyArray, AnyArray], object]
_APPLY: dict[str, Apply] = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.true_divide.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}
_ONCE: dict[str, Callable[[AnyArray, AnyArray], AnyArray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "min": np.minimum,
    "max": np.maximum,
}
_ARITHMETIC = frozenset(("add", "sub", "mul", "div"))
# Under these kinds, rows of several replicas have no common value.
ONE_WRITER = frozenset(("min", "max", "update"))


def apply_rows(kind: str, target: AnyArray, values: AnyArray, indices: AnyArray) -> None:
    """Local. Change rows of an array in place.

    Args:
        kind: The kind of the change.
        target: The array, in host memory or on a GPU.
        values: The rows, as `checked_rows` gives them, in host memory.
        indices: The indices of the rows, likewise.
    """
    if arrays.is_cupy(target):
        # CuPy adds the values of one row in any order, so that ranks would get different bits, and it has no
        # `multiply.at` at all. Therefore the rows are changed in host memory.
        rows, places = np.unique(indices, return_inverse=True)
        there = arrays.move(rows, arrays.namespace(target))
        block = arrays.to_host(target[there])
        apply_rows(kind, block, values, places)
        target[there] = arrays.move(block, arrays.namespace(target))
    elif kind == "update":
        target[indices] = values
    elif len(set(indices.tolist())) == len(indices):
        # `at` counts a row as often as it occurs, and takes several times as long.
        target[indices] = _ONCE[kind](target[indices], values)
    else:
        _APPLY[kind](target, indices, values)


def checked_rows(variable: Scatter, kind: str, rows: object) -> IndexedSlices:
    """Local. The rows in the variable's dtype.

    Raises:
        TypeError: `rows` is no IndexedSlices, its dtype does not cast, or integers would be divided.
        ValueError: Rows of another shape, or an index out of range.
        OverflowError: The variable's dtype does not hold an integer.
    """
    if not isinstance(rows, IndexedSlices):
        raise TypeError(f"variable {variable.name!r}: scatter_{kind} takes IndexedSlices, got {rows!r}")
    if (kind == "div" and variable.dtype.kind in "biu") or (kind in _ARITHMETIC and variable.dtype.kind == "b"):
        raise TypeError(f"variable {variable.name!r}: scatter_{kind} is not defined for dtype {variable.dtype}")
    require_rows(variable, rows)
    values, dtype = rows.values, variable.dtype
    own = fitting(variable.name, values, dtype) if dtype.kind in "iu" else values.astype(dtype)
    return IndexedSlices(own, rows.indices.astype(np.int64))


def row_numbers(variable: Scatter, indices: npt.ArrayLike) -> AnyArray:
    """Local. Numbers of rows as int64 of any shape.

    Raises:
        ValueError: The variable has no rows, or fewer; or lists have different lengths.
        TypeError: The indices are not integers.
    """
    try:
        given = np.asarray(arrays.to_host(arrays.as_array(indices)))
    except ValueError as error:
        raise ValueError(
            f"variable {variable.name!r}: expected numbers of rows that make one array, got {described(indices)}. Of "
            "lists of different lengths, `embedding_lookup_sparse` takes one for each example"
        ) from error
    if given.size == 0 and given.dtype.kind == "f":
        # An empty list has no integers.
        given = given.astype(np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(
            f"variable {variable.name!r}: expected integers as numbers of rows, got {described(indices)}"
        )
    if not variable.shape:
        raise ValueError(f"variable {variable.name!r} is a scalar, which has no rows: read it by `value()`")
    if not are_below(given, variable.shape[0]):
        raise ValueError(
            f"variable {variable.name!r} of shape {variable.shape}: expected numbers of rows from 0 to "
            f"{variable.shape[0] - 1}, got {int(given.min())} to {int(given.max())}"
        )
    return given.astype(np.int64, copy=False)


def are_below(numbers: AnyArray, end: int) -> bool:
    """Local. Whether integers are from 0 to `end` - 1, all of them."""
    if numbers.dtype == np.int64:
        # A negative number is a huge one without its sign: one look is enough.
        return not numbers.size or int(np.maximum.reduce(numbers.view(np.uint64), None)) < end
    return not numbers.size or 0 <= int(numbers.min()) <= int(numbers.max()) < end


def require_rows(variable: Scatter, rows: IndexedSlices) -> None:
    """Local. Raise an error unless these are rows of the variable, in a dtype that casts to the variable's.

    Raises:
        ValueError: Rows of another shape, or an index out of range.
        TypeError: A dtype that does not cast.
    """
    values, indices = rows.values, rows.indices
    if not variable.shape or values.shape[1:] != variable.shape[1:]:
        raise ValueError(
            f"variable {variable.name!r}: expected rows of an array of shape {variable.shape}, got IndexedSlices with "
            f"values of shape {values.shape}"
        )
    if not are_below(indices, variable.shape[0]):
        raise ValueError(
            f"variable {variable.name!r}: expected indices from 0 to {variable.shape[0] - 1}, got "
            f"{int(indices.min())} to {int(indices.max())}"
        )
    if not np.can_cast(values.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f"variable {variable.name!r}: expected rows of dtype {variable.dtype}, got {values.dtype}; convert them "
            f"with .astype({variable.dtype.name!r}) if that is meant"
        )
