"""The heaps of servers: which server gets a variable, and what is given back."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from mpidist.parameter_server.heap.layout import Heaps, Slots, Space
from mpidist.parameter_server.heap.rows import block_count
from mpidist.variables.kinds.served import ServedPlace

SERVERS = (3, 4, 5)


def make(heap_bytes: int = 1 << 20) -> Heaps:
    return Heaps(dict.fromkeys(SERVERS, heap_bytes), Slots((0, 1), 4096), "server {}".format)


def place(heaps: Heaps, *shape: int, buffers: int = 2, server: int | None = None) -> ServedPlace:
    found = heaps.take(shape, np.dtype("float32"), buffers=buffers, server=server)
    assert found is not None
    return found


def servers_of(heaps: Heaps, *lengths: int) -> list[int]:
    return [SERVERS.index(place(heaps, length).server) for length in lengths]


def test_equal_variables_go_round() -> None:
    heaps = make()
    scalars = [place(heaps) for _ in range(4)]
    assert [SERVERS.index(one.server) for one in scalars] == [0, 1, 2, 0]
    assert scalars[3].header > scalars[0].header


def test_variables_are_spread_by_their_bytes() -> None:
    # The third server has least, then the second.
    assert servers_of(make(), 1000, 100, 10, 10, 100) == [0, 1, 2, 2, 2]


def test_a_chosen_server_counts_and_does_not_turn_the_round() -> None:
    heaps = make()
    first = place(heaps)
    assert place(heaps, 1000, server=first.server).server == first.server
    assert servers_of(heaps, 1, 1, 1) == [1, 2, 1]


def test_what_is_given_back_is_free_again() -> None:
    heaps = make(heap_bytes=4 * 4096 + 10 * (2 * 4096 + 64))
    kept: list[ServedPlace] = []
    order = random.Random(3)
    for _ in range(2000):
        found = heaps.take((1024,), np.dtype("float32"), buffers=order.choice((1, 2)))
        if found is None:
            heaps.give(kept.pop(order.randrange(len(kept))))
        else:
            kept.append(found)
    spans = sorted(
        (one.server, one.header, one.header + 64 + 4096 * (1 + (one.buffers[0] < one.buffers[1]))) for one in kept
    )
    assert all(one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(spans))
    for one in kept:
        heaps.give(one)
    assert len([place(heaps, 1024) for _ in range(30)]) == 30
    assert heaps.take((1024,), np.dtype("float32"), buffers=2) is None


def extent(place: ServedPlace) -> tuple[int, int]:
    """The bytes of a heap in which something of a variable lies."""
    ends = [begin + place.bytes for begin in place.buffers]
    return place.header, max(*ends, place.versions + 8 * block_count(place) if place.block_rows else 0)


@pytest.mark.parametrize("block_rows", [1, 2, 64])
def test_tables_of_any_number_of_rows_lie_beside_each_other(block_rows: int) -> None:
    """Each block of rows has its version behind the rows, also the last one, which may be smaller."""
    heaps, width = make(heap_bytes=1 << 22), 4096 // 4 // block_rows
    places = [
        heaps.take((rows, width), np.dtype("float32"), buffers=1, server=3, is_table=True)
        for rows in (*range(7 * block_rows, 9 * block_rows + 2, max(1, block_rows // 2)), 1, 3)
    ]
    found = [place for place in places if place is not None]
    assert len(found) == len(places)
    assert {place.block_rows for place in found} == {block_rows}
    for one, other in itertools.pairwise(sorted(map(extent, found))):
        assert one[1] <= other[0]


@pytest.mark.parametrize(("buffers", "is_table"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (16, 4), (17, 4), (4097, 4)])
def test_all_of_a_variable_is_given_back(shape: tuple[int, ...], buffers: int, is_table: bool) -> None:
    heaps = make()
    before = heaps._spaces[3].free_bytes
    for _ in range(3):
        taken = heaps.take(shape, np.dtype("float32"), buffers=buffers, server=3, is_table=is_table)
        assert taken is not None
        assert extent(taken)[1] <= 1 << 20
        heaps.give(taken)
        assert heaps._spaces[3].free_bytes == before


def test_what_was_dropped_does_not_count_for_the_next_variable() -> None:
    heaps = make()
    first, *_ = (place(heaps, length) for length in (1000, 100, 10))
    heaps.give(first)
    # The first server has nothing again.
    assert servers_of(heaps, 5, 20, 10) == [0, 2, 0]


def test_the_error_has_the_formula() -> None:
    heaps = make()
    error = heaps.full((1000, 1000), np.dtype("float32"), "table", buffers=2)
    text = (
        r"variable 'table' of shape \(1000, 1000\) and dtype float32 takes 8000064 bytes of a server's heap \(2 "
        r"buffers\), and the servers have free: server 3 1032192, server 4 1032192, server 5 1032192\. .*16384 bytes "
        r"of slots for pushes: 2 x 2 \(chief and workers\) x slot_bytes=4096"
    )
    with pytest.raises(MemoryError, match=text):
        raise error


def test_neighbours_are_joined() -> None:
    space = Space(0, 640)
    pieces = [space.take(100) for _ in range(5)]
    assert (pieces, space.take(1)) == ([0, 128, 256, 384, 512], None)
    for begin in (128, 384, 256):
        space.give(begin, 100)
    assert space.take(384) == 128
    assert space.free_bytes == 0
