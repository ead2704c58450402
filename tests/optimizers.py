"""The table of all optimizers, from which the tests of families draw: a new family is one row of it.

`Family(name="New", defaults=(0.001, ...))` is enough for a family that no other library has: every test that compares
one way to update with another takes it (in half precision, compiled, of complex numbers, on servers, on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.optimizers import Optimizer
from mpidist.variables.update.kernel import LayerKernel

Formula = Callable[[AnyArray, list[AnyArray]], AnyArray]
Arguments = dict[str, Any]


class Torch(NamedTuple):
    """Arguments, and the optimizer of PyTorch that does the same: of the module, the parameters and the rate."""

    arguments: Arguments
    make: Callable[[Any, Any, float], Any]
    rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of optimizers.

    Attributes:
        name: Its name in `mpidist.optimizers`.
        defaults: The learning rate and the numbers of its kernel without arguments, which are tf.keras's.
        settings: Names of arguments that lead through all of its kernel; every one is tested.
        half_rate: The learning rate of tests in half precision: elements must change, and stay finite.
        formulas: Arguments with their arithmetic, written out for one variable in double precision.
        torch: As `Torch`.
        sparse_torch: The same for rows.
        keras_name: Its name in `keras.optimizers`; None where Keras has none.
        keras: Arguments that both take, and with which both do the same: without epsilon where its place differs, or
            with one too small to matter.
        keras_long: The same for many steps; None where Keras has none.
        square_share: The share of a square that its mean gets (1 - beta_2, 1 - rho) where the state has squares.
        has_powers: Its kernel calls `pow`, which libraries round differently, and which is not compiled.
        takes_signs: A sum near zero that is rounded differently turns a step around.
    """

    name: str
    defaults: tuple[Any, ...]
    settings: Mapping[str, Arguments] = field(default_factory=dict)
    half_rate: float = 0.01
    formulas: Mapping[str, tuple[Arguments, Formula]] = field(default_factory=dict)
    torch: Mapping[str, Torch] = field(default_factory=dict)
    sparse_torch: Torch | None = None
    keras_name: str | None = None
    keras: Mapping[str, Arguments] = field(default_factory=dict)
    keras_long: Arguments | None = None
    square_share: float | None = None
    has_powers: bool = False
    takes_signs: bool = False


@dataclass(frozen=True)
class Setting:
    """A family with arguments: `setting()` makes the optimizer, to which `rate` and options may be given."""

    family: Family
    arguments: Arguments

    def __call__(self, rate: Any = 0.1, **options: Any) -> Optimizer:
        made: Optimizer = getattr(optimizers, self.family.name)(rate, **{**self.arguments, **options})
        return made

    @property
    def is_layerwise(self) -> bool:
        """It needs norms of whole variables."""
        return isinstance(self().kernel, LayerKernel)


