"""Optimizers and learning-rate schedules. To add a family, write one module with its kernel, and one line here."""

from typing import TYPE_CHECKING, NoReturn

from mpidist.missing import no_attribute
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

__all__ = [
    "LAMB", "LARS", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "CosineDecay",
    "CosineDecayRestarts", "ExponentialDecay", "Ftrl", "InverseTimeDecay", "Kernel", "LayerKernel", "LinearWarmup",
    "Lion", "LossScaleOptimizer", "Nadam", "Optimizer", "OptimizerOptions", "PiecewiseConstantDecay",
    "PolynomialDecay", "RMSprop",
]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
