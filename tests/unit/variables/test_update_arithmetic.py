"""The arithmetic of an update on one block, without any variable, plan or arena."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.optimizers.families.adam import AdamKernel
from mpidist.optimizers.families.lamb import LAMB
from mpidist.optimizers.families.sgd import SGD
from mpidist.variables.update.arithmetic import AVERAGE, UpdateArithmetic, UpdateSettings, take_average
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.update.rows import RowArithmetic

SIZE = 12


def blocks(arithmetic: UpdateArithmetic, size: int = SIZE) -> tuple[AnyArray, AnyArray, list[AnyArray], list[AnyArray]]:
    """A parameter, a gradient, slots and scratch, as any owner of memory has them."""
    random = np.random.default_rng(1)
    slots = [np.full(size, initial) for initial in arithmetic.slots.values()]
    scratch = [np.empty(size) for _ in range(arithmetic.scratch_count)]
    return random.normal(size=size), random.normal(size=size) * 3, slots, scratch


def test_a_block_is_unscaled_then_clipped_then_decayed() -> None:
    arithmetic = UpdateArithmetic(SGD(0.1).kernel, OptimizerOptions(weight_decay=0.5, clipvalue=0.2))
    parameter, gradient, slots, scratch = blocks(arithmetic)
    expected = parameter * (1 - 0.1 * 0.5) - 0.1 * np.clip(gradient / 4, -0.2, 0.2)
    arithmetic.prepare(UpdateSettings(1, 0.1, factor=0.25))(parameter, gradient, slots, scratch)
    np.testing.assert_allclose(parameter, expected)


def test_the_kernel_itself_where_there_is_nothing_around_it() -> None:
    arithmetic = UpdateArithmetic(AdamKernel(0.9, 0.999, 1e-7), OptimizerOptions())
    assert not arithmetic.is_needed
    assert list(arithmetic.slots) == list(arithmetic.kernel.slots)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_shard_gets_the_bits_of_the_whole(cut: int) -> None:
    arithmetic = UpdateArithmetic(AdamKernel(0.9, 0.999, 1e-7), OptimizerOptions(clipvalue=1.0, use_ema=True))
    whole, parts = blocks(arithmetic), blocks(arithmetic)
    for step in (1, 2, 3):
        gradient = np.random.default_rng(step).normal(size=SIZE)
        for update in (arithmetic.prepare(UpdateSettings(step, 0.1)), arithmetic.follow(step)):
            update(whole[0], gradient.copy(), whole[2], whole[3])
            for piece in (slice(0, cut), slice(cut, SIZE)):
                update(
                    parts[0][piece], gradient[piece].copy(), [slot[piece] for slot in parts[2]],
                    [room[piece] for room in parts[3]],
                )
    np.testing.assert_array_equal(parts[0], whole[0])
    np.testing.assert_array_equal(parts[2], whole[2])


def test_the_average_is_the_last_slot_and_no_kernel_sees_it() -> None:
    arithmetic = UpdateArithmetic(SGD(0.1, momentum=0.9).kernel, OptimizerOptions(use_ema=True, ema_momentum=0.75))
    assert list(arithmetic.slots)[-1] == AVERAGE
    parameter, gradient, slots, scratch = blocks(arithmetic)
    average = np.zeros(SIZE)
    for step in (1, 2):
        arithmetic.prepare(UpdateSettings(step, 0.1))(parameter, gradient.copy(), slots, scratch)
        np.testing.assert_array_equal(slots[-1], average)
        arithmetic.follow(step)(parameter, gradient, slots, scratch)
        average = parameter.copy() if step == 1 else 0.75 * average + 0.25 * parameter
        np.testing.assert_allclose(slots[-1], average)
        average = slots[-1].copy()
    take_average(parameter, gradient, slots, scratch)
    np.testing.assert_array_equal(parameter, average)


def test_a_kernel_that_needs_norms_has_no_update_of_one_block() -> None:
    arithmetic = UpdateArithmetic(LAMB(0.1).kernel, OptimizerOptions())
    with pytest.raises(TypeError, match="element-wise, got"):
        arithmetic.prepare(UpdateSettings(1, 0.1))


def table() -> dict[str, AnyArray]:
    random = np.random.default_rng(2)
    return {name: random.normal(size=(10, 3)) for name in ("parameter", "slot")}


def double(parameter: AnyArray, gradient: AnyArray, slots: Any, _: Any) -> None:
    np.add(slots[0], gradient, out=slots[0])
    np.subtract(parameter, slots[0], out=parameter)


@pytest.mark.parametrize("is_aside", [False, True])
def test_rows_are_merged_and_no_other_row_changes(is_aside: bool) -> None:
    arrays, before = table(), table()
    rows = RowArithmetic(arrays["parameter"], [arrays["slot"]], 0)
    values = np.arange(12.0).reshape(4, 3)
    merged = rows.merge(np.array([7, 2, 7, 0], np.int32), values)
    np.testing.assert_array_equal(merged[0], [0, 2, 7])
    np.testing.assert_array_equal(merged[1], [values[3], values[1], values[0] + values[2]])
    gradients = merged[1].copy()
    measured = rows.measure(merged, lambda parameter, gradient: [parameter.sum(), gradient.sum()], 2)
    np.testing.assert_allclose(measured, [before["parameter"][[0, 2, 7]].sum(), values.sum()])
    if is_aside:
        rows.apply_aside(merged, double)
        np.testing.assert_array_equal(arrays["parameter"], before["parameter"])
        rows.write_back(merged)
    else:
        rows.apply(merged, double)
    slot, parameter = before["slot"].copy(), before["parameter"].copy()
    slot[[0, 2, 7]] += gradients
    parameter[[0, 2, 7]] -= slot[[0, 2, 7]]
    np.testing.assert_allclose(arrays["slot"], slot)
    np.testing.assert_allclose(arrays["parameter"], parameter)


def test_no_rows_change_nothing() -> None:
    arrays, before = table(), table()
    rows = RowArithmetic(arrays["parameter"], [arrays["slot"]], 0)
    rows.apply(rows.no_rows(), double)
    np.testing.assert_array_equal(arrays["parameter"], before["parameter"])
