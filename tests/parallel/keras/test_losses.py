"""One update is that of one rank, whatever the loss is divided by; and what cannot be known is refused by name."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras

import mpidist.keras
from tests.helpers.amounts import turns

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

layers = keras.layers
ROWS, STEPS = 11, 6

REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")
WEIGHTS = ("plain", "sample_weight", "class_weight", "mask", "mask and weights")
TERMS = ("none", "l2", "activity", "add_loss")
CASES = [
    (*case, outputs) for case in itertools.product(REDUCTIONS, WEIGHTS, TERMS) for outputs in (1, 2)
    # Keras has class weights for one output only.
    if not (case[1] == "class_weight" and outputs == 2)
]


class Added(keras.layers.Layer):  # type: ignore[misc]
    """A layer that adds the mean of its input to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def make_model(term: str, outputs: int, *, is_masked: bool) -> Any:
    inputs = keras.Input((STEPS,), dtype="int32")
    hidden = layers.Embedding(7, 4, mask_zero=is_masked)(inputs)
    if term == "add_loss":
        hidden = Added()(hidden)
    options = {"l2": {"kernel_regularizer": "l2"}, "activity": {"activity_regularizer": "l2"}}.get(term, {})
    heads = [layers.Dense(3, name=f"head_{number}", **options)(hidden) for number in range(outputs)]
    return keras.Model(inputs, heads if outputs > 1 else heads[0])


def update(case: tuple[str, str, str, int], strategy: Strategy) -> Any:
    """What one batch does to the weights."""
    reduction, weight, term, outputs = case
    random = np.random.default_rng(7)
    tokens = random.integers(1, 7, (ROWS, STEPS))
    if weight.startswith("mask"):
        # The first rows have many of them.
        tokens[:6, 2:] = 0
    # Class weights want one class a row.
    per_row = weight == "class_weight"
    y = random.integers(0, 3, ROWS if per_row else (ROWS, STEPS))
    named: dict[str, Any] = {}
    if weight == "sample_weight":
        named["sample_weight"] = np.linspace(0.1, 3, ROWS)
    if weight == "mask and weights":
        named["sample_weight"] = random.random((ROWS, STEPS))
    if weight == "class_weight":
        named["class_weight"] = {0: 5.0, 1: 0.1}
    keras.utils.set_random_seed(1)
    model = make_model(term, outputs, is_masked=weight.startswith("mask"))
    if per_row:
        model = keras.Model(model.inputs, layers.GlobalAveragePooling1D()(model.outputs[0]))
    if weight == "sample_weight":
        model = keras.Model(model.inputs, [layers.Flatten()(one) for one in model.outputs])
        y = random.integers(0, 3 * STEPS, ROWS)
    if outputs > 1 and "sample_weight" in named:
        named["sample_weight"] = [named["sample_weight"]] * outputs
    loss = [keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction) for _ in range(outputs)]
    model.compile(keras.optimizers.SGD(0.01), loss=loss if outputs > 1 else loss[0])
    before = [one.copy() for one in model.get_weights()]
    mpidist.keras.distribute(model, strategy)
    model.fit(tokens, [y] * outputs if outputs > 1 else y, batch_size=ROWS, shuffle=False, verbose=0, **named)
    return np.concatenate([np.ravel(one - other) for one, other in zip(model.get_weights(), before, strict=True)])


def require_update_of_one_rank(case: tuple[str, str, str, int], strategy: Strategy, alone: Strategy) -> None:
    expected = update(case, alone)
    got = update(case, strategy)
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", turns(CASES, 10), ids=lambda case: "-".join(map(str, case)))
def test_an_update_is_that_of_one_rank(case: tuple[str, str, str, int], strategy: Strategy, alone: Strategy) -> None:
    require_update_of_one_rank(case, strategy, alone)


def test_an_update_of_two_masked_outputs_is_that_of_one_rank(strategy: Strategy, alone: Strategy) -> None:
    # Two reductions for the losses before that of the gradients.
    require_update_of_one_rank(("sum_over_batch_size", "mask and weights", "add_loss", 2), strategy, alone)


def test_the_mask_of_a_loss_counts(strategy: Strategy, alone: Strategy) -> None:
    random = np.random.default_rng(2)
    x, y = random.standard_normal((9, 4)).astype("float32"), np.array([-1, -1, -1, -1, 0, 1, 2, -1, 1])
    weights = []
    for one in (alone, strategy):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        model.compile(keras.optimizers.SGD(1.0), loss)
        mpidist.keras.distribute(model, one)
        model.fit(x, y, batch_size=9, shuffle=False, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[1], weights[0], atol=1e-6)


def test_a_row_that_counts_nothing_may_be_infinite(strategy: Strategy) -> None:
    if strategy.num_replicas_in_sync < 2:
        pytest.skip("every rank has rows")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(), metrics=["mae"])
    mpidist.keras.distribute(model, strategy)
    # The first rank's row is the one that the others are given to have a shape, with targets of their own.
    targets = np.full((1, 1), 1.0 if strategy.communicator.rank == 0 else 3e38, "float32")
    history = model.fit(np.ones((1, 2), "float32"), targets, batch_size=1, shuffle=False, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()
    assert np.isfinite(history.history["loss"]).all()


class OwnReduction(keras.losses.Loss):  # type: ignore[misc]
    """A loss that divides by what only it knows."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.sum(y_pred) / 7

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


def test_a_loss_that_reduces_by_itself_is_refused_by_name(strategy: Strategy) -> None:
    if strategy.num_replicas_in_sync < 2:
        pytest.skip("one replica has all rows")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", OwnReduction(name="of_my_own"))
    with pytest.raises(ValueError, match="loss 'of_my_own'"):
        mpidist.keras.distribute(model, strategy)
