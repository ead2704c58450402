"""The checksums by which ranks compare variables."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras and PyTorch are in the extra 'keras'")
pytest.importorskip("torch")

from mpidist.keras.parts.values import checksum

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("shape", [(), (7,), (64, 1024), (100, 2048), (3, 3, 512, 33)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool"])
def test_a_change_anywhere_changes_the_checksum(shape: tuple[int, ...], dtype: str) -> None:
    values = np.array(np.random.default_rng(1).integers(0, 2, shape), dtype)
    first = checksum(values)
    assert checksum(values.copy()) == first
    for place in {0, values.size // 2, values.size - 1}:
        other = values.copy()
        other.reshape(-1)[place] = not other.reshape(-1)[place]
        assert checksum(other) != first


def test_rows_that_have_changed_places_change_the_checksum() -> None:
    values = np.random.default_rng(1).standard_normal((64, 2048)).astype("float32")
    assert checksum(values[::-1]) != checksum(values)
    assert checksum(values.T) == checksum(np.ascontiguousarray(values.T))
