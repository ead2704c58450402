"""The way of gradients in `fit`: each is copied when it is computed, and the results are those of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras

import mpidist.keras
from mpidist.keras.derive import binding_of

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

is_torch = keras.backend.backend() == "torch"
layers = keras.layers
# The last batch has one row: on several ranks all but the first have none.
X = np.random.default_rng(1).standard_normal((33, 8)).astype("float32")
Y = np.random.default_rng(2).standard_normal((33, 4)).astype("float32")


class Keeping(keras.Sequential):  # type: ignore[misc]
    """A model that keeps the gradients of each step, and copies of them."""

    def train_step(self, *args: Any) -> Any:
        logs = super().train_step(*args)
        if is_torch:
            gradients = [variable.value.grad for variable in self.trainable_variables]
            self.__dict__.setdefault("kept", []).append([(one, one.clone()) for one in gradients])
        return logs


def trained(strategy: Strategy, kind: type = keras.Sequential, optimizer: Any = "sgd") -> Any:
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((8,)), layers.Dense(16, activation="tanh"), layers.Dense(4)])
    model.compile(optimizer, "mse")
    mpidist.keras.distribute(model, strategy)
    for _ in range(2):
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    return model


def require_weights(model: Any, other: Any) -> None:
    for mine, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not is_torch, reason="of the backend torch")
def test_a_gradient_is_copied_when_it_is_computed(strategy: Strategy, alone: Strategy) -> None:
    model = trained(strategy, Keeping)
    binding = binding_of(model)
    assert binding is not None
    ((_, flat),) = binding.memory.values()
    begin = flat.data_ptr()
    for gradient, _ in model.kept[-1]:
        assert begin <= gradient.data_ptr() < begin + 4 * flat.numel()
    # What the program has kept is not changed by later steps.
    for step in model.kept[:-1]:
        for gradient, copy in step:
            assert (gradient == copy).all()
    assert not binding.hooks
    require_weights(model, trained(alone))


@pytest.mark.skipif(is_torch, reason="of the backend jax")
def test_large_gradients_pass_one_after_the_other(
    strategy: Strategy, alone: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(alone)
    monkeypatch.setattr("mpidist.keras.backends.jax_backend.STAGED_BYTES", 0)
    # Kernels are large then, and biases are not.
    monkeypatch.setattr("mpidist.keras.backends.jax_staging._ALONE_BYTES", 100)
    model = trained(strategy)
    require_weights(model, expected)
    binding = binding_of(model)
    assert binding is not None
    assert len(binding.memory) == (strategy.num_replicas_in_sync > 1)
