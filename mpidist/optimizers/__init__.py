"""Optimizers and learning-rate schedules. A new family is one module with its kernel, and one line here."""

from typing import TYPE_CHECKING, NoReturn

from mpidist.missing import no_attribute
from mpidist.optimizers.adadelta import Adadelta
from mpidist.optimizers.adagrad import Adagrad
from mpidist.optimizers.adam import Adam, AdamW
from mpidist.optimizers.adamax import Adamax
from mpidist.optimizers.ftrl import Ftrl
from mpidist.optimizers.lamb import LAMB
from mpidist.optimizers.lars import LARS
from mpidist.optimizers.lion import Lion
from mpidist.optimizers.loss_scale import LossScaleOptimizer
from mpidist.optimizers.nadam import Nadam
from mpidist.optimizers.optimizer import Optimizer
from mpidist.optimizers.rmsprop import RMSprop
from mpidist.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LinearWarmup,
    PiecewiseConstantDecay,
    PolynomialDecay,
)
from mpidist.optimizers.sgd import SGD
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
