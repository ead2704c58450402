"""The collective: how arrays of all ranks are combined. Backends keep this contract; `selection` picks one.

A new backend is one module with a class like `SoloCollective` below, one line in the table of `selection`, and passes
the contract tests of `tests/parallel/test_collective.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpidist.comm.agreement import require_same, same_on_all
from mpidist.comm.communicator import Communicator
from mpidist.errors import mark_collective
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp

AnyArray = npt.NDArray[Any]


class Collective(Protocol):
    """Operations on one array per rank. All ranks call the same ones in the same order.

    Attributes:
        communicator: The ranks that take part.
    """

    communicator: Communicator

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        """Collective. Combine the arrays of all ranks; every rank gets the result.

        Args:
            array: Same shape and dtype on every rank. Not changed, unless `in_place`.
            op: `MEAN` divides the sum by the number of ranks; of integers it is float64.
            in_place: Write the result into `array`, which must be C-contiguous; not for `MEAN` of integers.

        Returns:
            Shape of `array`; dtype of `array`, except for `MEAN` of integers. A new array, unless `in_place`.

        Raises:
            MismatchError: Shapes, dtypes or operations differ; looked at in the first calls and then ever more
                rarely, or at each call under `CommunicationOptions(check=True)`.
            TypeError: A dtype that cannot be combined so: booleans under SUM, MEAN or PROD, or objects.
            ValueError: `in_place` of an array that is not C-contiguous, or is read-only.
        """
        ...

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. The array of rank `root`, on every rank.

        Args:
            array: On every rank the shape and dtype of the root's; the values count only there.
            root: Rank whose values count.

        Returns:
            A new array on ranks other than `root`, `array` itself there.

        Raises:
            MismatchError: Shapes, dtypes or roots differ; looked at as in `all_reduce`.
            ValueError: `root` is no rank.
        """
        ...

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        """Collective. The arrays of all ranks, concatenated along `axis` in the order of the ranks.

        Args:
            array: At least one dimension; sizes may differ between ranks along `axis` only, and may be 0 there.
            axis: -ndim to ndim - 1.

        Returns:
            A new array, the same on every rank.

        Raises:
            MismatchError: Dtypes, axes, numbers of dimensions or other sizes differ.
            ValueError: Scalars, or an axis out of range.
        """
        ...

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        ...


class SoloCollective:
    """One rank: every operation is a copy of its input, checked as the others would."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        """Collective. A copy of `array`, as float64 for the MEAN of integers."""
        check_reducible(array, op)
        if in_place:
            check_in_place(array, op)
            return array
        if op is ReduceOp.MEAN and array.dtype.kind in "iu":
            return array.astype(np.float64)
        return np.array(array)

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. `array`."""
        check_root(root, 1)
        return array

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        """Collective. A copy of `array`."""
        check_axis(array.shape, axis)
        return np.array(array)

    def barrier(self) -> None:
        """Collective. Returns at once."""


def reduce_slices(collective: Collective, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
    """Collective. The rows of all ranks, one after another in the order of the ranks; a row may occur more than once.

    Args:
        collective: Over the ranks.
        op: SUM, or MEAN, which divides the rows by the number of ranks; of integers it is float64.
        slices: This rank's rows, any number of them.

    Returns:
        All rows, with 64-bit indices.

    Raises:
        ValueError: Another operation.
        TypeError: A dtype that cannot be added.
        MismatchError: The dense shapes, the dtypes or the shapes of rows differ.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"IndexedSlices are reduced by SUM or MEAN, got {op.name}; use their `to_dense()`")
    check_reducible(slices.values, op)
    same_on_all(
        collective.communicator, "the dense shape, row shape and dtype of IndexedSlices",
        (slices.dense_shape, slices.values.shape[1:], slices.values.dtype.name),
        "Only the number of rows may differ.",
    )
    values = collective.all_gather(slices.values)
    indices = collective.all_gather(slices.indices.astype(np.int64))
    if op is ReduceOp.MEAN:
        size = collective.communicator.size
        values = np.true_divide(values, size, dtype=np.float64 if values.dtype.kind in "iu" else values.dtype)
    return IndexedSlices(values, indices, slices.dense_shape)


def check_reducible(array: AnyArray, op: ReduceOp) -> None:
    """Local. Raise TypeError where `op` has no meaning for the dtype."""
    kind = array.dtype.kind
    # ml_dtypes' bfloat16 is of kind "V" but has a name; plain structured and void types have not.
    if kind in "OSUMm" or (kind == "V" and array.dtype.name != "bfloat16"):
        raise TypeError(f"arrays of dtype {array.dtype} cannot be reduced; convert them to a numeric dtype first")
    if kind == "b" and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(
            f"{op.name} of booleans is not defined: use MAX for `any`, MIN for `all`, or convert to an integer dtype"
        )
    if kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"{op.name} of complex numbers is not defined")


def check_in_place(array: AnyArray, op: ReduceOp) -> None:
    """Local. Raise where a result cannot be written into `array`."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(
            f"`in_place` needs a writable C-contiguous array, got one of shape {array.shape} with strides "
            f"{array.strides}, writeable={array.flags.writeable}; use the returned array instead"
        )
    if op is ReduceOp.MEAN and array.dtype.kind in "iu":
        raise TypeError(f"the MEAN of {array.dtype} is float64 and cannot be written in place")


def check_root(root: int, size: int) -> None:
    """Local. Raise ValueError unless `root` is a rank."""
    if not 0 <= root < size:
        raise ValueError(f"`root` must be a rank, 0 to {size - 1}, got {root!r}")


def check_axis(shape: tuple[int, ...], axis: int) -> int:
    """Local. The axis as a number from 0, or ValueError."""
    ndim = len(shape)
    if ndim == 0:
        raise ValueError("gather needs arrays of at least one dimension, got a scalar; use np.atleast_1d(value)")
    if not -ndim <= axis < ndim:
        raise ValueError(f"`axis` is out of range: expected {-ndim} to {ndim - 1} for shape {shape}, got {axis}")
    return axis % ndim


def check_gatherable(described: list[tuple[tuple[int, ...], str, int]]) -> int:
    """Local. The gathered axis as a number from 0; what is wrong is wrong on every rank.

    Args:
        described: Shape, dtype and axis of each rank, the same list on every rank.

    Raises:
        MismatchError: They do not agree, apart from the sizes along the axis.
        ValueError: Scalars, or an axis out of range.
    """
    require_same(
        [(len(shape), dtype, axis + len(shape) if axis < 0 else axis) for shape, dtype, axis in described],
        "gather: number of dimensions, dtype and axis", "Only sizes along the axis may differ.",
    )
    try:
        axis = check_axis(described[0][0], described[0][2])
    except ValueError as error:
        raise mark_collective(error) from None
    require_same(
        [(*shape[:axis], "any", *shape[axis + 1 :]) for shape, _, _ in described],
        "gather: shape apart from the gathered axis", f"Sizes may differ along axis {axis} only.",
    )
    return axis
