"""Fused updates on a GPU against NumPy, for every family of optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.variables.update.fused import fused
from mpidist.variables.update.halves import in_float32, scratch_blocks, state_dtype
from tests.unit.optimizers.test_optimizers_fused import KERNELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", KERNELS)
def test_an_update_is_one_kernel_with_numpys_results(name: str, dtype: str) -> None:
    cupy: Any = pytest.importorskip("cupy", reason="needs CuPy")
    kernel = KERNELS[name]
    random = np.random.default_rng(0)
    parameter = random.standard_normal(10_007).astype(dtype)
    state = state_dtype(parameter.dtype)
    slots = [np.full(parameter.shape, start, state) for start in kernel.slots.values()]
    scratch = scratch_blocks(kernel.scratch_count, len(parameter), parameter.dtype)
    on_gpu = cupy.asarray(parameter)
    gpu_slots = [cupy.asarray(slot) for slot in slots]
    gpu_scratch = scratch_blocks(kernel.scratch_count, len(parameter), parameter.dtype, cupy)
    tolerance = {"float16": 1e-2, "float32": 2e-5, "float64": 1e-12}[dtype]
    for step in range(1, 4):
        gradient = random.standard_normal(parameter.shape).astype(dtype)
        update = kernel.prepare(step, 0.01)
        on_host = in_float32(update, len(slots), has_master=False)
        on_device = in_float32(fused(update, len(slots), kernel.scratch_count), len(slots), has_master=False)
        on_device(on_gpu, cupy.asarray(gradient), gpu_slots, gpu_scratch)
        on_host(parameter, gradient, slots, scratch)
        np.testing.assert_allclose(cupy.asnumpy(on_gpu), parameter, rtol=tolerance, atol=tolerance)
