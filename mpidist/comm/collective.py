"""The collective: the operations on arrays of all ranks that users and the rest of the library call.

A collective of the library is made of two objects: the one front, `front.front.CollectiveFront`, which checks and
converts, and a backend that keeps `backend.Backend`, which moves and combines flat arrays. `choice.selection.choose`
picks the backend. A strategy also takes a user's own object with these methods, as `cross_device_ops`. Every collective
passes the contract tests of `mpidist.testing.contract`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.options import ReduceOp


class Collective(Protocol):
    """Operations on one array per rank. All ranks call the same operations in the same order.

    Arrays are NumPy's, or those of any library that supports DLPack (PyTorch, JAX), in host memory and without a copy.
    CuPy arrays are taken where the backend reaches device memory. A result is of the same kind as the argument.

    Attributes:
        communicator: The ranks that take part.
    """

    communicator: Communicator

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        """Collective. Combine the arrays of all ranks; every rank gets the result.

        Args:
            array: The array, of the same shape and dtype on every rank. It is not changed, unless `in_place`.
            op: The operation. `MEAN` divides the sum by the number of ranks; the `MEAN` of integers is float64. `MIN`
                and `MAX` give NaN where any rank has one.
            in_place: Whether to write the result into `array`, which must be C-contiguous. Not for `MEAN` of integers.

        Returns:
            An array of the shape of `array` and of its dtype, except for `MEAN` of integers; a new array unless
            `in_place`. It has the same bits on every rank.

        Raises:
            OverflowError: A sum or a product of integers does not fit their dtype; on every rank, and then the array of
                a call in place is undefined. A user's own collective may wrap instead.
            MismatchError: Shapes, dtypes or operations differ between ranks. They are compared in the first calls and
                then more and more rarely, or in each call under `CommunicationOptions(check=True)`.
            TypeError: The operation is not defined for the dtype: booleans under SUM, MEAN or PROD, or objects.
            ValueError: `in_place` was given an array that is not C-contiguous or is read-only.
        """
        ...

    def reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> AnyArray | None:
        """Collective. Combine the arrays of all ranks; rank `root` gets the result.

        Args:
            array: See `all_reduce`.
            op: See `all_reduce`.
            root: The rank that gets the result.

        Returns:
            On rank `root` a new array, as from `all_reduce`; None on the other ranks.

        Raises:
            MismatchError, TypeError: See `all_reduce`.
            OverflowError: See `all_reduce`; on every rank, though only the root has the result.
            ValueError: `root` is not a rank.
        """
        ...

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. Give the array of rank `root` to every rank.

        Args:
            array: The array, of the same shape and dtype on every rank. Only the values of rank `root` are used.
            root: The rank whose values are used.

        Returns:
            On rank `root` `array` itself, on the other ranks a new array.

        Raises:
            MismatchError: Shapes, dtypes or roots differ between ranks; compared as in `all_reduce`.
            ValueError: `root` is not a rank.
            TypeError: The array holds objects.
        """
        ...

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        """Collective. Concatenate the arrays of all ranks along `axis`, in the order of the ranks.

        Args:
            array: The array, of at least one dimension. Sizes may differ between ranks along `axis` only, and may be 0
                there.
            axis: The dimension along which to concatenate, -ndim to ndim - 1.

        Returns:
            A new array, the same on every rank.

        Raises:
            MismatchError: Dtypes, axes, numbers of dimensions or other sizes differ between ranks.
            ValueError: `array` is a scalar, or `axis` is out of range.
            TypeError: `array` holds objects.
        """
        ...

    def reduce_scatter(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM) -> AnyArray:
        """Collective. Combine the arrays of all ranks; rank r gets slice r of the result's first dimension.

        Args:
            array: See `all_reduce`; it has at least one dimension. It is cut as `numpy.array_split` does: the sizes of
                the slices differ by at most one, and the larger slices come first.
            op: See `all_reduce`.

        Returns:
            A new array: this rank's slice.

        Raises:
            MismatchError, TypeError: See `all_reduce`.
            OverflowError: See `all_reduce`; on every rank, for any slice.
            ValueError: `array` is a scalar.
        """
        ...

    def all_to_all(self, parts: Sequence[AnyArray]) -> list[AnyArray]:
        """Collective. Send part r to rank r, and get one part from every rank.

        Args:
            parts: One array for each rank. All parts on all ranks have the same dtype and, apart from the first
                dimension, the same shape. Sizes of the first dimension are free and may be 0.

        Returns:
            New arrays in the order of the ranks that sent them.

        Raises:
            MismatchError: Dtypes or shapes differ between ranks.
            ValueError: There is not one part for each rank, a part is a scalar, or the parts of a rank differ in dtype
                or shape.
            TypeError: A part holds objects.
        """
        ...

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        ...


