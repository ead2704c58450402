"""The parts of a model that take part in distribution: optimizers, losses, metrics, seeds."""
