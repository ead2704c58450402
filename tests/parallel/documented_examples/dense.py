"""The documents' `Dense(1, input_shape=(1,))` in NumPy: a kernel, a bias, and the gradients of a loss by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import mpidist

Array = npt.NDArray[Any]


class Dense:
    """`features @ kernel + bias`, one output. Make it in the strategy's scope, as a Keras layer."""

    def __init__(self, input_size: int = 1, initial_weight: float = 0.0) -> None:
        self.kernel = mpidist.Variable(np.full((input_size, 1), initial_weight, np.float32), name="kernel")
        self.bias = mpidist.Variable(np.zeros(1, np.float32), name="bias")

    @property
    def trainable_variables(self) -> list[Any]:
        return [self.kernel, self.bias]

    def __call__(self, features: Array) -> Array:
        predictions: Array = features @ self.kernel.value() + self.bias.value()
        return predictions

    def gradients(self, features: Array, output_gradients: Array) -> list[Array]:
        """Stands for `tape.gradient(loss, model.trainable_variables)`.

        `output_gradients` is the derivative of the loss with respect to each prediction.
        """
        return [features.T @ output_gradients, output_gradients.sum(axis=0)]


class BinaryCrossentropy:
    """Stands for Keras's `BinaryCrossentropy(from_logits=True, reduction=NONE)`: one loss per example."""

    def __call__(self, labels: Array, logits: Array) -> Array:
        losses: Array = np.mean(np.logaddexp(np.float32(0), logits) - labels * logits, axis=-1)
        return losses

    def gradients(self, labels: Array, logits: Array) -> Array:
        """Derivative of each example's loss with respect to its logit."""
        slopes: Array = 1 / (1 + np.exp(-logits)) - labels
        return slopes
