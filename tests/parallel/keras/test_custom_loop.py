"""A loop of one's own in `strategy.run`: an optimizer's step takes the sum over the replicas, in both backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras

import mpidist.keras

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BATCH, STEPS = 7, 5
X = np.random.default_rng(1).standard_normal((BATCH * STEPS, 3)).astype("float32")
Y = np.random.default_rng(2).standard_normal((BATCH * STEPS, 2)).astype("float32")


def make_step(model: Any, optimizer: Any) -> Any:
    """A function of a part of the batch that changes the model, and returns the part's loss."""
    def loss_of(predicted: Any, y: Any) -> Any:
        return keras.ops.sum(keras.ops.square(predicted - y)) / BATCH

    if keras.backend.backend() == "torch":
        torch = pytest.importorskip("torch")

        def torch_step(x: Any, y: Any) -> Any:
            model.zero_grad()
            loss = loss_of(model(x, training=True), torch.as_tensor(y))
            loss.backward()
            with torch.no_grad():
                optimizer.apply([one.value.grad for one in model.trainable_variables], model.trainable_variables)
            return float(loss.detach())

        return torch_step

    jax = pytest.importorskip("jax")

    def stateless_loss(trainable: Any, other: Any, x: Any, y: Any) -> Any:
        predicted, _ = model.stateless_call(trainable, other, x, training=True)
        return loss_of(predicted, y)

    @jax.jit  # type: ignore[untyped-decorator]
    def compiled(trainable: Any, other: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(stateless_loss)(trainable, other, x, y)
        return loss, *optimizer.stateless_apply(state, gradients, trainable)

    def jax_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        loss, trainable, state = compiled(*([one.value for one in each] for each in variables), x, y)
        for variable, value in zip([*variables[0], *variables[2]], [*trainable, *state], strict=True):
            variable.assign(value)
        return float(loss)

    return jax_step


def train(strategy: Strategy) -> tuple[list[float], Any, float]:
    """The losses of all steps, the weights, and the result of a metric."""
    keras.utils.set_random_seed(3 + strategy.communicator.rank)
    with strategy.scope():
        model = mpidist.keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = mpidist.keras.optimizers.SGD(0.05, momentum=0.9)
        error = mpidist.keras.metrics.MeanSquaredError()
    optimizer.build(model.trainable_variables)
    step, losses = make_step(model, optimizer), []

    def replica_step(x: Any, y: Any) -> Any:
        error.update_state(y, model(x))
        return step(x, y)

    dataset = mpidist.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    for x, y in strategy.experimental_distribute_dataset(dataset):
        losses.append(float(strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)))
    return losses, np.concatenate([np.ravel(one) for one in model.get_weights()]), float(error.result())


def test_losses_weights_and_metrics_are_those_of_one_rank(strategy: Strategy, alone: Strategy) -> None:
    expected = train(alone)
    got = train(strategy)
    # Of the ranks only the first began with the weights of the program that ran alone.
    expected = strategy.extended.all_gather_object(expected)[0]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
