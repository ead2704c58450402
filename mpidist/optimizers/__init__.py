"""Optimizers and learning-rate schedules. A new family is one module with its kernel, and one line here."""

from mpidist.optimizers.adam import Adam, AdamW
from mpidist.optimizers.optimizer import Kernel, Optimizer
from mpidist.optimizers.schedules import CosineDecay, ExponentialDecay, LinearWarmup, PiecewiseConstantDecay
from mpidist.optimizers.sgd import SGD

__all__ = [
    "SGD", "Adam", "AdamW", "CosineDecay", "ExponentialDecay", "Kernel", "LinearWarmup", "Optimizer",
    "PiecewiseConstantDecay",
]
