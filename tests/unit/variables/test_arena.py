"""Slabs: what is taken and given back, against a model of free elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.group.solo import SoloCommunicator
from mpidist.variables.arena import solo_arena
from mpidist.variables.memory.slab import ALIGNMENT, Slab, aligned_zeros
from tests.helpers.strategies import make_arena


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_ranges_are_never_dealt_twice(actions: list[tuple[bool, int]]) -> None:
    slab = Slab(np.dtype("int8"), 100, None)
    taken: list[tuple[int, int]] = []
    for take, number in actions:
        if take:
            start = slab.take(number)
            used = {i for low, count in taken for i in range(low, low + count)}
            if start is not None:
                assert not used & set(range(start, start + number))
                assert 0 <= start <= 100 - number
                taken.append((start, number))
            else:
                runs = "".join("x" if i in used else "." for i in range(100)).split("x")
                assert max(map(len, runs)) < number, "there was room"
        elif taken:
            slab.give_back(*taken.pop(number % len(taken)))
    for low, count in taken:
        slab.give_back(low, count)
    assert slab.free == [(0, 100)]


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "complex128", "longdouble"])
def test_memory_starts_on_a_cache_line_and_is_zero(dtype: str) -> None:
    for count in (0, 1, 7, 1000):
        array = aligned_zeros(count, np.dtype(dtype))
        assert (array.shape, array.dtype) == ((count,), np.dtype(dtype))
        assert array.ctypes.data % ALIGNMENT == 0 or count == 0
        assert not array.any()


def test_an_arena_of_one_rank_is_private() -> None:
    arena = make_arena(SoloCommunicator(), shared=True)
    assert not arena.shares_memory
    number, address = arena.create("w", (3, 5), np.dtype("float32"))
    assert (address.size, address.slab.is_shared) == (15, False)
    address.writable[...] = 7
    assert (address.readable == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        address.readable[0] = 1
    arena.release(number)
    _, again = arena.create("v", (4,), np.dtype("float32"))
    assert again.start == address.start
    assert repr(arena) == "Arena(1 variables in 1 slabs, 1048576 bytes, SoloCommunicator())"


def test_large_variables_get_slabs_that_hold_them() -> None:
    arena = make_arena(SoloCommunicator())
    _, small = arena.create("s", (10,), np.dtype("float64"))
    _, large = arena.create("l", (3 << 20,), np.dtype("float64"))
    _, empty = arena.create("e", (0, 4), np.dtype("float64"))
    assert large.size == 3 << 20
    assert small.slab is not large.slab
    assert empty.writable.shape == (0,)


def test_there_is_one_arena_without_a_strategy() -> None:
    assert solo_arena() is solo_arena()
