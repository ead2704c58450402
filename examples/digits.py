"""Handwritten digits for the examples: the images, and a network in NumPy with its gradients by hand."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import click
import h5py
import numpy as np
import numpy.typing as npt

import mpidist
from mpidist.arrays import namespace

Array = npt.NDArray[Any]
TESTS = 360


def load_data(path: str | None = None) -> tuple[Array, Array, Array, Array]:
    """Load images, as rows of floats from 0 to 1, and labels, for training and for the test.

    Args:
        path: An .npz or .h5 file with `x_train`, `y_train`, `x_test` and `y_test`; without it the 1797 digits of
            scikit-learn, always in the same order.
    """
    if path is None:
        digits = importlib.import_module("sklearn.datasets").load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        x, y = digits.data[order].astype(np.float32) / 16, digits.target[order]
        return x[TESTS:], y[TESTS:], x[:TESTS], y[:TESTS]
    names = ("x_train", "y_train", "x_test", "y_test")
    with np.load(path) if path.endswith(".npz") else h5py.File(path) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise click.BadParameter(f"{path} has no {', '.join(missing)}; expected {', '.join(names)}")
        x_train, y_train, x_test, y_test = (np.asarray(file[name]) for name in names)
    scale = np.float32(255 if x_train.max() > 1 else 1)
    flat = [x.reshape(len(x), -1).astype(np.float32) / scale for x in (x_train, x_test)]
    return flat[0], y_train.astype(np.int64), flat[1], y_test.astype(np.int64)


class Network:
    """Dense layers with tanh between them, and softmax cross-entropy at the end.

    Tanh and not ReLU: for a sum near zero the last bit, which depends on the number of ranks, would decide whether ReLU
    passes a gradient or not.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        random = np.random.default_rng(seed)
        self.kernels = []
        self.biases = []
        for number, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            start = (random.standard_normal((fan_in, fan_out)) * np.sqrt(1 / fan_in)).astype(np.float32)
            self.kernels.append(mpidist.Variable(start, name=f"kernel_{number}"))
            self.biases.append(mpidist.Variable(np.zeros(fan_out, np.float32), name=f"bias_{number}"))

    @property
    def variables(self) -> list[Any]:
        return [*self.kernels, *self.biases]

    def forward(self, x: Array) -> list[Array]:
        """Compute the activations of all layers; the last ones are the logits."""
        xp = namespace(x)
        activations = [x]
        for number, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            x = x @ kernel.value() + bias.value()
            if number < len(self.kernels) - 1:
                x = xp.tanh(x)
            activations.append(x)
        return activations

    def losses_and_gradients(self, x: Array, y: Array, size: int, gradients: Sequence[Array]) -> Array:
        """Compute the loss of each example, and write the gradients of their sum divided by `size` in place."""
        xp = namespace(x)
        activations = self.forward(x)
        logits = activations[-1] - activations[-1].max(axis=1, keepdims=True)
        exponentials = xp.exp(logits)
        delta = exponentials / exponentials.sum(axis=1, keepdims=True)
        right = (xp.arange(len(y)), y)
        losses: Array = -xp.log(delta[right] + 1e-12)
        delta[right] -= 1
        delta /= np.float32(size)
        layers = len(self.kernels)
        for number in reversed(range(layers)):
            xp.matmul(activations[number].T, delta, out=gradients[number])
            xp.sum(delta, axis=0, out=gradients[layers + number])
            if number:
                delta = (delta @ self.kernels[number].value().T) * (1 - activations[number] ** 2)
        return losses
