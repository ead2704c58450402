"""Training with variables on a GPU gives what it gives in host memory, for every family of optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.comm.communicator import Communicator
from mpidist.variables.arena import Arena
from tests.parallel.variables.test_device_variables import FAMILIES, train

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_optimizer_does_what_it_does_in_host_memory(cupy: Any, communicator: Communicator, family: str) -> None:
    values, _ = train(Arena(communicator, on_gpu=True), FAMILIES[family](), cupy.asarray)
    expected, _ = train(Arena(communicator, shared=False), FAMILIES[family](), lambda array: array)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
