"""The backend torch: gradients go through one flat tensor per dtype, in memory that the strategy reduces in place.

In `fit` each of them is copied there as soon as it is computed, while it is in the cache, and its own memory is free
for the next one.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

import keras
import numpy as np
import torch

from mpidist.keras.binding import ModelBinding
from mpidist.keras.step import ModelStep
from mpidist.options import ReduceOp

# What the doors of the strategy allocate, as NumPy has the dtype; others are in memory of torch.
_ALLOCATED = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}
# Elements, so that each place begins at a multiple of 64 bytes.
_STEP = 32
# Smaller gradients are copied as fast by PyTorch itself.
_STORED_BYTES = 1 << 20


def share_cores(binding: ModelBinding) -> None:
    """Local. Use this replica's share of the node's cores, unless the user has chosen."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), binding.extended.cores_per_replica))


def reduce_gradients(
    binding: ModelBinding, gradients: list[Any], step: ModelStep | None, *, is_weighed: bool = False
) -> list[Any]:
    """Collective. Gradients, combined over the replicas: their mean by rows in a step of `fit`, else their sum.

    Args:
        binding: The optimizer's binding.
        gradients: Tensors, or None where a variable has none.
        step: The step of `fit`, or None.
        is_weighed: Whether the loss had the replica's weight, so that the mean over the rows is the sum.
    """
    some = [gradient.detach() for gradient in gradients if gradient is not None]
    sparse = [gradient for gradient in some if gradient.layout is not torch.strided]
    if sparse:
        raise TypeError(
            f"expected dense gradients, got one of layout {sparse[0].layout} and shape {tuple(sparse[0].shape)}. Use a "
            "layer with dense gradients"
        )
    weight = None if step is None else binding.weigh(step.rows)
    groups: dict[Any, list[torch.Tensor]] = {}
    for gradient in some:
        groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    done = {
        key: iter(_reduce(binding, key, group, weight, is_weighed=is_weighed)) for key, group in groups.items()
    }
    return [None if gradient is None else next(done[gradient.dtype, gradient.device]) for gradient in gradients]


def _reduce(
    binding: ModelBinding, key: Any, group: list[torch.Tensor], weight: float | None, *, is_weighed: bool
) -> list[torch.Tensor]:
    places, flat = _memory(binding, key, group)
    late = [
        (place, gradient) for place, gradient in zip(places, group, strict=True)
        if place.memory.data_ptr() != gradient.data_ptr()
    ]
    for place, _ in late:
        place.leave_to_program()
    if weight == 0:
        # Not a product: the row of a rank without rows may give inf or nan.
        flat.zero_()
    else:
        if late:
            torch._foreach_copy_([place.memory for place, _ in late], [gradient for _, gradient in late])
        if weight not in (None, 1.0) and not is_weighed:
            flat.mul_(weight)
    op = ReduceOp.SUM if weight is None or is_weighed else ReduceOp.MEAN
    binding.extended.all_reduce(op, [flat], in_place=True, name="gradients")
    return [place.memory for place in places]