def check_reducible(array: AnyArray, op: ReduceOp) -> None:
    """Local. Raise TypeError if `op` is not defined for the array's dtype."""
    kind = array.dtype.kind
    # The bfloat16 of ml_dtypes has kind "V", as structured dtypes have, but a name of its own.
    if array.dtype.hasobject or kind in "SUMm" or (kind == "V" and array.dtype.name != "bfloat16"):
        raise TypeError(f"arrays of dtype {array.dtype} cannot be reduced; convert them to a numeric dtype first")
    if kind == "b" and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(
            f"{op.name} of booleans is not defined: use MAX for `any`, MIN for `all`, or convert them to an integer "
            "dtype"
        )
    if kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(
            f"{op.name} of complex numbers is not defined, got an array of dtype {array.dtype}: reduce their absolute "
            "values or their real parts"
        )


def check_movable(array: AnyArray) -> None:
    """Local. Raise TypeError if the array holds references to objects, which have no meaning in another process."""
    if array.dtype.hasobject:
        raise TypeError(
            f"arrays of dtype {array.dtype} hold Python objects and cannot be sent, got one of shape {array.shape}: "
            "convert them to a numeric dtype, or use `gather_object`"
        )


def check_in_place(array: AnyArray, op: ReduceOp) -> None:
    """Local. Raise ValueError or TypeError if a result cannot be written into `array`."""
    # CuPy arrays are always writable and have no such flag.
    is_writable = getattr(array.flags, "writeable", True)
    if not (array.flags.c_contiguous and is_writable):
        raise ValueError(
            f"`in_place` needs a writable C-contiguous array, got one of shape {array.shape} with strides "
            f"{array.strides}, writeable={is_writable}: pass in_place=False and use the returned array"
        )
    if op is ReduceOp.MEAN and array.dtype.kind in "iu":
        raise TypeError(
            f"the MEAN of {array.dtype} is float64 and cannot be written in place: pass in_place=False and use the "
            "returned array"
        )


def check_root(root: int, size: int) -> None:
    """Local. Raise ValueError unless `root` is a rank."""
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise ValueError(f"`root` must be a rank, 0 to {size - 1}, got {root!r}")


def check_axis(shape: tuple[int, ...], axis: int) -> int:
    """Local. The axis as a number from 0; ValueError if there is no such axis."""
    ndim = len(shape)
    if ndim == 0:
        raise ValueError("gather needs arrays of at least one dimension, got a scalar; use np.atleast_1d(value)")
    if not -ndim <= axis < ndim:
        raise ValueError(f"`axis` is out of range: expected {-ndim} to {ndim - 1} for shape {shape}, got {axis}")
    return axis % ndim


def require_axis(axis: object) -> None:
    """Local. Raise TypeError unless `axis` is a whole number."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(
            "gather: `axis` must be an int, the dimension along which to concatenate, got "
            f"{type(axis).__name__}: {axis!r}. Use axis=0 to put rows one after another"
        )


def check_gatherable(described: list[tuple[tuple[int, ...], str, int]]) -> int:
    """Local. The gathered axis as a number from 0. All ranks raise the same error or none does.

    Args:
        described: The shape, dtype and axis of each rank; the same list on every rank.

    Raises:
        MismatchError: They differ in more than the sizes along the axis.
        ValueError: The arrays are scalars, or the axis is out of range.
        TypeError: An axis is no int.
    """
    try:
        for _, _, axis in described:
            require_axis(axis)
    except TypeError as error:
        raise mark_shared(error) from None
    require_same(
        [(len(shape), dtype, axis + len(shape) if axis < 0 else axis) for shape, dtype, axis in described],
        "gather: number of dimensions, dtype and axis", "Only sizes along the axis may differ.",
    )
    try:
        axis = check_axis(described[0][0], described[0][2])
    except ValueError as error:
        raise mark_shared(error) from None
    require_same(
        [(*shape[:axis], "any", *shape[axis + 1 :]) for shape, _, _ in described],
        "gather: shape apart from the gathered axis", f"Sizes may differ along axis {axis} only.",
    )
    return axis


def check_parts(parts: Sequence[AnyArray], size: int) -> None:
    """Local. Raise ValueError unless `parts` has an array for each rank and they differ in their first size only."""
    if len(parts) != size:
        raise ValueError(f"all_to_all needs one part per rank: expected {size} parts, got {len(parts)}")
    for rank, part in enumerate(parts):
        if part.ndim == 0:
            raise ValueError(
                f"all_to_all needs parts of at least one dimension, got a scalar for rank {rank}; use "
                "np.atleast_1d(value)"
            )
        if part.dtype != parts[0].dtype or part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"all_to_all: parts may differ in their first size only, got {part.dtype} of shape {part.shape} for "
                f"rank {rank} and {parts[0].dtype} of shape {parts[0].shape} for rank 0"
            )
