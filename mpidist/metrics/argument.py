"""Arguments of metrics: converted to arrays of numbers and checked against each other; CuPy arrays stay on the GPU."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import named_dtype


def as_numbers(name: str, value: npt.ArrayLike) -> AnyArray:
    """Local. An array of booleans, integers or floats, in the dtype of the value.

    Args:
        name: Name of the argument, for the error.
        value: A CuPy array, or a value that `np.asarray` takes.

    Returns:
        The array; a CuPy array where the value is one.

    Raises:
        ValueError: The value is a nest of lists of different lengths, or does not hold real numbers.
    """
    try:
        array = arrays.as_array(value)
    except ValueError as error:
        raise ValueError(f"`{name}` must be an array, got nested lists of different lengths: {error}") from error
    # The dtypes of ml_dtypes, for example bfloat16, have the kind V, as structured dtypes have.
    if array.dtype.kind in "biuf" or (array.dtype.kind == "V" and array.dtype.names is None):
        return array
    raise ValueError(f"`{name}` must be an array of real numbers, got dtype {array.dtype} and shape {array.shape}")


def as_floats(name: str, value: npt.ArrayLike) -> AnyArray:
    """Local. `as_numbers` in float64."""
    return as_numbers(name, value).astype(np.float64, copy=False)


def highest(scores: AnyArray) -> AnyArray:
    """Local. The highest score of each example, over its classes, which are the last dimension and remain as one."""
    # CuPy's maximum takes no initial value, without which there is none of no classes.
    found: AnyArray = scores.max(-1, keepdims=True) if scores.shape[-1] else scores.sum(-1, keepdims=True)
    return found


def as_float_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Local. A floating dtype, of NumPy or ml_dtypes.

    Raises:
        ValueError: `dtype` is not a floating dtype.
    """
    try:
        found = named_dtype(dtype)
    except TypeError as error:
        raise ValueError(f"`dtype` must be a floating dtype, 'float32' for instance, got {dtype!r}") from error
    # The dtypes of ml_dtypes have the kind V.
    if found.kind == "f" or (found.kind == "V" and found.type is not np.void):
        return found
    raise ValueError(f"`dtype` must be a floating dtype, 'float32' for instance, got {dtype!r}")


def as_pair(y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> tuple[AnyArray, AnyArray]:
    """Local. Both arguments as arrays of one shape; a last dimension of 1 that only one of them has is dropped.

    Raises:
        ValueError: The shapes differ in another way, or an argument does not hold numbers.
    """
    labels, predictions = as_numbers("y_true", y_true), as_numbers("y_pred", y_pred)
    got = f"got y_true {labels.shape} and y_pred {predictions.shape}"
    if labels.ndim == predictions.ndim + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    elif predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == 1:
        predictions = predictions[..., 0]
    if labels.shape != predictions.shape:
        raise ValueError(f"`y_pred` must have the shape of `y_true`, {got}")
    return labels, predictions


def as_classes(y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> tuple[AnyArray, AnyArray]:
    """Local. Class numbers of shape (batch,) and scores of shape (batch, classes); (batch, 1) counts as (batch,).

    Raises:
        ValueError: The shapes do not fit together, or an argument does not hold numbers.
    """
    labels, scores = as_numbers("y_true", y_true), as_numbers("y_pred", y_pred)
    if labels.ndim == scores.ndim and labels.shape[-1:] == (1,):
        labels = labels[..., 0]
    if scores.ndim == 0 or scores.shape[:-1] != labels.shape:
        raise ValueError(
            f"`y_pred` must have the shape of `y_true` and a last dimension of classes, got y_true "
            f"{labels.shape} and y_pred {scores.shape}"
        )
    return labels, scores


def as_one_hot(y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> tuple[AnyArray, AnyArray]:
    """Local. Class numbers of one-hot labels, and scores; both arguments have a last dimension of classes.

    Raises:
        ValueError: The shapes differ, there is no dimension of classes, or an argument does not hold numbers.
    """
    labels, scores = as_numbers("y_true", y_true), as_numbers("y_pred", y_pred)
    if labels.ndim == 0 or labels.shape != scores.shape or (labels.size == 0 and labels.shape[-1] == 0):
        raise ValueError(
            f"`y_true` must be one-hot, of the shape of `y_pred` with a last dimension of classes, got y_true "
            f"{labels.shape} and y_pred {scores.shape}. Use the metric whose name begins with Sparse for class numbers"
        )
    return labels.argmax(-1), scores


def on_one_device(values: list[Any]) -> list[Any]:
    """Local. The values as they are; if one of them is on a GPU, all of them there. None stays None."""
    if not any(map(arrays.is_cupy, values)):
        return values
    xp = arrays.gpu_namespace()
    return [None if value is None else arrays.move(arrays.as_array(value), xp) for value in values]


def spread_weights(sample_weight: npt.ArrayLike | None, like: AnyArray) -> AnyArray:
    """Local. One weight per value.

    Args:
        sample_weight: None for weights of 1, a number, or an array whose shape is that of the values or of their
            leading dimensions. A further last dimension of 1 is dropped.
        like: The values.

    Returns:
        A float64 array of the values' shape, on their device. It is a broadcast view: do not write to it.

    Raises:
        ValueError: The weights' shape does not fit, or they are not numbers.
    """
    shape, xp = like.shape, arrays.namespace(like)
    weight: AnyArray = xp.ones(()) if sample_weight is None else as_floats("sample_weight", sample_weight)
    got = weight.shape
    if weight.ndim > 1 and weight.shape[-1] == 1 and weight.shape != shape[: weight.ndim]:
        weight = weight[..., 0]
    if weight.ndim > len(shape) or weight.shape != shape[: weight.ndim]:
        raise ValueError(
            f"`sample_weight` must have the shape of the values or of their leading dimensions, expected a prefix of "
            f"{shape}, got {got}"
        )
    spread: AnyArray = xp.broadcast_to(weight.reshape(weight.shape + (1,) * (len(shape) - weight.ndim)), shape)
    return spread


def as_thresholds(thresholds: float | Sequence[float], name: str = "thresholds") -> tuple[float, ...]:
    """Local. One threshold or several, checked to be in [0, 1].

    Raises:
        ValueError: There is no threshold, or one is outside.
    """
    array = as_floats(name, thresholds)
    if array.ndim > 1 or array.size == 0 or not np.all((array >= 0) & (array <= 1)):
        raise ValueError(f"`{name}` must be a number or a list of numbers in [0, 1], got {thresholds!r}")
    return tuple(float(threshold) for threshold in array.reshape(-1))


def positive(name: str, value: int, least: int = 1) -> int:
    """Local. `value` as an int of at least `least`.

    Raises:
        ValueError: `value` is not such an integer.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")
    return number