def adam(amsgrad: bool, decay: float) -> Formula:
    def run(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
        m, v, largest = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
        for t, g in enumerate(gradients, 1):
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            largest = np.maximum(largest, v) if amsgrad else v
            p = p * (1 - 0.1 * decay) - 0.1 * m / (1 - 0.8**t) / (np.sqrt(largest / (1 - 0.9**t)) + 0.01)
        return p
    return run


def nadam(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    m, v, product = np.zeros_like(p), np.zeros_like(p), 1.0
    for t, g in enumerate(gradients, 1):
        weight, following = (0.8 * (1 - 0.5 * 0.96**step) for step in (t, t + 1))
        product *= weight
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        ahead = following * m / (1 - product * following) + (1 - weight) * g / (1 - product)
        p = p - 0.1 * ahead / (np.sqrt(v / (1 - 0.9**t)) + 0.01)
    return p


def adamax(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    m, largest = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m, largest = 0.8 * m + 0.2 * g, np.maximum(0.9 * largest, np.abs(g))
        p = p - 0.1 * m / (1 - 0.8**t) / (largest + 0.01)
    return p


def nesterov(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    v = np.zeros_like(p)
    for g in gradients:
        v = 0.9 * v + 0.1 * g
        p = p - 0.9 * v - 0.1 * g
    return p


def rmsprop(centered: bool, momentum: float) -> Formula:
    def run(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
        square, mean, m = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
        for g in gradients:
            square, mean = 0.8 * square + 0.2 * g**2, 0.8 * mean + 0.2 * g
            m = momentum * m + 0.1 * g / (np.sqrt(square - centered * mean**2) + 0.01)
            p = p - m
        return p
    return run


def adagrad(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    total = np.full_like(p, 0.2)
    for g in gradients:
        total = total + g**2
        p = p - 0.1 * g / (np.sqrt(total) + 0.01)
    return p


def adadelta(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    squares, steps = np.zeros_like(p), np.zeros_like(p)
    for g in gradients:
        squares = 0.9 * squares + 0.1 * g**2
        move = np.sqrt(steps + 0.01) / np.sqrt(squares + 0.01) * g
        steps = 0.9 * steps + 0.1 * move**2
        p = p - 0.5 * move
    return p


def lion(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    m = np.zeros_like(p)
    for g in gradients:
        p = p - 0.01 * np.sign(0.8 * m + 0.2 * g)
        m = 0.95 * m + 0.05 * g
    return p


def ftrl(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    n, z = np.full_like(p, 0.2), np.zeros_like(p)
    for g in gradients:
        shrunk = g + 2 * 0.03 * p
        larger = n + g**2
        z = z + shrunk - (larger**0.5 - n**0.5) / 0.1 * p
        quadratic = larger**0.5 / 0.1 + 2 * (0.02 + 0.5 / (2 * 0.1))
        p = np.where(np.abs(z) > 0.4, (np.sign(z) * 0.4 - z) / quadratic, 0.0)
        n = larger
    return p


def lamb(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        p = p - 0.02 * 0.1 * p
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6)
        p_norm, r_norm = np.sqrt(np.sum(p**2)), np.sqrt(np.sum(r**2))
        p = p - 0.02 * (p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1) * r
    return p


def lars(nesterov: bool) -> Formula:
    def run(p: AnyArray, gradients: list[AnyArray]) -> AnyArray:
        m = np.zeros_like(p)
        for g in gradients:
            p_norm, g_norm = np.sqrt(np.sum(p**2)), np.sqrt(np.sum(g**2))
            ratio = 0.01 * p_norm / (g_norm + 0.05 * p_norm) if p_norm > 0 and g_norm > 0 else 1.0
            move = 0.5 * ratio * (g + 0.05 * p)
            m = 0.9 * m + move
            p = p - (0.9 * m + move if nesterov else m)
        return p
    return run


# Of the formulas above.
_ADAM: Arguments = {"learning_rate": 0.1, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.01}
_LARS: Arguments = {"learning_rate": 0.5, "momentum": 0.9, "weight_decay_rate": 0.05, "eeta": 0.01}

FAMILIES = (
    Family(
        name="SGD",
        defaults=(0.01, 0.0, False),
        settings={"SGD": {}, "momentum": {"momentum": 0.9}, "Nesterov": {"momentum": 0.9, "nesterov": True}},
        formulas={"nesterov": ({"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}, nesterov)},
        torch={
            "SGD": Torch({}, lambda t, p, rate: t.optim.SGD(p, lr=rate)),
            "momentum": Torch({"momentum": 0.9}, lambda t, p, rate: t.optim.SGD(p, lr=rate, momentum=0.9)),
            "Nesterov": Torch(
                {"momentum": 0.9, "nesterov": True},
                lambda t, p, rate: t.optim.SGD(p, lr=rate, momentum=0.9, nesterov=True),
            ),
            "decayed SGD": Torch(
                {"weight_decay": 0.5},
                # Without momentum the decoupled decay is that of the gradient.
                lambda t, p, rate: t.optim.SGD(p, lr=rate, weight_decay=0.5),
            ),
        },
        sparse_torch=Torch({}, lambda t, p, rate: t.optim.SGD(p, lr=rate)),
        keras_name="SGD",
        keras={
            "SGD": {}, "SGD momentum": {"momentum": 0.9}, "SGD nesterov": {"momentum": 0.9, "nesterov": True},
        },
        keras_long={"momentum": 0.9},
    ),
    Family(
        name="Adam",
        defaults=(0.001, 0.9, 0.999, 1e-7, 0.0, False, False),
        settings={"Adam": {}, "AMSGrad": {"amsgrad": True}},
        formulas={"Adam": (_ADAM, adam(False, 0.0)), "AMSGrad": ({**_ADAM, "amsgrad": True}, adam(True, 0.0))},
        torch={
            "Adam": Torch({}, lambda t, p, rate: t.optim.Adam(p, lr=rate, eps=1e-7), 0.05),
            "Adam, quick": Torch(
                {"beta_2": 0.9, "epsilon": 1e-3}, lambda t, p, rate: t.optim.Adam(p, rate, (0.9, 0.9), 1e-3), 0.05
            ),
            "decayed Adam": Torch(
                {"weight_decay": 0.1}, lambda t, p, rate: t.optim.AdamW(p, lr=rate, weight_decay=0.1, eps=1e-7), 0.05
            ),
        },
        # SparseAdam adds its epsilon to the uncorrected root.
        sparse_torch=Torch(
            {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.0},
            lambda t, p, rate: t.optim.SparseAdam(p, rate, (0.8, 0.9), 1e-300),
        ),
        keras_name="Adam",
        keras_long={"epsilon": 1e-12},
        square_share=1e-3,
    ),
    Family(
        name="AdamW",
        defaults=(0.001, 0.9, 0.999, 1e-7, 0.004, False, False),
        settings={"AdamW": {"weight_decay": 0.1}, "AdamW with AMSGrad": {"weight_decay": 0.01, "amsgrad": True}},
        formulas={"AdamW": ({**_ADAM, "weight_decay": 0.5}, adam(False, 0.5))},
        torch={
            "AdamW": Torch(
                {"weight_decay": 0.01}, lambda t, p, rate: t.optim.AdamW(p, lr=rate, eps=1e-7, weight_decay=0.01), 0.05
            ),
            "AdamW, quick": Torch(
                {"weight_decay": 0.1, "beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3},
                lambda t, p, rate: t.optim.AdamW(p, lr=rate, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
                0.05,
            ),
        },
        keras_name="AdamW",
        keras_long={"epsilon": 1e-12},
        square_share=1e-3,
    ),
    Family(
        name="Nadam",
        defaults=(0.001, 0.9, 0.999, 1e-7),
        formulas={"Nadam": (_ADAM, nadam)},
        keras_name="Nadam",
        keras={"Nadam": {}, "Nadam betas": {"beta_1": 0.7, "beta_2": 0.8, "epsilon": 0.1}},
        keras_long={},
        square_share=1e-3,
    ),
    Family(
        name="Adamax",
        defaults=(0.001, 0.9, 0.999, 1e-7),
        formulas={"Adamax": (_ADAM, adamax)},
        # Nothing that is added to a gradient, whose place differs.
        torch={"Adamax": Torch({"epsilon": 1e-30}, lambda t, p, rate: t.optim.Adamax(p, lr=rate, eps=0))},
        keras_name="Adamax",
        keras={"Adamax": {}, "Adamax betas": {"beta_1": 0.7, "beta_2": 0.8, "epsilon": 0.1}},
        keras_long={},
    ),
    Family(
        name="RMSprop",
        defaults=(0.001, 0.9, 0.0, 1e-7, False, False),
        settings={"RMSprop": {}, "RMSprop, centered, momentum": {"momentum": 0.5, "centered": True}},
        formulas={
            "RMSprop": ({"learning_rate": 0.1, "rho": 0.8, "epsilon": 0.01}, rmsprop(False, 0.0)),
            "RMSprop centered": (
                {"learning_rate": 0.1, "rho": 0.8, "momentum": 0.7, "epsilon": 0.01, "centered": True},
                rmsprop(True, 0.7),
            ),
        },
        torch={
            "RMSprop": Torch({}, lambda t, p, rate: t.optim.RMSprop(p, lr=rate, alpha=0.9, eps=1e-7), 0.01),
            "RMSprop whole": Torch(
                {"rho": 0.8, "momentum": 0.5, "epsilon": 1e-3, "centered": True},
                lambda t, p, rate: t.optim.RMSprop(p, lr=rate, alpha=0.8, momentum=0.5, eps=1e-3, centered=True),
                0.01,
            ),
        },
        keras_name="RMSprop",
        keras={
            "RMSprop": {"epsilon": 1e-12},
            "RMSprop momentum": {"rho": 0.8, "momentum": 0.7, "epsilon": 1e-12},
            "RMSprop centered": {"centered": True, "epsilon": 1e-12},
            "RMSprop both": {"rho": 0.8, "momentum": 0.7, "centered": True, "epsilon": 1e-12},
        },
        keras_long={"momentum": 0.5, "centered": True, "epsilon": 1e-12},
        square_share=0.1,
    ),
    Family(
        name="Adagrad",
        defaults=(0.001, 0.1, 1e-7),
        formulas={
            "Adagrad": ({"learning_rate": 0.1, "initial_accumulator_value": 0.2, "epsilon": 0.01}, adagrad)
        },
        torch={
            "Adagrad": Torch(
                {}, lambda t, p, rate: t.optim.Adagrad(p, lr=rate, initial_accumulator_value=0.1, eps=1e-7)
            ),
        },
        sparse_torch=Torch(
            {"initial_accumulator_value": 0.5, "epsilon": 1e-9},
            lambda t, p, rate: t.optim.Adagrad(p, rate, initial_accumulator_value=0.5, eps=1e-9),
        ),
        keras_name="Adagrad",
        keras={
            "Adagrad": {"epsilon": 0.0}, "Adagrad from": {"initial_accumulator_value": 2.0, "epsilon": 0.0}
        },
        keras_long={"epsilon": 0.0},
        square_share=1.0,
    ),
    Family(
        name="Adadelta",
        defaults=(0.001, 0.95, 1e-7),
        half_rate=1.0,
        formulas={"Adadelta": ({"learning_rate": 0.5, "rho": 0.9, "epsilon": 0.01}, adadelta)},
        torch={
            "Adadelta": Torch(
                {"rho": 0.9, "epsilon": 1e-6}, lambda t, p, rate: t.optim.Adadelta(p, lr=rate, rho=0.9, eps=1e-6), 0.5
            ),
        },
        keras_name="Adadelta",
        keras={"Adadelta": {}, "Adadelta epsilon": {"rho": 0.8, "epsilon": 0.1}},
        keras_long={},
        square_share=0.05,
    ),
    Family(
        name="Ftrl",
        defaults=(0.001, -0.5, 0.1, 0.0, 0.0, 0.0, 0.0),
        settings={
            "Ftrl": {},
            "Ftrl, all": {
                "l1_regularization_strength": 0.1, "l2_regularization_strength": 0.02,
                "l2_shrinkage_regularization_strength": 0.03, "beta": 0.1,
            },
            "Ftrl, other power": {"learning_rate_power": -0.3, "l1_regularization_strength": 0.01},
        },
        formulas={
            "Ftrl": (
                {
                    "learning_rate": 0.1, "initial_accumulator_value": 0.2, "l1_regularization_strength": 0.4,
                    "l2_regularization_strength": 0.02, "l2_shrinkage_regularization_strength": 0.03, "beta": 0.5,
                },
                ftrl,
            )
        },
        keras_name="Ftrl",
        keras={
            "Ftrl": {},
            "Ftrl all": {
                "learning_rate_power": -0.3, "initial_accumulator_value": 0.5, "l1_regularization_strength": 0.3,
                "l2_regularization_strength": 0.2, "l2_shrinkage_regularization_strength": 0.1, "beta": 0.4,
            },
        },
        keras_long={"l1_regularization_strength": 0.1, "beta": 0.1},
        has_powers=True,
    ),
    Family(
        name="Lion",
        defaults=(0.001, 0.9, 0.99),
        formulas={"Lion": ({"learning_rate": 0.01, "beta_1": 0.8, "beta_2": 0.95}, lion)},
        keras_name="Lion",
        keras={"Lion": {}, "Lion betas": {"beta_1": 0.7, "beta_2": 0.8}},
        keras_long={},
        takes_signs=True,
    ),
    Family(
        name="LAMB",
        defaults=(0.001, 0.9, 0.999, 1e-7),
        settings={"LAMB": {"weight_decay": 0.01}},
        formulas={
            "LAMB": (
                {"learning_rate": 0.02, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-6, "weight_decay": 0.1}, lamb
            )
        },
        keras_name="Lamb",
        keras={"Lamb": {}, "Lamb epsilon": {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.1}},
        keras_long={},
        square_share=1e-3,
    ),
    Family(
        name="LARS",
        defaults=(0.01, 0.9, 0.0, 0.001, False),
        settings={
            "LARS": {"weight_decay_rate": 1e-4, "weight_decay": 0.01},
            "LARS, Nesterov": {"weight_decay_rate": 1e-4, "nesterov": True},
            "LARS without momentum": {"momentum": 0.0},
        },
        half_rate=10.0,
        formulas={"LARS": (_LARS, lars(False)), "LARS nesterov": ({**_LARS, "nesterov": True}, lars(True))},
    ),
)

BY_NAME = {family.name: family for family in FAMILIES}
SETTINGS = {
    name: Setting(family, arguments)
    for family in FAMILIES for name, arguments in (family.settings or {family.name: {}}).items()
}
WITH_ROWS = {name: setting for name, setting in SETTINGS.items() if not setting.is_layerwise}
FORMULAS = {name: (family, *case) for family in FAMILIES for name, case in family.formulas.items()}
TORCH = {name: (Setting(family, case.arguments), case) for family in FAMILIES for name, case in family.torch.items()}
KERAS = {name: (family.name, arguments) for family in FAMILIES for name, arguments in family.keras.items()}
