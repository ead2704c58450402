"""Optimizers and learning-rate schedules. A new family is one module with its kernel, and one line here."""

from mpidist.optimizers.adadelta import Adadelta
from mpidist.optimizers.adagrad import Adagrad
from mpidist.optimizers.adam import Adam, AdamW
from mpidist.optimizers.ftrl import Ftrl
from mpidist.optimizers.lamb import LAMB
from mpidist.optimizers.lars import LARS
from mpidist.optimizers.lion import Lion
from mpidist.optimizers.loss_scale import LossScaleOptimizer
from mpidist.optimizers.optimizer import Optimizer
from mpidist.optimizers.rmsprop import RMSprop
from mpidist.optimizers.schedules import CosineDecay, ExponentialDecay, LinearWarmup, PiecewiseConstantDecay
from mpidist.optimizers.sgd import SGD
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions

__all__ = [
    "LAMB", "LARS", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "CosineDecay", "ExponentialDecay", "Ftrl",
    "Kernel", "LayerKernel", "LinearWarmup", "Lion", "LossScaleOptimizer", "Optimizer", "OptimizerOptions",
    "PiecewiseConstantDecay", "RMSprop",
]
