"""The memory in which a model's gradients are combined: one array for each dtype, with a place for each parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpidist.strategy.base import Strategy
from mpidist.torch import marks

_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: "bfloat16"}
# Elements, so that each place begins at a multiple of 64 bytes, whatever the dtype.
_STEP = 32
# Smaller gradients are copied as fast by PyTorch itself.
_STORED_BYTES = 1 << 20
# The class of all layers with such statistics has no public name.
Norm = torch.nn.modules.batchnorm._NormBase  # noqa: SLF001  # the base of all kinds of BatchNorm


class GradientPlace:
    """A parameter's place in the memory of gradients.

    Args:
        parameter: The parameter.
        memory: The tensor over its place.
        store: Copies an array of NumPy into another one that is read later; see `StrategyExtended.store`.

    Attributes:
        parameter: The constructor's argument.
        is_zero: Whether the place holds zeros only.
    """

    __slots__ = ("_alone", "_array", "_given", "_store", "is_zero", "memory", "parameter")

    def __init__(
        self, parameter: torch.nn.Parameter, memory: torch.Tensor, store: Callable[[Any, Any], None]
    ) -> None:
        self.parameter, self.memory = parameter, memory
        is_large = memory.nbytes >= _STORED_BYTES and memory.dtype != torch.bfloat16
        self._array, self._store = memory.numpy() if is_large else None, store
        self.is_zero = True
        self._make_view()

    def _make_view(self) -> None:
        # Another tensor over the same memory: what changes its `data`, as `model.double()` does, leaves ours.
        self._given = self.memory.view_as(self.memory)
        self._alone = sys.getrefcount(self._given)

    def fits(self) -> bool:
        """Local. Whether the parameter has the dtype, shape and device that it had."""
        parameter, memory = self.parameter, self.memory
        return (
            parameter.dtype == memory.dtype and parameter.shape == memory.shape and parameter.device == memory.device
        )

    def take(self, gradient: torch.Tensor) -> None:
        """Local. Copy a gradient to this place, unless it is there, and make `.grad` a view of it."""
        self.is_zero = False
        if gradient is self._given:
            if gradient.data_ptr() == self.memory.data_ptr():
                return
            self._make_view()
        else:
            self._leave_to_program()
        if self._array is not None and type(gradient) is torch.Tensor and gradient.is_contiguous():
            self._store(self._array, gradient.resolve_neg().numpy())
            torch.autograd.graph.increment_version(self.memory)
        else:
            self.memory.copy_(gradient)
        self.parameter.grad = self._given

    def _leave_to_program(self) -> None:
        """Leave a gradient of an earlier backward pass that the program has kept the values that it had."""
        if sys.getrefcount(self._given) > self._alone or self._given.data_ptr() != self.memory.data_ptr():
            self._given.data = self._given.clone()
            self._make_view()

    def clear(self) -> None:
        """Local. Count 0 for a parameter without a gradient on this rank."""
        if not self.is_zero:
            self._leave_to_program()
            self.memory.zero_()
            self.is_zero = True

    def give(self) -> None:
        """Local. Make `.grad` a view of this place, for a parameter that only other ranks have used."""
        self.is_zero = False
        self.parameter.grad = self._given

    def release(self) -> None:
        """Local. Give the parameter a gradient in memory of its own."""
        gradient = self.parameter.grad
        if gradient is not None and gradient is self._given:
            self.parameter.grad = gradient.clone()


class GradientMemory:
    """Collective. The memory of the gradients of some parameters.

    Behind the gradients of float32 (of float64, where statistics are) are a flag for each parameter, whether this rank
    has used it, the statistics of BatchNorm, and a checksum of the order of rows: all of it is combined in the same
    reduction. In the name of the call the checksum would make each call a new one, which costs a call between hosts.

    Args:
        strategy: The strategy of the ranks.
        parameters: The parameters by name, in the same order on every rank.
        norms: The layers whose statistics are averaged.

    Attributes:
        places: The places of the parameters, in their order.

    Raises:
        TypeError: A parameter has a dtype or is on a device whose gradients cannot be combined.
    """

    def __init__(
        self, strategy: Strategy, parameters: dict[str, torch.nn.Parameter], norms: Sequence[torch.nn.Module]
    ) -> None:
        self._norms = [norm for norm in norms if getattr(norm, "running_mean", None) is not None]
        last = self._last_dtype()
        wanted: dict[torch.dtype, list[torch.nn.Parameter]] = {last: []}
        for parameter in parameters.values():
            wanted.setdefault(parameter.dtype, []).append(parameter)
        statistics = sum(statistic.numel() for statistic in self._statistics())
        marked = 2 * marks.length(strategy.num_replicas_in_sync)
        self._replicas = strategy.num_replicas_in_sync
        self._arrays: list[Any] = []
        places: dict[int, GradientPlace] = {}
        for dtype, ones in wanted.items():
            sizes = [-(-one.numel() // _STEP) * _STEP for one in ones]
            more = len(parameters) + statistics + marked if dtype == last else 0
            array = strategy.extended.allocate((sum(sizes) + more,), _NUMPY[dtype])
            flat = _tensor(array, dtype)
            at = 0
            for one, size in zip(ones, sizes, strict=True):
                places[id(one)] = GradientPlace(
                    one, flat[at : at + one.numel()].view(one.shape), strategy.extended.store
                )
                at += size
            if dtype == last:
                self._flags = flat[at : at + len(parameters)]
                self._averaged = flat[at + len(parameters) : at + len(parameters) + statistics]
                self._marks = flat[at + len(parameters) + statistics :]
            self._arrays.append(array)
        self.places = [places[id(one)] for one in parameters.values()]

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Local. Whether each of these parameters has a place that fits it."""
        known = {id(place.parameter) for place in self.places if place.fits()}
        return (
            all(id(parameter) in known for parameter in parameters)
            and self._averaged.numel() == sum(statistic.numel() for statistic in self._statistics())
            and self._averaged.dtype == self._last_dtype()
        )

    @torch.no_grad()
    def collect(self, weight: float, mark: int) -> None:
        """Local. Write flags, statistics and checksum to the memory that is to be combined.

        Args:
            mark: A checksum that must be the same on every rank.
            weight: The weight of this rank's statistics; the mean of all ranks' weights is 1.
        """
        flags = []
        for place in self.places:
            gradient = place.parameter.grad
            if gradient is None:
                place.clear()
            else:
                place.take(gradient)
            flags.append(float(gradient is not None))
        self._flags.copy_(torch.tensor(flags))
        self._marks.copy_(torch.tensor(marks.encode(mark, self._replicas)))
        statistics = self._statistics()
        if statistics:
            torch.cat([one.reshape(-1).to(self._averaged.dtype) for one in statistics], out=self._averaged)
            if weight != 1:
                self._averaged.mul_(weight)

    def is_agreed(self) -> bool:
        """Local. Whether the marks of all ranks were the same; the same answer on every rank."""
        return marks.are_equal(self._marks.tolist(), self._replicas)

    def arrays(self) -> list[Any]:
        """Local. The arrays to combine, in place, by their mean."""
        return self._arrays

    @torch.no_grad()
    def distribute(self) -> None:
        """Local. Give parameters and statistics what was combined."""
        for place, flag in zip(self.places, self._flags.tolist(), strict=True):
            if flag and place.parameter.grad is None:
                place.give()
        sizes = [one.numel() for one in self._statistics()]
        statistics = iter(torch.split(self._averaged, sizes)) if sizes else iter(())
        norms: list[Any] = self._norms
        for norm in norms:
            mean, variance = next(statistics), next(statistics)
            # What a layer in evaluation has is the same everywhere, and its mean over three ranks may be rounded.
            if norm.training:
                norm.running_mean.copy_(mean.view_as(norm.running_mean))
                norm.running_var.copy_(variance.view_as(norm.running_var))

    def forget(self) -> None:
        """Local. Remove the parameters' gradients: no step can be made with what was combined."""
        for place in self.places:
            place.parameter.grad = None

    def release(self) -> None:
        """Local. Give the parameters gradients in memory of their own."""
        for place in self.places:
            place.release()

    def _last_dtype(self) -> torch.dtype:
        """The dtype behind whose gradients flags and statistics are."""
        doubles = any(statistic.dtype == torch.float64 for statistic in self._statistics())
        return torch.float64 if doubles else torch.float32

    def _statistics(self) -> list[torch.Tensor]:
        norms: list[Any] = self._norms
        return [statistic for norm in norms for statistic in (norm.running_mean, norm.running_var)]


def require_kinds(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Local. Raise where gradients of some parameter cannot be combined.

    Raises:
        TypeError: A parameter has a dtype or device whose gradients cannot be combined; the text names it.
        ValueError: A parameter has no shape yet.
    """
    for name, parameter in parameters.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape before the first batch: expected a model whose parameters are all "
                "made. Call the model with one batch on every rank first"
            )
        if parameter.dtype not in _NUMPY:
            raise TypeError(
                f"parameter {name!r} has dtype {parameter.dtype}: expected one of "
                f"{', '.join(map(str, _NUMPY))}. Convert it, or freeze it with requires_grad_(False)"
            )
        if parameter.device.type != "cpu" or parameter.layout != torch.strided:
            raise TypeError(
                f"parameter {name!r} is on device {parameter.device} with layout {parameter.layout}: expected a dense "
                "tensor in host memory. Move the model there: model.cpu()"
            )


def _tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the memory of an array; PyTorch does not take NumPy's bfloat16."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
