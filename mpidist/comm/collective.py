"""The collective: how arrays of all ranks are combined. Backends keep this contract; `selection` picks one.

A new backend is one module with a class like `SoloCollective` below, one line in the table of `selection`, and passes
the contract tests of `tests/parallel/test_collective.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpidist.comm.agreement import require_same
from mpidist.comm.communicator import Communicator
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
            Shape of `array`; dtype of `array`, except for `MEAN` of integers.

        Raises:
            MismatchError: Shapes, dtypes or operations differ; looked at in the first calls and then ever more
                rarely, or at each call under `CommunicationOptions(check=True)`.
            TypeError: A dtype that cannot be combined so: booleans under SUM, MEAN or PROD, or objects.
        """
        ...

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. The array of rank `root`, on every rank.

        Args:
            array: On every rank the shape and dtype of the root's; the values count only there.
            root: Rank whose values count.

        Returns:
            A new array on ranks other than `root`, `array` itself there.
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
            MismatchError: Dtypes, numbers of dimensions or other sizes differ.
            ValueError: A scalar, or an axis out of range.
        """
        ...

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        ...


class SoloCollective:
    """One rank: every operation returns its input, checked as the others would."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        """Collective. `array`, as float64 for the MEAN of integers."""
        check_reducible(array, op)
        if op is ReduceOp.MEAN and array.dtype.kind in "iu":
            return array.astype(np.float64)
        return array

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. `array`."""
        return array

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        """Collective. `array`."""
        check_axis(array, axis)
        return array

    def barrier(self) -> None:
        """Collective. Returns at once."""


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


def check_axis(array: AnyArray, axis: int) -> int:
    """Local. The axis as a number from 0, or ValueError."""
    if array.ndim == 0:
        raise ValueError("gather needs arrays of at least one dimension, got a scalar; use np.atleast_1d(value)")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"`axis` is out of range: expected {-array.ndim} to {array.ndim - 1} for shape {array.shape}, got {axis}"
        )
    return axis % array.ndim


def check_gatherable(described: list[tuple[tuple[int, ...], str]], axis: int) -> None:
    """Local. Raise MismatchError unless shapes agree everywhere but along `axis`, the same list on every rank."""
    others = [((*shape[:axis], "any", *shape[axis + 1 :]), dtype) for shape, dtype in described]
    require_same(
        others, "gather: dtype and shape apart from the gathered axis",
        f"Sizes may differ along axis {axis} only.",
    )
