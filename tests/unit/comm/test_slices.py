"""Slices of arrays: those that ranks work on cover all, and are not so small that each costs more than its work."""

from __future__ import annotations

import pytest

from mpidist.comm.arithmetic.slices import LEAST_SLICE_BYTES, cut_evenly, own_slice, slice_count


@pytest.mark.parametrize("itemsize", [1, 2, 4, 16])
@pytest.mark.parametrize("ranks", [1, 3, 8, 256])
@pytest.mark.parametrize("count", [0, 1, 7, 1000, 10_000, 100_001])
def test_own_slices_cover_an_array(count: int, ranks: int, itemsize: int) -> None:
    slices = [own_slice(count, itemsize, rank, ranks) for rank in range(ranks)]
    used = slice_count(count * itemsize, ranks)
    assert slices[:used] == cut_evenly(count, used)
    assert slices[used:] == [slice(0, 0)] * (ranks - used)
    assert used == 1 or (count // used + 1) * itemsize > LEAST_SLICE_BYTES


def test_many_ranks_share_a_large_array_only() -> None:
    assert [slice_count(byte_count, 256) for byte_count in (0, 4095, 8192, 40_000, 1 << 20, 1 << 24)] == [
        1, 1, 2, 9, 256, 256,
    ]
