"""Gradients whose squares overflow: as late as in PyTorch, and then an error, never a variable that stands still."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.optimizers.families.adam import AdamKernel
from mpidist.parameter_server.heap.dense import HeapVariable, Updates
from mpidist.parameter_server.protocol.messages import CommitStep
from mpidist.variables.kinds.served import ServedPlace
from mpidist.variables.update.arithmetic import UpdateArithmetic
from mpidist.variables.update.compiled import CompiledUpdate
from mpidist.variables.update.fused import record
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.update.overflow import Overflow, loud
from tests.optimizers import SETTINGS

SHARES = {name: setting.family.square_share for name, setting in SETTINGS.items() if setting.family.square_share}
LARGEST = {name: float(np.sqrt(float(np.finfo("f").max) / share)) for name, share in SHARES.items()}


@pytest.mark.parametrize("size", [3, 1 << 18], ids=["NumPy", "compiled"])
@pytest.mark.parametrize("name", LARGEST)
def test_squares_overflow_where_their_mean_does(name: str, size: int) -> None:
    variable, optimizer = mpidist.Variable(np.ones(size, "f")), SETTINGS[name]()
    gradient = np.zeros(size, "f")
    gradient[-1] = 0.99 * LARGEST[name]
    optimizer.apply_gradients([(gradient, variable)])
    before = variable.numpy()
    assert before[-1] != 1
    gradient[-1] = 1.01 * LARGEST[name]
    with pytest.raises(OverflowError, match=r"1 elements of the optimizer's state '\w+' of variable 'Variable' have"):
        optimizer.apply_gradients([(gradient, variable)])


@pytest.mark.parametrize("way", ["load_state", "assign"])
def test_the_error_comes_again_until_state_is_restored(way: str) -> None:
    variable, optimizer = mpidist.Variable(np.ones(3, "f")), optimizers.Adam(0.1)
    optimizer.build([variable])
    fresh = {name: entry for name, entry in optimizer.state().items() if name == "iterations"}
    for gradient in (1e30, 1.0):
        with pytest.raises(OverflowError, match=r"'velocity'.*Restore the last checkpoint, and clip the gradients"):
            optimizer.apply_gradients([(np.full(3, gradient, "f"), variable)])
    assert optimizer.iterations == 0
    if way == "load_state":
        optimizer.load_state({name: np.asarray(entry).view(Stored) for name, entry in fresh.items()})
    else:
        for state in optimizer.variables:
            state.assign(np.zeros(3, "f"))
    optimizer.apply_gradients([(np.ones(3, "f"), variable)])


class Stored(np.ndarray[Any, Any]):
    """As an array of a checkpoint."""

    def numpy(self) -> AnyArray:
        return np.asarray(self)


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_gradients_that_are_not_finite_are_seen_in_the_variable(number: float) -> None:
    variable = mpidist.Variable(np.ones(3, "f"))
    with np.errstate(invalid="ignore"):
        optimizers.Adam(0.1).apply_gradients([(np.full(3, number, "f"), variable)])
    assert np.isnan(variable.numpy()).all()


def test_an_overflow_that_leaves_the_state_finite_is_no_error() -> None:
    """A variable of float16 becomes infinite, which a program sees."""
    variable = mpidist.Variable(np.full(3, 65504, "f2"))
    optimizers.SGD(1.0, 0.5).apply_gradients([(np.full(3, -64, "f2"), variable)])
    assert np.isinf(variable.numpy()).all()


def test_programs_that_let_numpy_raise_get_the_same_error() -> None:
    variable, optimizer = mpidist.Variable(np.ones(3, "f")), optimizers.Adam(0.1)
    with np.errstate(all="raise"), pytest.raises(OverflowError, match="velocity"):
        optimizer.apply_gradients([(np.full(3, 1e30, "f"), variable)])


def test_tables_say_it_too() -> None:
    table, optimizer = mpidist.Variable(np.ones((5, 2), "f"), sparse_gradient=True), optimizers.Adagrad(0.1)
    rows = mpidist.IndexedSlices(np.full((1, 2), 1e30, "f"), np.array([3]))
    with pytest.raises(OverflowError, match=r"2 elements of the optimizer's state 'accumulator'"):
        optimizer.apply_gradients([(rows, table)])


@pytest.mark.parametrize("number", [1.0, 1e30])
def test_compiled_loops_are_watched_on_their_own(number: float) -> None:
    overflow = Overflow()
    arithmetic = UpdateArithmetic(AdamKernel(0.9, 0.999, 1e-7), OptimizerOptions(), compiles=True, overflow=overflow)
    update = arithmetic.surround(arithmetic.kernel.prepare(1, 0.1))  # type: ignore[call-arg]
    assert isinstance(update, CompiledUpdate)
    parameter, *slots = (np.zeros(1 << 16, "f") for _ in range(3))
    for _ in range(2):
        with np.errstate(over="call", call=overflow.note):
            update(parameter, np.full(1 << 16, number, "f"), slots, [])
    # Of one step, however often it happens.
    assert overflow.counts.tolist() == [number > 1]
    assert (overflow.counts.tobytes() != overflow.seen) == (number > 1)
    overflow.see()
    assert overflow.counts.tobytes() == overflow.seen
    assert np.isinf(slots[1]).any() == (number > 1)


def test_a_server_says_it() -> None:
    memory = np.zeros(4096, np.uint8)
    weight, *slots = (
        HeapVariable(memory, ServedPlace(number, 0, at, (at + 64, at + 512), (3,), "float32"))
        for number, at in enumerate((0, 1024, 2048))
    )
    updates = Updates(AdamKernel(0.9, 0.999, 1e-7), OptimizerOptions(), {0: slots})
    updates.apply(weight, np.ones(3, "f"), CommitStep(1, 0, 0.1), 1.0)
    with pytest.raises(OverflowError, match="state 'velocity' of variable 'number 0'"):
        updates.apply(weight, np.full(3, 1e30, "f"), CommitStep(1, 1, 0.1), 1.0)


def test_on_a_gpu_the_variable_becomes_nan() -> None:
    """There is no flag. The statements are part of the one kernel."""
    kernel = AdamKernel(0.9, 0.999, 1e-7)
    update = loud(kernel.prepare(1, 0.1), 2)
    operations = [statement.operation for statement in record(update, np.dtype("f"), 2, 0).statements]
    assert operations[-2:] == ["where equal", "where equal"]
    parameter, *slots = (np.zeros(3, "f") for _ in range(3))
    with np.errstate(all="ignore"):
        update(parameter, np.array([1, 1e30, 1], "f"), slots, [])
    assert np.isnan(parameter).tolist() == [False, True, False]
