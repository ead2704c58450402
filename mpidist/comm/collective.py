"""The collective: how arrays of all ranks are combined. Backends keep this contract; `selection` picks one.

A new backend is one module with a class like `ring_collective.RingCollective`, one line in the table of `selection`,
and passes the contract suite of `mpidist.testing.contract`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpidist.arrays import AnyArray
from mpidist.comm.agreement import require_same
from mpidist.comm.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.options import ReduceOp


class Collective(Protocol):
    """Operations on one array per rank. All ranks call the same ones in the same order.

    Arrays are NumPy's; any array in host memory that speaks DLPack (PyTorch, JAX) is taken without a copy, and CuPy's
    where the backend reaches device memory. Results are of the kind of the argument.

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
            Shape of `array`; dtype of `array`, except for `MEAN` of integers. A new array, unless `in_place`. The
            same bits on every rank.

        Raises:
            MismatchError: Shapes, dtypes or operations differ; looked at in the first calls and then ever more
                rarely, or at each call under `CommunicationOptions(check=True)`.
            TypeError: A dtype that cannot be combined so: booleans under SUM, MEAN or PROD, or objects.
            ValueError: `in_place` of an array that is not C-contiguous, or is read-only.
        """
        ...

    def reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> AnyArray | None:
        """Collective. Combine the arrays of all ranks; rank `root` gets the result.

        Args:
            array: As for `all_reduce`.
            op: As for `all_reduce`.
            root: The rank that gets it.

        Returns:
            A new array on rank `root`, as `all_reduce` gives it; None on the others.

        Raises:
            MismatchError, TypeError: As `all_reduce`.
            ValueError: `root` is no rank.
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

    def reduce_scatter(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM) -> AnyArray:
        """Collective. Combine the arrays of all ranks; rank r gets part r of the result's first dimension.

        Args:
            array: As for `all_reduce`, of at least one dimension. Parts are those of `numpy.array_split`: sizes
                differ by at most one, the first are the larger ones.
            op: As for `all_reduce`.

        Returns:
            A new array: this rank's part.

        Raises:
            MismatchError, TypeError: As `all_reduce`.
            ValueError: A scalar.
        """
        ...

    def all_to_all(self, parts: Sequence[AnyArray]) -> list[AnyArray]:
        """Collective. Send part r to rank r, and get one part from every rank.

        Args:
            parts: One array per rank, of one dtype and, apart from the first dimension, one shape; the same on every
                rank. The first sizes are free, and may be 0.

        Returns:
            New arrays in the order of the ranks that sent them.

        Raises:
            MismatchError: Dtypes or shapes differ, within a rank or between ranks.
            ValueError: Not one part per rank, or scalars.
        """
        ...

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        ...


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
    # CuPy's arrays are always writable, and have no flag for it.
    is_writable = getattr(array.flags, "writeable", True)
    if not (array.flags.c_contiguous and is_writable):
        raise ValueError(
            f"`in_place` needs a writable C-contiguous array, got one of shape {array.shape} with strides "
            f"{array.strides}, writeable={is_writable}; use the returned array instead"
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
        raise mark_shared(error) from None
    require_same(
        [(*shape[:axis], "any", *shape[axis + 1 :]) for shape, _, _ in described],
        "gather: shape apart from the gathered axis", f"Sizes may differ along axis {axis} only.",
    )
    return axis


def check_parts(parts: Sequence[AnyArray], size: int) -> None:
    """Local. Raise unless there is one array of at least one dimension per rank, alike apart from the first."""
    if len(parts) != size:
        raise ValueError(f"all_to_all needs one part per rank, that is {size}, got {len(parts)}")
    for rank, part in enumerate(parts):
        if part.ndim == 0:
            raise ValueError(f"all_to_all needs parts of at least one dimension, got a scalar for rank {rank}")
        if part.dtype != parts[0].dtype or part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"all_to_all: parts may differ in their first size only, got {part.dtype} of shape {part.shape} for "
                f"rank {rank} and {parts[0].dtype} of shape {parts[0].shape} for rank 0"
            )
