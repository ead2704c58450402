"""Optimizers and schedules on one rank: step by step the same as those of Keras 3."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.optimizers import LossScaleOptimizer
from mpidist.variables.variable import BaseVariable
from tests.optimizers import BY_NAME, FAMILIES, KERAS

pytest.importorskip("torch", reason="Keras is run on PyTorch")
os.environ["KERAS_BACKEND"] = "torch"
keras: Any = importlib.import_module("keras")

# Keras's own: its variables know the first form of NumPy's protocol.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

SHAPES = ((3, 4), (), (5,))
STEPS = 20


def ours(name: str, *args: Any, **options: Any) -> Any:
    return getattr(optimizers, name)(*args, **options)


def theirs(name: str, *args: Any, **options: Any) -> Any:
    return getattr(keras.optimizers, BY_NAME[name].keras_name or name)(*args, **options)


def gradients_of(step: int) -> list[AnyArray]:
    generator = np.random.default_rng(step)
    return [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]


def make_variables() -> tuple[list[BaseVariable], list[Any]]:
    generator = np.random.default_rng(99)
    values = [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]
    return [mpidist.Variable(value) for value in values], [keras.Variable(value) for value in values]


def to_numpy(variables: list[Any]) -> list[AnyArray]:
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def require_same(variables: list[BaseVariable], references: list[Any], tolerance: float = 2e-5) -> None:
    for variable, reference in zip(variables, to_numpy(references), strict=True):
        np.testing.assert_allclose(variable.numpy(), reference, rtol=tolerance, atol=tolerance)


def compare(
    optimizer: Any,
    reference: Any,
    *,
    before_step: Callable[[int], None] = lambda step: None,
    factor: Callable[[int], float] = lambda step: 1.0,
) -> None:
    """Train with both and compare the variables after each of the steps."""
    variables, references = make_variables()
    for step in range(STEPS):
        before_step(step)
        gradients = [gradient * np.float32(factor(step)) for gradient in gradients_of(step)]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        reference.apply([keras.ops.convert_to_tensor(gradient) for gradient in gradients], references)
        require_same(variables, references)
    started = [variable.numpy() for variable in make_variables()[0]]
    assert all((variable.numpy() != was).any() for variable, was in zip(variables, started, strict=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 1.5},
    "global_clipnorm": {"global_clipnorm": 2.0},
    "clipvalue": {"clipvalue": 0.5},
    "average": {"use_ema": True, "ema_momentum": 0.8},
    "average, overwriting": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation, clipping, decay": {
        "gradient_accumulation_steps": 2, "global_clipnorm": 1.0, "weight_decay": 0.05
    },
}


@pytest.mark.parametrize("case", KERAS)
def test_every_family(case: str) -> None:
    name, options = KERAS[case]
    compare(ours(name, 0.1, **options), theirs(name, 0.1, **options))


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("case", ["SGD nesterov", "RMSprop both", "Ftrl all", "Lion", "Lamb"])
def test_every_option(case: str, options: str) -> None:
    name, own = KERAS[case]
    both = own | OPTIONS[options]
    compare(ours(name, 0.1, **both), theirs(name, 0.1, **both))


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("options", ["", "clipnorm", "average, overwriting", "accumulation"])
def test_adam_with_the_epsilon_of_its_docstring(name: str, amsgrad: bool, options: str) -> None:
    beta_2, epsilon, more = 0.9, 0.1, {**OPTIONS.get(options, {}), **({"weight_decay": 0.1} if name == "AdamW" else {})}
    optimizer = ours(name, 0.1, beta_1=0.8, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad, **more)
    reference = theirs(name, 0.1, beta_1=0.8, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad, **more)

    def adjust(step: int) -> None:
        reference.epsilon = epsilon * np.sqrt(1 - beta_2 ** (step // more.get("gradient_accumulation_steps", 1) + 1))

    compare(optimizer, reference, before_step=adjust)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_with_default_arguments(name: str) -> None:
    # Where gradients are large against epsilon its place does not matter.
    compare(ours(name), theirs(name))


@pytest.mark.parametrize(("name", "square"), [("Adagrad", 0.1 + 4.0), ("RMSprop", 0.1 * 4.0)])
def test_the_place_of_epsilon_that_the_docstring_names(name: str, square: float) -> None:
    variable, reference = mpidist.Variable(1.0), keras.Variable(1.0)
    ours(name, 0.5, epsilon=0.2).apply_gradients([(2.0, variable)])
    theirs(name, 0.5, epsilon=0.2).apply([keras.ops.convert_to_tensor(2.0)], [reference])
    assert float(variable.numpy()) == pytest.approx(1 - 0.5 * 2 / (np.sqrt(square) + 0.2))
    assert float(to_numpy([reference])[0]) == pytest.approx(1 - 0.5 * 2 / np.sqrt(square + 0.2))


@pytest.mark.parametrize("case", ["SGD", "SGD momentum", "SGD nesterov", "RMSprop both", "Adadelta", "Ftrl", "Lamb"])
def test_a_rate_that_changes(case: str) -> None:
    name, options = KERAS[case]
    compare(
        ours(name, optimizers.ExponentialDecay(0.2, 4, 0.3), **options),
        theirs(name, keras.optimizers.schedules.ExponentialDecay(0.2, 4, 0.3), **options),
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ExponentialDecay", (0.2, 7, 0.3)), ("ExponentialDecay", (0.2, 7, 0.3, True)), ("CosineDecay", (0.2, 15)),
        ("CosineDecay", (0.2, 15, 0.1)), ("CosineDecay", (0.1, 12, 0.1, "warm", 0.3, 5)),
        ("PiecewiseConstantDecay", ([3, 9], [0.3, 0.2, 0.1])),
        ("InverseTimeDecay", (0.2, 7, 0.3)), ("InverseTimeDecay", (0.2, 7, 3, True)),
        ("PolynomialDecay", (0.2, 8)), ("PolynomialDecay", (0.2, 8, 0.05, 2.5)),
        ("PolynomialDecay", (0.2, 8, 0.05, 0.5, True)), ("PolynomialDecay", (0.01, 8, 0.05)),
        ("CosineDecayRestarts", (0.2, 4)), ("CosineDecayRestarts", (0.2, 4, 2.0, 0.5, 0.1)),
        ("CosineDecayRestarts", (0.2, 4, 1.0, 0.9)), ("CosineDecayRestarts", (0.2, 4, 1.5, 0.7, 0.2)),
    ],
)
def test_schedules(name: str, arguments: Any) -> None:
    # Names are Keras's alone.
    schedule = getattr(optimizers, name)(*(one for one in arguments if one != "warm"))
    reference = getattr(keras.optimizers.schedules, name)(*arguments)
    # At a restart itself the reference is on either side: it counts periods by a logarithm in single precision, which
    # differs between processors. `test_schedules.py` looks at ours.
    steps = np.arange(25) + (0.25 if name == "CosineDecayRestarts" else 0)
    rates = [float(keras.ops.convert_to_numpy(reference(step))) for step in steps]
    np.testing.assert_allclose([schedule(step) for step in steps], rates, rtol=1e-5)


@pytest.mark.parametrize("case", ["SGD momentum", "Lamb"])
def test_averages_become_the_variables(case: str) -> None:
    name, options = KERAS[case]
    optimizer, reference = (make(name, 0.1, use_ema=True, ema_momentum=0.7, **options) for make in (ours, theirs))
    variables, references = make_variables()
    for step in range(STEPS):
        gradients = gradients_of(step)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        reference.apply([keras.ops.convert_to_tensor(gradient) for gradient in gradients], references)
    last = [variable.numpy() for variable in variables]
    optimizer.finalize_variable_values()
    reference.finalize_variable_values(references)
    require_same(variables, references)
    assert any((variable.numpy() != was).any() for variable, was in zip(variables, last, strict=True))


@pytest.mark.parametrize("frequency", [None, 2])
@pytest.mark.parametrize("case", ["SGD momentum", "Lamb"])
def test_averages_move_in_calls_that_only_accumulate(case: str, frequency: int | None) -> None:
    name, options = KERAS[case]
    more = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": frequency, **options}
    optimizer, reference = (make(name, 0.1, gradient_accumulation_steps=3, **more) for make in (ours, theirs))
    variables, references = make_variables()
    # It ends between two updates.
    for step in range(STEPS):
        gradients = gradients_of(step)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        reference.apply([keras.ops.convert_to_tensor(gradient) for gradient in gradients], references)
        require_same(variables, references)
    optimizer.finalize_variable_values()
    reference.finalize_variable_values(references)
    require_same(variables, references)


def test_calls_and_updates_are_counted() -> None:
    optimizer, reference = (make("SGD", 0.1, gradient_accumulation_steps=3) for make in (ours, theirs))
    compare(optimizer, reference)
    # Keras's `iterations` counts updates; ours, like a schedule's argument in both, counts calls.
    assert optimizer.iterations == STEPS
    assert int(keras.ops.convert_to_numpy(reference.iterations)) == STEPS // 3


@pytest.mark.parametrize("case", ["SGD momentum", "Lamb"])
def test_loss_scaling(case: str) -> None:
    name, options = KERAS[case]
    optimizer = LossScaleOptimizer(ours(name, 0.1, clipnorm=1.0, **options), 16.0, 3)
    reference = keras.optimizers.LossScaleOptimizer(theirs(name, 0.1, clipnorm=1.0, **options), 16.0, 3)
    scales = []

    def record(step: int) -> None:
        if step:
            scales.append((optimizer.dynamic_scale, float(keras.ops.convert_to_numpy(reference.dynamic_scale))))

    compare(
        optimizer, reference, before_step=record,
        factor=lambda step: np.inf if step in (0, 5, 6) else optimizer.dynamic_scale,
    )
    assert [mine for mine, _ in scales] == [reference for _, reference in scales]
    assert min(scales)[0] < 16 < max(scales)[0]
    assert optimizer.iterations == STEPS - 3 == int(keras.ops.convert_to_numpy(reference.inner_optimizer.iterations))
    assert optimizer.scale_loss(2.0) == keras.ops.convert_to_numpy(reference.scale_loss(2.0))


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.keras_name])
def test_names_and_defaults(name: str) -> None:
    optimizer, config = ours(name), theirs(name).get_config()
    own = {**vars(optimizer.kernel), **vars(optimizer.options), "learning_rate": optimizer.learning_rate}
    own["weight_decay"] = getattr(optimizer.kernel, "weight_decay", 0.0) or optimizer.options.weight_decay
    unknown = {"name", "loss_scale_factor"}
    assert {key: own[key] for key in config if key not in unknown} == {
        key: pytest.approx(value) if isinstance(value, float) else value
        for key, value in config.items() if key not in unknown
    }
