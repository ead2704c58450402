"""Names of datasets and who handles which bytes."""

from __future__ import annotations

import string
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.checkpoint.file import layout
from mpidist.checkpoint.file.checksum import joined_checksum
from mpidist.checkpoint.file.layout import PAGE_BYTES, PIECE_BYTES, Record

AWKWARD = st.text(st.sampled_from("%/.\0_é\ud800aF2" + string.digits), max_size=8)
PARTS = st.one_of(st.text(max_size=8), AWKWARD, st.sampled_from(["", ".", "..", "_mpidist", "%5Fmpidist", "%"]))


@given(PARTS)
def test_escape_is_reversible_and_gives_what_hdf5_takes(part: str) -> None:
    name = layout.escape(part)
    assert layout.unescape(name) == part
    assert name
    assert "/" not in name
    assert "\0" not in name
    assert not name.startswith(".")
    assert name != layout.OWN_GROUP
    name.encode()


@given(st.lists(PARTS, min_size=1, max_size=5))
def test_join_is_reversible(parts: list[str]) -> None:
    assert layout.split(layout.join(parts)) == tuple(parts)


def test_escape_leaves_common_names_alone() -> None:
    for name in ("kernel", "layer1.0.weight", "größe", "a b", "x-1", "0"):
        assert layout.escape(name) == name
    assert layout.join(["model", "layers", 0, "a/b"]) == "model/layers/0/a%2Fb"
    assert layout.escape(".x") == "%2Ex"


@given(
    sizes=st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 9 * PIECE_BYTES)), max_size=6),
    ranks=st.integers(1, 7),
)
def test_share_gives_each_byte_to_one_rank(sizes: list[int], ranks: int) -> None:
    for number, size in enumerate(sizes):
        record = Record("x", (size,), np.dtype("u1"))
        dealt = [piece for rank in range(ranks) for piece in layout.share(record, number, rank, ranks)]
        assert sorted(dealt) == list(range(record.piece_count))
        edges = [record.piece(piece) for piece in range(record.piece_count)]
        assert sum(stop - start for start, stop in edges) == size
        assert all(start % PAGE_BYTES == 0 for start, _ in edges)


def test_share_deals_small_arrays_in_turn_and_tiny_ones_to_rank_0() -> None:
    small = Record("x", (PAGE_BYTES,), np.dtype("u1"))
    owners = [[rank for rank in range(3) if layout.share(small, number, rank, 3)] for number in range(6)]
    assert sorted(owner for (owner,) in owners) == [0, 0, 1, 1, 2, 2]
    tiny = Record("x", (), np.dtype("f8"))
    assert [len(layout.share(tiny, 5, rank, 3)) for rank in range(3)] == [1, 0, 0]


def test_share_of_a_large_array_is_even() -> None:
    large = Record("x", (10 * PIECE_BYTES,), np.dtype("u1"))
    assert sorted(len(layout.share(large, 1, rank, 4)) for rank in range(4)) == [2, 2, 3, 3]


@given(
    sizes=st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 5 * PIECE_BYTES)), max_size=5),
    replicas=st.integers(0, 3),
    ranks=st.integers(1, 4),
)
def test_deal_gives_each_checksum_to_one_rank(sizes: list[int], replicas: int, ranks: int) -> None:
    shapes = [(replicas, size) if replicas else (size,) for size in sizes]
    records = [Record("x", shape, np.dtype("u1"), replicas) for shape in shapes]
    dealt = [layout.deal(records, rank, ranks) for rank in range(ranks)]
    pieces = sorted(piece for one in dealt for of_record in one for piece in of_record)
    assert [piece.number for piece in pieces] == list(range(sum(record.piece_count for record in records)))
    for number, record in enumerate(records):
        edges = sorted((piece.start, piece.stop) for one in dealt for piece in one[number])
        assert edges == [record.piece(piece) for piece in range(record.piece_count)]
        if replicas == ranks:
            # With a component for each rank, a rank has the pieces of its own.
            size = record.component_bytes
            assert all(
                rank * size <= piece.start and piece.stop <= (rank + 1) * size
                for rank, one in enumerate(dealt) for piece in one[number]
            )


