"""Complex numbers in updates: a kernel gets their real and imaginary parts, each as a number of its own.

The square of a complex gradient is no measure of its size, and complex numbers have no order. PyTorch's optimizers see
complex parameters as `torch.view_as_real` gives them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.variables.update.kernel import Kernel, LayerKernel, Update


def parts_of(array: AnyArray) -> AnyArray:
    """Local. A view of complex numbers as real ones, two for each; other arrays are themselves.

    Args:
        array: A flat, contiguous array.
    """
    return array.view(f"f{array.dtype.itemsize // 2}") if array.dtype.kind == "c" else array


def initial(value: complex, dtype: np.dtype[Any]) -> complex:
    """Local. The initial value of a slot in the state of a variable.

    Args:
        value: See `Kernel.slots`.
        dtype: The dtype of the variable. One optimizer may have real and complex ones.
    """
    return value if dtype.kind == "c" else value.real


def by_parts(kernel: Kernel | LayerKernel) -> Kernel | LayerKernel:
    """Local. A kernel for complex variables."""
    return _LayerKernelByParts(kernel) if isinstance(kernel, LayerKernel) else _KernelByParts(kernel)


K = TypeVar("K", Kernel, LayerKernel)


class _Parts(Generic[K]):
    """The state of a kernel, which the real and the imaginary part each have; for both kinds of kernels."""

    def __init__(self, kernel: K) -> None:
        self._kernel: K = kernel

    @property
    def slots(self) -> Mapping[str, complex]:
        """Local. The initial values, of both parts."""
        return {name: complex(value.real, value.real) for name, value in self._kernel.slots.items()}

    @property
    def scratch_count(self) -> int:
        """Local. See `Kernel.scratch_count`."""
        return self._kernel.scratch_count


class _KernelByParts(_Parts[Kernel]):
    """See `by_parts`."""

    def prepare(self, step: int, learning_rate: float, /) -> Update:
        """Local. See `Kernel.prepare`."""
        return _by_parts(self._kernel.prepare(step, learning_rate))


class _LayerKernelByParts(_Parts[LayerKernel], LayerKernel):
    """See `by_parts`."""

    def direct(self, step: int, /) -> Update | None:
        """Local. See `LayerKernel.direct`."""
        direct = self._kernel.direct(step)
        return None if direct is None else _by_parts(direct)

    def prepare(
        self, step: int, learning_rate: float, parameter_norm: float, direction_norm: float, /
    ) -> Update:
        """Local. See `LayerKernel.prepare`."""
        return _by_parts(self._kernel.prepare(step, learning_rate, parameter_norm, direction_norm))


def _by_parts(update: Update) -> Update:
    def updated(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        # A plan may have real variables, too.
        if parameter.dtype.kind == "c":
            parameter, gradient = parts_of(parameter), parts_of(gradient)
            slots, scratch = [parts_of(one) for one in slots], [parts_of(one) for one in scratch]
        update(parameter, gradient, slots, scratch)

    return updated
