"""Fused updates on a GPU against NumPy, for every family of optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.variables.update.fused import fused
from tests.unit.test_optimizers_fused import KERNELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", KERNELS)
def test_an_update_is_one_kernel_with_numpys_results(name: str, dtype: str) -> None:
    cupy: Any = pytest.importorskip("cupy", reason="needs CuPy")
    kernel = KERNELS[name]
    random = np.random.default_rng(0)
    parameter = random.standard_normal(10_007).astype(dtype)
    slots = [np.full(parameter.shape, start, dtype) for start in kernel.slots.values()]
    scratch = [np.empty_like(parameter) for _ in range(kernel.scratch_count)]
    on_gpu = cupy.asarray(parameter)
    gpu_slots = [cupy.asarray(slot) for slot in slots]
    gpu_scratch = [cupy.empty_like(on_gpu) for _ in scratch]
    tolerance = {"float16": 1e-2, "float32": 2e-5, "float64": 1e-12}[dtype]
    for step in range(1, 4):
        gradient = random.standard_normal(parameter.shape).astype(dtype)
        update = kernel.prepare(step, 0.01)
        fused(update, len(slots), len(scratch))(on_gpu, cupy.asarray(gradient), gpu_slots, gpu_scratch)
        update(parameter, gradient, slots, scratch)
        np.testing.assert_allclose(cupy.asnumpy(on_gpu), parameter, rtol=tolerance, atol=tolerance)
