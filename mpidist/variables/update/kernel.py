"""The kernel: the arithmetic of one family of optimizers, pure and without communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mpidist.arguments import number
from mpidist.arrays import AnyArray

# The data of one block should stay in a cache near the core. Measured on two machines (L2 of 1 and 2 MB)
# 256 KB is best for SGD and for Adam, 128 KB up to a tenth slower; 16 KB costs a factor of 1.5 to 2 in calls.
BLOCK_BYTES = 1 << 18
# On a GPU a block is the work of one kernel, long enough that starting the kernel does not count.
GPU_BLOCK_BYTES = 1 << 26

# `update(parameter, gradient, slots, scratch)` on flat blocks of one dtype, in place.
Update = Callable[[AnyArray, AnyArray, Sequence[AnyArray], Sequence[AnyArray]], None]

Schedule = Callable[[int], float]


class Kernel(Protocol):
    """The arithmetic of one family of optimizers: element-wise, pure, and without communication.

    Attributes:
        slots: State kept for each element: name and initial value.
        scratch_count: Number of private blocks for `update`.
    """

    @property
    def slots(self) -> Mapping[str, complex]:
        """Local. Name and initial value of each slot, in the order in which `update` gets them."""
        ...

    @property
    def scratch_count(self) -> int:
        """Local. The number of scratch blocks that `update` gets."""
        ...

    def prepare(self, step: int, learning_rate: float, /) -> Update:
        """Local. The update of one step.

        Args:
            step: 1 in the first step.
            learning_rate: The learning rate of this step.

        Returns:
            `update(parameter, gradient, slots, scratch)` on flat blocks of one dtype, all in place; it may overwrite
            `gradient`, the sum over all replicas.
        """
        ...


class LayerKernel(ABC):
    """The arithmetic of a family that needs norms of whole variables: two element-wise passes, with norms between."""

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, complex]:
        """Local. See `Kernel.slots`."""

    @property
    @abstractmethod
    def scratch_count(self) -> int:
        """Local. See `Kernel.scratch_count`."""

    @abstractmethod
    def direct(self, step: int, /) -> Update | None:
        """Local. The pass before the norms, which turns `gradient` into a direction, in place.

        Args:
            step: 1 in the first step.

        Returns:
            An update that does not change the parameter, or None: the gradient is the direction.
        """

    @abstractmethod
    def prepare(
        self, step: int, learning_rate: float, parameter_norm: float, direction_norm: float, /
    ) -> Update:
        """Local. The pass that changes one variable.

        Args:
            step: 1 in the first step.
            learning_rate: The learning rate of this step.
            parameter_norm: Euclidean norm of the variable.
            direction_norm: Euclidean norm of the direction.

        Returns:
            An update as `Kernel.prepare` returns it; its `gradient` is the direction.
        """


def require_rate(kernel: Kernel | LayerKernel, step: int, learning_rate: float) -> None:
    """Local. Raise the error of a kernel that refuses a learning rate, before anything of the step has begun.

    Args:
        kernel: The kernel of an optimizer.
        step: 1 in the first step.
        learning_rate: The learning rate of this step.
    """
    if isinstance(kernel, LayerKernel):
        kernel.prepare(step, learning_rate, 1.0, 1.0)
    else:
        kernel.prepare(step, learning_rate)


def positive(**values: float) -> None:
    """Local. Raise ValueError for a negative hyperparameter, TypeError for one that is no number."""
    for name, value in values.items():
        number(name, value, least=0)


def share(**values: float) -> None:
    """Local. Raise ValueError for a momentum that is not from 0 to 1, TypeError for one that is no number."""
    for name, value in values.items():
        number(name, value, least=0, most=1)


def fraction(**values: float) -> None:
    """Local. Raise ValueError for a decay that is not from 0 to below 1, TypeError for one that is no number."""
    positive(**values)
    for name, value in values.items():
        if value >= 1:
            raise ValueError(f"`{name}` must be below 1, got {value!r}")
