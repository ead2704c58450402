"""Losses that are averaged over the global batch."""

from __future__ import annotations

import logging
import operator
import weakref
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context, tree
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.strategy.values import as_array, wide_dtype
from mpidist.variables.arena import current_home
from mpidist.variables.variable import Home

logger = logging.getLogger("mpidist")
# The rows of the first loss whose batch size was guessed, for each home of variables; None after a warning.
_first_rows: weakref.WeakKeyDictionary[Home, int | None] = weakref.WeakKeyDictionary()


def compute_average_loss(
    per_example_loss: npt.ArrayLike,
    sample_weight: npt.ArrayLike | None = None,
    global_batch_size: int | None = None,
) -> Any:
    """Local. The sum of the losses of this replica's examples, divided by the global batch size.

    If `global_batch_size` is the size of this batch, the sum over the replicas is the mean over the global batch
    (`reduce` sums losses, `apply_gradients` gradients). Without it the size is guessed, as in tf.nn: this replica's
    number of examples times the number of replicas. The guess is right only if all replicas have equally many examples:
    of a last batch with 7 examples 4 ranks take 2, 2, 2 and 1, and guess 8, 8, 8 and 4. A rank without examples guesses
    0, and its loss is 0. A rank whose number of examples differs from that of its first such call under this strategy
    warns once.

    Args:
        per_example_loss: The losses, one per example, or more dimensions.
        sample_weight: A number, or one weight per example. Weights of fewer dimensions broadcast against the losses;
            a last dimension of 1 that the losses do not have is dropped.
        global_batch_size: Number of examples on all replicas, an integer; for 0 the loss is 0. Default: the guess. Pass
            it if a batch may be uneven, as the last one of an epoch; or drop that, `batch(n, drop_remainder=True)`.

    Returns:
        A NumPy scalar of the losses' dtype, float64 for integers and booleans; for CuPy arrays an array without
        dimensions.

    Raises:
        ValueError: The loss is a scalar, the weights have more dimensions than the losses, or the size is negative.
        TypeError: The size is no integer.
        RuntimeError: The call is without the size in cross-replica context, where a replica's examples are unknown.
    """
    losses = _as_real(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "`per_example_loss` must have one loss per example, got a scalar: pass the losses before they are averaged"
        )
    if sample_weight is not None:
        weight = arrays.move(as_array(sample_weight).astype(losses.dtype), arrays.namespace(losses))
        if weight.ndim == losses.ndim + 1 and weight.shape[-1] == 1:
            weight = weight[..., 0]
        if weight.ndim > losses.ndim:
            raise ValueError(
                f"`sample_weight` must not have more dimensions than the losses, got shapes {weight.shape} and "
                f"{losses.shape}"
            )
        losses = losses * weight.reshape(weight.shape + (1,) * (losses.ndim - weight.ndim))
    if global_batch_size is None:
        _require_replica("compute_average_loss", "or give it `global_batch_size`")
        examples = _guessed_count(losses.shape[0])
    else:
        examples = _checked_count(global_batch_size)
    wide = wide_dtype(losses.dtype)
    # Without examples on all replicas the mean is 0, and not NaN.
    average = losses.sum(dtype=wide) * wide.type(0) if examples == 0 else losses.sum(dtype=wide) / wide.type(examples)
    return average.astype(losses.dtype) if is_half(losses.dtype) else average


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Local. The sum of all terms divided by the number of replicas, since gradients are summed over the replicas.

    Args:
        regularization_loss: A number or an array, or any nest of them, the same on every replica.

    Returns:
        A NumPy scalar; for CuPy arrays an array without dimensions.

    Raises:
        RuntimeError: The call is in cross-replica context, which has no loss of one replica.
    """
    _require_replica("scale_regularization_loss", "")
    terms = [_as_real(leaf) for leaf in tree.flatten(regularization_loss)[0]]
    sums = [term.sum(dtype=wide_dtype(term.dtype)).astype(term.dtype.newbyteorder("=")) for term in terms]
    return sum(sums[1:], sums[0]) / _replica_count() if sums else np.float32(0)


def _as_real(losses: Any) -> AnyArray:
    """An array in whose dtype weights and means are numbers: integers and booleans become float64."""
    array = as_array(losses)
    return array.astype(np.float64) if array.dtype.kind in "biu" else array


def _require_replica(name: str, otherwise: str) -> None:
    entry = context.innermost()
    if entry is not None and entry.replica_context is None:
        raise RuntimeError(
            f"{name} must be called inside `run`, got a call in cross-replica context: call it where the loss is "
            f"computed{otherwise and ', ' + otherwise}"
        )


def _checked_count(global_batch_size: Any) -> int:
    try:
        count = operator.index(global_batch_size)
    except TypeError:
        count = None
    if count is None or isinstance(global_batch_size, bool):
        raise TypeError(
            f"`global_batch_size` must be an integer, got {global_batch_size!r}: pass the number of examples on all "
            "replicas"
        )
    if count < 0:
        raise ValueError(
            f"`global_batch_size` must not be negative, got {count}: pass the number of examples on all replicas"
        )
    return count


def _guessed_count(rows: int) -> int:
    replicas = _replica_count()
    home = current_home()
    first = _first_rows.setdefault(home, rows)
    if replicas > 1 and first is not None and first != rows:
        _first_rows[home] = None
        logger.warning(
            "rank %d: compute_average_loss was called without `global_batch_size` for %d examples, and for %d at the "
            "first time. It divides by the number of this replica's examples times %d replicas, which is the global "
            "batch only where all have equally many. If a batch may be uneven, as the last one of an epoch, pass "
            "`global_batch_size`, the number of examples of all replicas",
            home.communicator.rank, rows, first, replicas,
        )
    return rows * replicas


class _Counted(Protocol):
    """A replica context, which is defined above this module."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas."""
        ...


def _replica_count() -> int:
    """The number of replicas of the current replica context, some of which may be logical, or of the strategy."""
    entry = context.innermost()
    if entry is not None and entry.replica_context is not None:
        return cast(_Counted, entry.replica_context).num_replicas_in_sync
    return current_home().communicator.size
