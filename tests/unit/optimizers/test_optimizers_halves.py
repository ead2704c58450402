"""Half precision: state in float32, updates as those of float32 that are then rounded, and copies in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.arithmetic import UpdateArithmetic, UpdateSettings
from mpidist.variables.update.compiled import CompiledUpdate
from mpidist.variables.update.halves import scratch_blocks
from tests.optimizers import SETTINGS

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
STEPS = 200
# Two blocks, and not all of the second.
SIZE = 100

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "clipnorm": {"clipnorm": 3.0}, "clipvalue, decay": {"clipvalue": 0.3, "weight_decay": 0.1},
    "average": {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 7},
}


def gradient_of(step: int, dtype: np.dtype[Any], size: int = SIZE) -> AnyArray:
    generator = np.random.default_rng(step)
    # Of all magnitudes: squares of float16 would be 0, or infinite.
    sizes = np.logspace(-4, 3, size)
    return (generator.normal(size=size) * sizes).astype(dtype)


def start(dtype: np.dtype[Any], size: int = SIZE) -> AnyArray:
    return np.random.default_rng(1000).normal(size=size).astype(dtype)


def make(name: str, **options: Any) -> Optimizer:
    return SETTINGS[name](SETTINGS[name].family.half_rate, **options)


def require_same(optimizer: Optimizer, expected: Optimizer) -> None:
    for slot, wanted in zip(optimizer.variables, expected.variables, strict=True):
        assert slot.dtype == np.float32, slot.name
        np.testing.assert_array_equal(slot.numpy(), wanted.numpy(), err_msg=slot.name)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_updates_are_those_of_float32_rounded_after_each_step(name: str, dtype: np.dtype[Any]) -> None:
    half, wide = mpidist.Variable(start(dtype)), mpidist.Variable(start(dtype).astype("f"))
    optimizer, reference = make(name), make(name)
    for step in range(STEPS):
        gradient = gradient_of(step, dtype)
        optimizer.apply_gradients([(gradient, half)])
        reference.apply_gradients([(gradient.astype("f"), wide)])
        wide.assign(wide.numpy().astype(dtype).astype("f"))
        np.testing.assert_array_equal(half.numpy().astype("f"), wide.numpy(), err_msg=f"step {step}")
    assert half.dtype == dtype
    require_same(optimizer, reference)
    assert np.isfinite(wide.numpy()).all()
    assert (half.numpy() != start(dtype)).mean() > 0.25


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Lion"])
def test_float8_has_its_state_in_float32_too(name: str, kind: str) -> None:
    """In its own dtype a second moment would be 0, and the update a division by it."""
    dtype = np.dtype(getattr(ml_dtypes, kind))
    half, wide = mpidist.Variable(start(dtype)), mpidist.Variable(start(dtype).astype("f"))
    optimizer, reference = make(name), make(name)
    for step in range(20):
        gradient = np.random.default_rng(step).normal(size=SIZE).astype(dtype)
        optimizer.apply_gradients([(gradient, half)])
        reference.apply_gradients([(gradient.astype("f"), wide)])
        wide.assign(wide.numpy().astype(dtype).astype("f"))
        np.testing.assert_array_equal(half.numpy().astype("f"), wide.numpy(), err_msg=f"step {step}")
    require_same(optimizer, reference)
    assert np.isfinite(wide.numpy()).all()


@pytest.mark.parametrize("options", list(OPTIONS)[1:])
@pytest.mark.parametrize("name", ["Adam", "LAMB", "LARS"])
def test_with_the_options_of_every_optimizer(name: str, options: str) -> None:
    dtype = HALVES[0]
    half, wide = mpidist.Variable(start(dtype)), mpidist.Variable(start(dtype).astype("f"))
    optimizer, reference = (make(name, **OPTIONS[options]) for _ in range(2))
    for step in range(10):
        gradient = gradient_of(step, dtype)
        optimizer.apply_gradients([(gradient, half)])
        reference.apply_gradients([(gradient.astype("f"), wide)])
        if options == "average":
            # The averages see the variables that are not yet rounded.
            np.testing.assert_allclose(half.numpy().astype("f"), wide.numpy(), rtol=2e-2, atol=1e-3)
            continue
        wide.assign(wide.numpy().astype(dtype).astype("f"))
        np.testing.assert_array_equal(half.numpy().astype("f"), wide.numpy(), err_msg=f"step {step}")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_master_copy_is_updated_as_a_float32_variable(name: str) -> None:
    dtype = HALVES[0]
    half, wide = mpidist.Variable(start(dtype)), mpidist.Variable(start(dtype).astype("f"))
    optimizer, reference = make(name, master_copy=True), make(name)
    is_layerwise = SETTINGS[name].is_layerwise
    for step in range(STEPS):
        gradient = gradient_of(step, dtype)
        optimizer.apply_gradients([(gradient, half)])
        reference.apply_gradients([(gradient.astype("f"), wide)])
        if not is_layerwise:
            np.testing.assert_array_equal(half.numpy(), wide.numpy().astype(dtype), err_msg=f"step {step}")
    copy = optimizer.variables[-1]
    assert (copy.name, copy.dtype) == (f"{half.name}/master_copy", np.dtype("f"))
    np.testing.assert_allclose(copy.numpy(), wide.numpy(), rtol=1e-3 if is_layerwise else 0, atol=1e-3 * is_layerwise)


def test_small_steps_add_up_in_a_master_copy_alone() -> None:
    """A step of 1e-4 is less than half of what separates 1 from the next number of float16."""
    rounded, copied = mpidist.Variable(np.ones(3, "float16")), mpidist.Variable(np.ones(3, "float16"))
    for variable, optimizer in ((rounded, optimizers.SGD(1e-4)), (copied, optimizers.SGD(1e-4, master_copy=True))):
        for _ in range(1000):
            optimizer.apply_gradients([(np.ones(3, "float16"), variable)])
    assert rounded.numpy().tolist() == [1, 1, 1]
    np.testing.assert_allclose(copied.numpy(), 0.9, rtol=1e-3)


def test_a_variable_that_is_assigned_is_copied_anew() -> None:
    variable = mpidist.Variable(np.ones(2, "float16"))
    optimizer = optimizers.SGD(2.0**-12, master_copy=True)
    gradient = np.ones(2, "float16")
    for _ in range(3):
        optimizer.apply_gradients([(gradient, variable)])
    variable.assign(np.array([5, variable.numpy()[1]]))
    optimizer.apply_gradients([(gradient, variable)])
    assert optimizer.variables[-1].numpy().tolist() == [5 - 2.0**-12, 1 - 4 * 2.0**-12]


def test_only_variables_of_half_precision_are_copied() -> None:
    half, single = mpidist.Variable(np.ones(2, "float16")), mpidist.Variable(np.ones(2, "f"))
    optimizer = optimizers.Adam(0.1, master_copy=True)
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(2, "f"), single), (np.ones(2, "float16"), half)])
    assert [slot.name.rpartition("/")[2] for slot in optimizer.variables].count("master_copy") == 1
    np.testing.assert_allclose(half.numpy(), single.numpy(), rtol=1e-3)


@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)])
def test_checkpoints_with_and_without_copies(tmp_path: Path, copies: tuple[bool, bool]) -> None:
    gradient = np.ones(3, "float16")

    def make(master_copy: bool) -> tuple[Any, Any, Any]:
        # Another variable stands first, which has no copy.
        variables = [mpidist.Variable(np.ones(3, "f")), mpidist.Variable(np.ones(3, "float16"))]
        optimizer = optimizers.SGD(1e-4, 0.5, master_copy=master_copy)
        optimizer.build(variables)
        return variables, optimizer, mpidist.Checkpoint(variables=variables, optimizer=optimizer)

    variables, optimizer, checkpoint = make(copies[0])
    for _ in range(4):
        optimizer.apply_gradients([(gradient.astype("f"), variables[0]), (gradient, variables[1])])
    path = checkpoint.save(tmp_path / "c")
    others, other, restored = make(copies[1])
    restored.restore(path)
    for ours, theirs in zip(others, variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    if all(copies):
        assert [v.numpy().tolist() for v in other.variables] == [v.numpy().tolist() for v in optimizer.variables]
        assert other.variables[-1].numpy()[0] != 1
    other.apply_gradients([(gradient.astype("f"), others[0]), (gradient, others[1])])


class OlderAdam:
    """Saves what an Adam of earlier versions did: sums of squares, of the variable's dtype."""

    def __init__(self, optimizer: Optimizer, sums: AnyArray) -> None:
        self.optimizer, self.sums = optimizer, sums

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state()
        del state["velocity"]
        state["gradient_sum"] = [v.numpy().astype(self.sums.dtype) for v in state["gradient_sum"]]
        return {**state, "square_sum": [self.sums]}

    def load_state(self, saved: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("when", ["built", "later"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_checkpoints_of_sums_of_squares_are_restored(tmp_path: Path, dtype: str, when: str) -> None:
    gradient = np.array([1, 3, 30], dtype)
    straight = optimizers.Adam(0.01)
    variable = mpidist.Variable(np.zeros(3, dtype))
    for _ in range(200):
        straight.apply_gradients([(gradient, variable)])
    with np.errstate(over="ignore"):
        sums = (straight.variables[1].numpy() / np.float32(0.001)).astype(dtype)
    # Of 30 the sum has overflowed in float16.
    assert np.isinf(sums).tolist() == [False, False, dtype == "float16"]
    path = mpidist.Checkpoint(v=variable, optimizer=OlderAdam(straight, sums)).save(tmp_path / "c")
    other, resumed = mpidist.Variable(np.zeros(3, dtype)), optimizers.Adam(0.5)
    if when == "built":
        resumed.build([other])
    mpidist.Checkpoint(v=other, optimizer=resumed).restore(path).assert_existing_objects_matched()
    for _ in range(50):
        straight.apply_gradients([(gradient, variable)])
        resumed.apply_gradients([(gradient, other)])
    known = slice(0, 2 if dtype == "float16" else 3)
    np.testing.assert_allclose(other.numpy()[known], variable.numpy()[known], rtol=2e-3)
    # It moves again.
    assert other.numpy()[2] < -2
    np.testing.assert_allclose(resumed.variables[1].numpy()[known], straight.variables[1].numpy()[known], rtol=1e-3)


@pytest.mark.parametrize("master_copy", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_compiled_updates_have_the_bits_of_numpy(name: str, master_copy: bool) -> None:
    """In the middle of the conversions there is the compiled loop; elsewhere than in blocks it is not used."""
    optimizer = make(name, master_copy=master_copy, use_ema=True, clipvalue=100.0)
    size, dtype = 1 << 15, HALVES[0]
    results = []
    for compiles in (False, True):
        arithmetic = UpdateArithmetic(optimizer.kernel, optimizer.options, compiles=compiles, has_halves=True)
        scratch = scratch_blocks(arithmetic.scratch_count, size, dtype)
        slots = [np.full(size, value, "f") for value in (*arithmetic.slots.values(), *[0.0] * master_copy)]
        parameter = start(dtype, size)
        for step in (1, 2, 3):
            gradient = gradient_of(step, dtype, size)
            if SETTINGS[name].is_layerwise:
                kernel: Any = optimizer.kernel
                update = arithmetic.surround(kernel.prepare(step, 0.1, 2.0, 3.0), keep=0.9)
            else:
                update = arithmetic.prepare(UpdateSettings(step, 0.1, factor=0.5))
            assert isinstance(update, CompiledUpdate) == compiles
            update(parameter, gradient, slots, scratch)
            arithmetic.follow(step)(parameter, gradient, slots, scratch)
        arithmetic.take()(parameter, gradient, slots, scratch)
        results.append([parameter, *slots])
    for plain, other in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, other)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("master_copy", [False, True])
def test_rows_of_tables_are_updated_alike(dtype: np.dtype[Any], master_copy: bool) -> None:
    table = mpidist.Variable(start(dtype).reshape(20, 5), sparse_gradient=True)
    dense = mpidist.Variable(start(dtype).reshape(20, 5)[[3, 8]])
    first, second = (optimizers.Adam(0.01, master_copy=master_copy) for _ in range(2))
    for step in range(20):
        gradient = gradient_of(step, dtype, 10).reshape(2, 5)
        first.apply_gradients([(mpidist.IndexedSlices(gradient, np.array([3, 8])), table)])
        second.apply_gradients([(gradient, dense)])
    np.testing.assert_array_equal(table.numpy()[[3, 8]], dense.numpy())
    for slot, expected in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(slot.numpy()[[3, 8]], expected.numpy())


@pytest.mark.parametrize("name", SETTINGS)
def test_scaled_losses_are_unscaled_in_float32(name: str) -> None:
    """A gradient of 1e-6 divided by 65536 is 0 in float16."""
    plain, scaled = (mpidist.Variable(start(HALVES[0])) for _ in range(2))
    first, second = (make(name) for _ in range(2))
    for step in range(5):
        gradient = gradient_of(step, HALVES[0]) / np.float16(64)
        first.apply_gradients([(gradient, plain)])
        second.apply_scaled_gradients([(gradient * np.float16(32), scaled)], 32.0)
    same = np.abs(gradient) > 1e-3
    np.testing.assert_allclose(scaled.numpy()[same], plain.numpy()[same], rtol=1e-2, atol=1e-3)
