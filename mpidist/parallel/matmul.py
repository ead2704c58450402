"""Products with matrices whose columns, or rows, are distributed over the logical devices of a replica."""

from __future__ import annotations

from collections.abc import Callable

import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.parallel.devices import Devices, matrix

# A function of the gradient of a product that returns the gradients of both arguments.
MatmulBackward = Callable[[npt.ArrayLike], tuple[AnyArray, AnyArray]]


def column_parallel_matmul(x: npt.ArrayLike, w: npt.ArrayLike) -> tuple[AnyArray, MatmulBackward]:
    """Local. Compute `x @ w`, where each logical device has some columns of `w`; its `backward` is Collective.

    Args:
        x: Shape (..., n), the same on all logical devices.
        w: This device's columns, shape (n, m / devices), of a matrix with partition_dimensions=[1, devices].

    Returns:
        This device's columns of the product, shape (..., m / devices); and `backward`, a function of their gradient
        that returns the gradient of `x`, summed over the logical devices, and the gradient of this device's columns of
        `w`.

    Raises:
        ValueError: The shapes do not fit together.
        TypeError: An argument is no array of floats.
        RuntimeError: The call is in cross-replica context.
    """
    layer = "column_parallel_matmul"
    devices, left, right = _arguments(x, w, layer)

    def backward(gradient: npt.ArrayLike) -> tuple[AnyArray, AnyArray]:
        given = _fitting(gradient, (*left.shape[:-1], right.shape[1]), left, layer)
        return devices.sum(given @ right.T.conj()), _rows(left).T.conj() @ _rows(given)

    return left @ right, backward


def row_parallel_matmul(x: npt.ArrayLike, w: npt.ArrayLike) -> tuple[AnyArray, MatmulBackward]:
    """Collective over the replica. Compute `x @ w`, where each logical device has some rows of `w`.

    Args:
        x: This device's columns, shape (..., n / devices), as `column_parallel_matmul` returns them.
        w: This device's rows, shape (n / devices, m), of a matrix with partition_dimensions=[devices, 1].

    Returns:
        The product, shape (..., m), the same on all logical devices; and `backward`, a Local function of the product's
        gradient that returns the gradients of this device's columns of `x` and of this device's rows of `w`.

    Raises:
        ValueError, TypeError, RuntimeError: See `column_parallel_matmul`.
    """
    layer = "row_parallel_matmul"
    devices, left, right = _arguments(x, w, layer)

    def backward(gradient: npt.ArrayLike) -> tuple[AnyArray, AnyArray]:
        given = _fitting(gradient, (*left.shape[:-1], right.shape[1]), left, layer)
        return given @ right.T.conj(), _rows(left).T.conj() @ _rows(given)

    return devices.sum(left @ right), backward


def _arguments(x: npt.ArrayLike, w: npt.ArrayLike, layer: str) -> tuple[Devices, AnyArray, AnyArray]:
    devices, left, right = Devices(layer), matrix(x, "x", layer, least=1), matrix(w, "w", layer, most=2)
    if left.shape[-1] != right.shape[0]:
        raise ValueError(
            f"{layer}: the last dimension of `x` must be the first one of `w`, got shapes {left.shape} and "
            f"{right.shape} on logical device {devices.device} of {devices.count}. A tile is `variable.value()`"
        )
    return devices, left, right


def _fitting(gradient: npt.ArrayLike, shape: tuple[int, ...], like: AnyArray, layer: str) -> AnyArray:
    given = matrix(gradient, "gradient", layer, least=1)
    if given.shape != shape:
        raise ValueError(f"{layer}: `gradient` must have the shape of the result, {shape}, got {given.shape}")
    return given.astype(like.dtype, copy=False)


def _rows(array: AnyArray) -> AnyArray:
    return array.reshape(-1, array.shape[-1])
