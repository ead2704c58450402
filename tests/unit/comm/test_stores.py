"""Copies past the cache."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.comm.arithmetic import compiler, stores

SIZE = stores.LEAST_BYTES // 4


@pytest.mark.parametrize(("count", "dtype", "begin"), [
    (SIZE, "f4", 0), (SIZE + 13, "f4", 0), (SIZE + 13, "f4", 16), (SIZE, "f4", 3), (SIZE // 2 + 5, "f8", 8),
    (2 * SIZE + 1, "f2", 32), (100, "f4", 0),
])
def test_all_values_come_and_nothing_beside_them_changes(count: int, dtype: str, begin: int) -> None:
    room = np.zeros(count * np.dtype(dtype).itemsize + 512, np.uint8)
    room = room[-room.ctypes.data % 64 :].view(np.uint8)
    memory = room[: (room.size // 8) * 8].view(dtype)
    source = np.random.default_rng(1).standard_normal(count).astype(dtype)
    stores.store(memory[begin : begin + count], source)
    np.testing.assert_array_equal(memory[begin : begin + count], source)
    assert not memory[:begin].any()
    assert not memory[begin + count :].any()


def test_other_shapes_and_dtypes_are_left_to_numpy() -> None:
    source = np.arange(SIZE + 2.0).reshape(2, -1)
    target = np.zeros((source.shape[1], 2), "f4").T
    stores.store(target, source)
    np.testing.assert_array_equal(target, source.astype("f4"))


def test_stores_go_past_the_cache() -> None:
    if not compiler.load():
        pytest.skip("the extra 'fast' is not installed")
    code = stores._copy()
    assert code is not None
    # Names of the instructions on x86 and on ARM.
    assert any(name in code.assembly for name in ("movnt", "stnp"))
    assert any(name in code.assembly for name in ("mfence", "lock", "dmb"))