def test_index_is_reversible() -> None:
    kinds = {"a/ü": ((2, 3), "<f4"), "s": ((), "S5"), "b": ((0,), "?")}
    records = [Record(path, shape, np.dtype(kind)) for path, (shape, kind) in kinds.items()]
    assert layout.decode_index(layout.encode_index(records, {"z": "a"})) == (records, {"z": "a"}, layout.FORMAT)


@pytest.mark.parametrize(
    ("path", "stored"),
    [("a/x", "a/x"), ("z/x", "a/x"), ("a/self/self/x", "a/x"), ("z/self/x", "a/x"), ("zz/x", "zz/x")],
)
def test_resolve_follows_shared_objects_also_in_circles(path: str, stored: str) -> None:
    assert layout.resolve(path, {"z": "a", "a/self": "a"}) == stored


@given(
    shape=st.one_of(st.tuples(st.integers(0, 3 * PAGE_BYTES)), st.tuples(st.integers(0, 3 * PIECE_BYTES))),
    replicas=st.integers(1, 7),
)
def test_components_share_no_page_and_no_piece(shape: tuple[int, ...], replicas: int) -> None:
    record = Record("x", (replicas, *shape), np.dtype("u1"), replicas)
    bounds = tuple(range(0, record.nbytes + 1, record.component_bytes)) if record.nbytes else (0,) * (replicas + 1)
    parts = [layout.page_share(bounds, rank) for rank in range(replicas)]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == record.nbytes
    size = record.component_bytes
    assert all(start % PAGE_BYTES == 0 or start == stop for start, stop in parts)
    # A rank that writes anything begins in its own component and ends less than a page behind it.
    assert all(
        rank * size <= start < (rank + 1) * size and stop - (rank + 1) * size < PAGE_BYTES
        for rank, (start, stop) in enumerate(parts) if start < stop
    )
    edges = [record.piece(piece) for piece in range(record.piece_count)]
    assert sum(stop - start for start, stop in edges) == record.nbytes
    assert all(start // size == (stop - 1) // size for start, stop in edges)
    assert record.piece_count == replicas * record.component_pieces


@given(
    cuts=st.lists(st.integers(0, 3 * PIECE_BYTES), min_size=1, max_size=6).map(sorted),
    ranks_last=st.integers(0, PIECE_BYTES),
)
def test_parts_share_no_page_and_join_their_checksums(cuts: list[int], ranks_last: int) -> None:
    bounds = (0, *cuts, cuts[-1] + ranks_last)
    ranks = len(bounds) - 1
    records = [Record("before", (2, 700), np.dtype("f8")), Record("x", (bounds[-1],), np.dtype("u1"))]
    data = np.random.default_rng(bounds[-1]).bytes(bounds[-1])
    shares = [layout.page_share(bounds, rank) for rank in range(ranks)]
    assert [start for start, _ in shares] == [0, *(stop for _, stop in shares[:-1])]
    assert shares[-1][1] == len(data)
    assert all(start % PAGE_BYTES == 0 or start == stop for start, stop in shares)
    checksums: dict[int, int] = {}
    for rank in range(ranks):
        pieces = layout.deal(records, rank, ranks, [None, bounds])[1]
        # Its own bytes, all of them, and no others.
        assert [start for _, start, _ in pieces] + [bounds[rank + 1]] == [bounds[rank], *(stop for *_, stop in pieces)]
        for number, start, stop in pieces:
            own = zlib.crc32(data[start:stop])
            before = checksums.get(number)
            checksums[number] = own if before is None else joined_checksum(before, own, stop - start)
    expected = [zlib.crc32(data[start : start + PIECE_BYTES]) for start in range(0, len(data), PIECE_BYTES)]
    assert [checksums[1 + number] for number in range(len(expected))] == expected


@pytest.mark.parametrize("bounds", [(0, 0, 0, 100), (0, 10, 20, PAGE_BYTES - 1), (0, 0, 0, 0)])
def test_rank_0_writes_small_datasets_whoever_has_them(bounds: tuple[int, ...]) -> None:
    # Several of them lie in one page.
    sizes = [stop - start for start, stop in (layout.page_share(bounds, rank) for rank in range(3))]
    assert sizes == [bounds[-1], 0, 0]


def test_index_says_what_is_of_replicas() -> None:
    records = [Record("a", (3, 2), np.dtype("f8"), 3), Record("b", (3, 2), np.dtype("f8"))]
    text = layout.encode_index(records, {})
    assert text.count(b"replicas") == 1
    assert layout.decode_index(text)[0] == records
