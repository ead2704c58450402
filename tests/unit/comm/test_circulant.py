"""The rounds of exchanges over a circulant graph."""

from __future__ import annotations

from mpidist.comm.backends.circulant import rounds


def test_each_block_is_sent_once_in_a_logarithm_of_rounds() -> None:
    for size in range(1, 200):
        found = rounds(size)
        assert len(found) == (size - 1).bit_length()
        # What a round sends is not among what it keeps.
        assert all(high - low <= low for low, high in found)
        assert sum(high - low for low, high in found) == size - 1
