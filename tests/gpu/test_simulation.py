"""The stand-in for CuPy offers nothing that CuPy has not: what passes with it should pass here."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests import simulated_cupy
from tests.simulated_cuda import make_cuda


def test_the_stand_in_has_only_names_of_cupys() -> None:
    cupy: Any = pytest.importorskip("cupy", reason="needs CuPy")
    with simulated_cupy.simulated_cupy() as module:
        offered = [name for name in vars(module) if not name.startswith("_")]
    assert [name for name in offered if not hasattr(cupy, name)] == []
    assert [name for name in simulated_cupy._METHODS if not hasattr(cupy.ndarray, name)] == []
    cuda: Any = make_cuda()
    # CuPy's package has it only when it is imported.
    importlib.import_module("cupy.cuda.nccl")
    assert [name for name in vars(cuda) if not name.startswith("_") and not hasattr(cupy.cuda, name)] == []
    assert [name for name in vars(cuda.runtime) if not hasattr(cupy.cuda.runtime, name)] == []
