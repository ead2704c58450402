"""Optimizers and learning-rate schedules. To add a family, write one module with its kernel, and two lines here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.missing import from_homes

if TYPE_CHECKING:
    from mpidist.optimizers.families.adadelta import Adadelta
    from mpidist.optimizers.families.adagrad import Adagrad
    from mpidist.optimizers.families.adam import Adam, AdamW
    from mpidist.optimizers.families.adamax import Adamax
    from mpidist.optimizers.families.ftrl import Ftrl
    from mpidist.optimizers.families.lamb import LAMB
    from mpidist.optimizers.families.lars import LARS
    from mpidist.optimizers.families.lion import Lion
    from mpidist.optimizers.families.nadam import Nadam
    from mpidist.optimizers.families.rmsprop import RMSprop
    from mpidist.optimizers.families.sgd import SGD
    from mpidist.optimizers.loss_scale import LossScaleOptimizer
    from mpidist.optimizers.optimizer import Optimizer
    from mpidist.optimizers.schedules import (
        CosineDecay,
        CosineDecayRestarts,
        ExponentialDecay,
        InverseTimeDecay,
        LinearWarmup,
        PiecewiseConstantDecay,
        PolynomialDecay,
    )
    from mpidist.variables.update.kernel import Kernel, LayerKernel
    from mpidist.variables.update.options import OptimizerOptions

# Public name -> the module that has it, which is loaded at first use: a program uses one or two of them.
_HOMES = {
    "Adadelta": "mpidist.optimizers.families.adadelta",
    "Adagrad": "mpidist.optimizers.families.adagrad",
    "Adam": "mpidist.optimizers.families.adam",
    "Adamax": "mpidist.optimizers.families.adamax",
    "AdamW": "mpidist.optimizers.families.adam",
    "CosineDecay": "mpidist.optimizers.schedules",
    "CosineDecayRestarts": "mpidist.optimizers.schedules",
    "ExponentialDecay": "mpidist.optimizers.schedules",
    "Ftrl": "mpidist.optimizers.families.ftrl",
    "InverseTimeDecay": "mpidist.optimizers.schedules",
    "Kernel": "mpidist.variables.update.kernel",
    "LAMB": "mpidist.optimizers.families.lamb",
    "LARS": "mpidist.optimizers.families.lars",
    "LayerKernel": "mpidist.variables.update.kernel",
    "LinearWarmup": "mpidist.optimizers.schedules",
    "Lion": "mpidist.optimizers.families.lion",
    "LossScaleOptimizer": "mpidist.optimizers.loss_scale",
    "Nadam": "mpidist.optimizers.families.nadam",
    "Optimizer": "mpidist.optimizers.optimizer",
    "OptimizerOptions": "mpidist.variables.update.options",
    "PiecewiseConstantDecay": "mpidist.optimizers.schedules",
    "PolynomialDecay": "mpidist.optimizers.schedules",
    "RMSprop": "mpidist.optimizers.families.rmsprop",
    "SGD": "mpidist.optimizers.families.sgd",
}

__all__ = [
    "LAMB", "LARS", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "CosineDecay",
    "CosineDecayRestarts", "ExponentialDecay", "Ftrl", "InverseTimeDecay", "Kernel", "LayerKernel", "LinearWarmup",
    "Lion", "LossScaleOptimizer", "Nadam", "Optimizer", "OptimizerOptions", "PiecewiseConstantDecay",
    "PolynomialDecay", "RMSprop",
]

if not TYPE_CHECKING:
    __getattr__ = from_homes(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