def _memory(binding: ModelBinding, key: Any, group: list[torch.Tensor]) -> tuple[list[GradientHook], torch.Tensor]:
    shapes = (key, *(gradient.shape for gradient in group))
    if shapes not in binding.memory:
        dtype, device = key
        sizes = [-(-gradient.numel() // _STEP) * _STEP for gradient in group]
        count = sum(sizes)
        if dtype in _ALLOCATED and device.type == "cpu":
            flat = torch.from_numpy(binding.extended.allocate((count,), np.dtype(_ALLOCATED[dtype])))
        else:
            flat = torch.zeros(count, dtype=dtype, device=device)
        places, start = [], 0
        for gradient, size in zip(group, sizes, strict=True):
            memory = flat[start:start + gradient.numel()].view(gradient.shape)
            places.append(GradientHook(binding, memory))
            start += size
        binding.memory[shapes] = places, flat
    places, flat = binding.memory[shapes]
    return places, flat


class GradientHook:
    """The place of a variable's gradient. In `fit` it is a hook, which copies the gradient there and makes it a view.

    Args:
        binding: The binding of the model.
        memory: The memory that is reduced.

    Attributes:
        memory: The constructor's argument.
    """

    def __init__(self, binding: ModelBinding, memory: torch.Tensor) -> None:
        # The binding has it.
        self._binding, self.memory = weakref.ref(binding), memory
        is_stored = memory.nbytes >= _STORED_BYTES and memory.dtype in _ALLOCATED and memory.device.type == "cpu"
        self._array = memory.numpy() if is_stored else None
        self._make_view()

    def _make_view(self) -> None:
        self._given = self.memory.view_as(self.memory)
        self._alone = sys.getrefcount(self._given)

    def leave_to_program(self) -> None:
        """Local. Leave a gradient of an earlier step that the program has kept the values that it has."""
        if sys.getrefcount(self._given) > self._alone:
            self._given.data = self._given.clone()
            self._make_view()

    @torch.no_grad()
    def __call__(self, parameter: torch.Tensor) -> None:
        """Local. Take the gradient that was computed in a step of the model."""
        gradient, binding = parameter.grad, self._binding()
        step = None if binding is None else binding.step()
        if binding is None or gradient is None or step is None or not step.is_training or gradient.requires_grad:
            return
        if gradient.layout is not torch.strided or gradient.data_ptr() == self.memory.data_ptr():
            return
        self.leave_to_program()
        if self._array is not None and type(gradient) is torch.Tensor and gradient.is_contiguous():
            binding.extended.store(self._array, gradient.resolve_neg().numpy())
            torch.autograd.graph.increment_version(self.memory)
        else:
            self.memory.copy_(gradient)
        parameter.grad = self._given


def copy_early(binding: ModelBinding, model: Any) -> None:
    """Collective. From now on copy the gradients of a model's variables as soon as they are computed in a step."""
    copy_late(binding)
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in (variable.value for variable in model.trainable_variables):
        if parameter.is_leaf and parameter.requires_grad and parameter.layout is torch.strided:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for key, group in groups.items():
        places, _ = _memory(binding, key, group)
        binding.hooks += [
            parameter.register_post_accumulate_grad_hook(place)
            for parameter, place in zip(group, places, strict=True)
        ]


def copy_late(binding: ModelBinding) -> None:
    """Local. Copy gradients only when they are reduced."""
    while binding.hooks:
        binding.hooks.pop().remove()


def as_array(variable: Any) -> np.ndarray[Any, Any]:
    """Local. The values of a variable, which must not be changed; a view of its memory where that is possible."""
    value = variable.value.detach()
    if value.device.type == "cpu" and value.dtype is not torch.bfloat16:
        return np.asarray(value.numpy())
    return np.asarray(keras.ops.convert_to_numpy(value))


def sum_small(step: ModelStep, values: Any) -> Any:
    """Collective. A short tensor, summed over the replicas."""
    total = step.binding.sum(values.detach().cpu().numpy(), "divisors of a loss")
    return torch.as_tensor(total, dtype=values.dtype, device=values.device)


def finish(result: Any) -> Any:
    """Local. The result of a step that is done, as all of them are here."""
    return result


def keep(is_new: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """Local. `new` where the rank has rows, else `old`."""
    return new if is_new else old


def is_concrete(tensor: Any) -> bool:
    """Local. Whether a tensor has values."""
    return bool(tensor.device.type != "meta")


def call_for_notes(model: Any, inputs: Any, noted: list[Any], functions: dict[str, Any]) -> list[Any]:
    """Local. See `jax_backend.call_for_notes`; here the whole model is computed, since nothing is compiled."""
    del functions
    with torch.no_grad():
        model(inputs)
    return noted


def gradients_of(model: Any, data: Any, taken: Any, functions: dict[str, Any]) -> list[Any]:
    """Local. The gradients of a step of a model, whose optimizer only takes them."""
    del functions
    # Keras forgets the gradients of variables that a layer has had since it was built.
    for variable in model.trainable_variables:
        variable.value.grad = None
    model.train_step(data)
    gradients: list[Any] = taken.taken
    return gradients


def test(model: Any, data: Any, functions: dict[str, Any]) -> None:
    """Local. A step of `evaluate`."""
    del functions
    with torch.no_grad():
        model.test_step(data)
