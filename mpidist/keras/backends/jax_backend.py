"""The backend jax: a compiled step calls out of XLA, and gradients of a few megabytes are reduced in XLA's own memory.

One function serves all models of the process: what it is told first is the number of a binding, and the rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpidist.keras.backends.jax_staging import STAGED_BYTES, GradientStaging
from mpidist.keras.binding import ModelBinding, find
from mpidist.keras.step import ModelStep
from mpidist.options import ReduceOp
from mpidist.xla import Call, threads

# In place of a number of rows.
_SUM, _SMALL = -1, -2


def _work(inputs: list[np.ndarray[Any, Any]], outputs: list[np.ndarray[Any, Any]]) -> None:
    number, rows, is_weighed = (int(value) for value in inputs[0])
    arrays, binding = outputs[1:], find(number)
    if rows == _SMALL:
        arrays[0][...] = binding.sum(np.array(arrays[0]), "divisors of a loss")
        return
    _reduce(binding, rows, arrays, is_weighed=bool(is_weighed))


def _reduce(binding: ModelBinding, rows: int, arrays: list[np.ndarray[Any, Any]], *, is_weighed: bool) -> None:
    if rows == _SUM:
        binding.extended.all_reduce(ReduceOp.SUM, arrays, in_place=True, name="gradients")
        return
    weight = binding.weigh(rows)
    for array in arrays:
        if weight == 0:
            # Not a product: the row of a rank without rows may give inf or nan.
            array.fill(0)
        elif weight != 1 and not is_weighed:
            np.multiply(array, array.dtype.type(weight), out=array)
    op = ReduceOp.SUM if is_weighed else ReduceOp.MEAN
    binding.extended.all_reduce(op, arrays, in_place=True, name="gradients")


# Before JAX starts, which the test of calls below does.
threads.share_launched()
_call = Call("mpidist.keras", _work)
_staging = GradientStaging("mpidist.keras.staging", _reduce)


def _out(binding: ModelBinding, rows: Any, leaves: list[Any], *, is_weighed: bool = False) -> list[Any]:
    head = jnp.stack([jnp.asarray(value, jnp.int32) for value in (binding.number, rows, is_weighed)])
    return _call([head, *leaves])[1:]


def share_cores(binding: ModelBinding) -> None:
    """Local. Use this replica's share of the node's cores, unless the user has chosen, or XLA has started."""
    threads.share_cores(binding.strategy)


def reduce_gradients(
    binding: ModelBinding, gradients: list[Any], step: ModelStep | None, *, is_weighed: bool = False
) -> list[Any]:
    """Collective. Gradients, combined over the replicas: their mean by rows in a step of `fit`, else their sum.

    Args:
        binding: The optimizer's binding.
        gradients: Arrays, also traced ones, or None where a variable has none.
        step: The step of `fit`, or None.
        is_weighed: Whether the loss had the replica's weight, so that the mean over the rows is the sum.
    """
    some = [gradient for gradient in gradients if gradient is not None]
    rows = _SUM if step is None else step.rows
    is_large = sum(one.size * one.dtype.itemsize for one in some) >= STAGED_BYTES
    combine = _staging if is_large else _out
    done = iter(combine(binding, rows, some, is_weighed=is_weighed))
    return [None if gradient is None else next(done) for gradient in gradients]


def sum_small(step: ModelStep, values: Any) -> Any:
    """Collective. A short array, summed over the replicas."""
    return _out(step.binding, _SMALL, [jax.lax.stop_gradient(values)])[0]


def as_array(variable: Any) -> np.ndarray[Any, Any]:
    """Local. The values of a variable, which must not be changed; a view of its memory where that is possible."""
    return np.asarray(variable.value)


def copy_early(binding: ModelBinding, model: Any) -> None:
    """Local. Nothing: XLA's own memory is reduced."""
    del binding, model


def copy_late(binding: ModelBinding) -> None:
    """Local. See `copy_early`."""
    del binding


def finish(result: Any) -> Any:
    """Local. Wait for what a step returned: the main thread's next collective must come after the step's."""
    return jax.block_until_ready(result)


def keep(is_new: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """Local. `new` where the rank has rows, else `old`."""
    return [jnp.where(is_new, one, other) for one, other in zip(new, old, strict=True)]


def is_concrete(tensor: Any) -> bool:
    """Local. Whether a tensor has values."""
    return not isinstance(tensor, jax.core.Tracer)


def _values(variables: Any) -> list[Any]:
    return [variable.value for variable in variables]


def call_for_notes(model: Any, inputs: Any, noted: list[Any], functions: dict[str, Any]) -> list[Any]:
    """Local. The notes of a model's layers when it is called: nothing else is computed.

    Args:
        model: The model.
        inputs: The inputs of a batch, as arrays.
        noted: The list of pairs that layers append to.
        functions: Compiled functions of the model.

    Returns:
        The pairs, with values.
    """
    # A step that is traced again notes into another list.
    functions["noted"] = noted

    def note(trainable: Any, rest: Any, given: Any) -> Any:
        model.stateless_call(trainable, rest, given)
        functions["owners"] = [owner for owner, _ in functions["noted"]]
        return [ids for _, ids in functions["noted"]]

    function = functions.setdefault("notes", jax.jit(note))
    ids = function(_values(model.trainable_variables), _values(model.non_trainable_variables), inputs)
    return list(zip(functions["owners"], ids, strict=True))


def gradients_of(model: Any, data: Any, taken: Any, functions: dict[str, Any]) -> list[Any]:
    """Local. The gradients of a step of a model, whose optimizer only takes them."""
    function = functions.setdefault("train", jax.jit(model.train_step))
    groups = model.trainable_variables, model.non_trainable_variables, taken.variables, model.metrics_variables
    _, (gradients, rest, _, metrics) = function(tuple(map(_values, groups)), data)
    _assign([*groups[1], *groups[3]], [*rest, *metrics])
    return list(gradients)


def test(model: Any, data: Any, functions: dict[str, Any]) -> None:
    """Local. A step of `evaluate`."""
    function = functions.setdefault("test", jax.jit(model.test_step))
    groups = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
    _, (_, rest, metrics) = function(tuple(map(_values, groups)), data)
    _assign([*groups[1], *groups[2]], [*rest, *metrics])


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
