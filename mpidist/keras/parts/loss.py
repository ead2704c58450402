"""Losses whose divisor is not the number of rows: their gradient is scaled where the loss is computed.

A replica's gradients are weighted by its rows. For a loss that is divided by the number of unmasked entries, by the sum
of the sample weights, or by nothing, that weight is wrong, and the update of the model wrong in silence. The scaled
gradient times the weight is the replica's part of the gradient over the whole batch; the loss's value stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from mpidist.keras.backends.choice import serving
from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import derive, plain_class
from mpidist.keras.private import is_symbolic, mask_of, to_same_rank
from mpidist.keras.step import ModelStep, current

if TYPE_CHECKING:
    from keras.losses import Loss as _Loss
else:
    _Loss = object

ops = keras.ops


class DistributedLoss(_Loss):  # type: ignore[misc]
    """A loss that is right for a part of the batch."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Collective. Compute the loss as Keras does; only its gradient differs."""
        step = current()
        if step is None or not step.is_training or step.binding.size == 1:
            return super().__call__(y_true, y_pred, sample_weight)
        object.__setattr__(self, "_mpidist_called", (None, 0))
        loss = super().__call__(y_true, y_pred, sample_weight)
        out_mask, rank = self._mpidist_called
        if rank == 0 or is_symbolic(loss):
            # Already reduced by the user's function: as a mean, the documentation says.
            return loss
        mask = mask_of(y_pred)
        if out_mask is not None:
            mask = out_mask if mask is None else ops.logical_and(mask, out_mask)
        divisor = _divisor(self.reduction, mask, sample_weight)
        return loss if divisor is None else _rescale(step, loss, divisor, is_sum=self.reduction == "sum")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Local. Compute the loss as Keras does, and note the mask that Keras attaches."""
        losses = super().call(y_true, y_pred)
        object.__setattr__(self, "_mpidist_called", (mask_of(losses), len(losses.shape)))
        return losses


def _divisor(reduction: str | None, mask: Any, sample_weight: Any) -> Any:
    """Local. The divisor of the loss on this replica: None for the number of its rows, 1 for no division."""
    if reduction == "sum":
        return ops.ones((), "float32")
    if reduction not in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
        return None
    if mask is not None:
        mask = ops.cast(mask, "float32")
    if reduction != "mean_with_sample_weight" or sample_weight is None:
        return None if mask is None else ops.sum(mask)
    weights = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
    if mask is not None:
        mask, weights = to_same_rank(mask, weights)
        weights = weights * mask
    return ops.sum(weights)


def _rescale(step: ModelStep, loss: Any, divisor: Any, *, is_sum: bool) -> Any:
    rows = ops.cast(ops.convert_to_tensor(step.rows), "float32")
    own = ops.cast(divisor, "float32") * ops.cast(rows > 0, "float32")
    total = serving.sum_small(step, ops.stack([own, rows]))
    scale = ops.divide_no_nan(total[1], rows)
    if not is_sum:
        scale = scale * ops.divide_no_nan(own, total[0])
    scale = ops.stop_gradient(ops.cast(scale, loss.dtype))
    return scale * loss + ops.stop_gradient(loss - scale * loss)


def take_loss(loss: Any, binding: ModelBinding) -> None:
    """Local. Give a loss the class with which it is right for a part of the batch.

    Raises:
        ValueError: The loss reduces in its own `__call__`, whose divisor cannot be known.
    """
    if plain_class(loss).__call__ is not keras.losses.Loss.__call__:
        raise ValueError(
            f"loss {loss.name!r}: {plain_class(loss).__name__} has a `__call__` of its own, so nothing says by what it "
            "divides. Expected a keras.losses.Loss that defines `call(y_true, y_pred)`, one value for each row"
        )
    derive(loss, DistributedLoss, binding, is_shared=True)
