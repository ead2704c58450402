"""Where pages end, where calls of the system do a part only, and what comes a second time or lasts."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mpidist.checkpoint import following
from mpidist.checkpoint.directory import lock as lock_module
from mpidist.checkpoint.directory.lock import DirectoryLock
from mpidist.checkpoint.directory.state import LOCK_FILE, DirectoryWork, candidates
from mpidist.checkpoint.file import hdf5, layout, positional
from mpidist.checkpoint.file.layout import PAGE_BYTES, Record
from mpidist.checkpoint.file.positional import read_at, write_at
from mpidist.checkpoint.file.saved import SavedFile
from mpidist.checkpoint.transfer import Checksums, OwnPart, publish, verify, write_pieces
from mpidist.comm.group.solo import SoloCommunicator
from tests.helpers.clocks import SetClock


@pytest.mark.parametrize("calls", [1, 2, 3, 8, 100])
def test_bytes_are_moved_whole_in_any_number_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    data = bytes(range(100))
    monkeypatch.setattr(positional, "_CALL_BYTES", -(-len(data) // calls))
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        write_at(descriptor, b"before" + b"?" * 100 + b"after", 0)
        write_at(descriptor, data, 6)
        assert read_at(descriptor, 100, 6) == data
        assert (tmp_path / "file").read_bytes() == b"before" + data + b"after"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("order", [*itertools.permutations((PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1))])
def test_no_page_of_an_array_that_any_rank_writes_holds_another_array(tmp_path: Path, order: tuple[int, ...]) -> None:
    """From one page on: ranks write their shares at the same time, and a file system moves whole pages."""
    sizes = (1, *order, 3, PAGE_BYTES)
    records = [Record(f"a{number}", (size,), np.dtype("u1")) for number, size in enumerate(sizes)]
    blank = hdf5.create(str(tmp_path / "file"), records, {})
    pages = [
        range(offset // PAGE_BYTES, -(-(offset + size) // PAGE_BYTES))
        for offset, size in zip(blank.offsets, sizes, strict=True)
    ]
    for (size, mine), (_, others) in itertools.permutations(zip(sizes, pages, strict=True), 2):
        assert size < PAGE_BYTES or not set(mine) & set(others)


@pytest.mark.parametrize("edges", [(5000, 9000), (100, 20_000), (0, 29_999), (8192, 8193), (30_000, 30_000)])
def test_parts_that_end_within_pages_and_pieces_make_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: tuple[int, int]
) -> None:
    """A page is written by the rank that has its first byte, and a piece has one checksum, of all its parts."""
    monkeypatch.setattr(layout, "PIECE_BYTES", 2 * PAGE_BYTES)
    size, bounds = 30_000, (0, *edges, 30_000)
    content = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    record = Record("a", (size,), content.dtype)
    blank = hdf5.create(str(tmp_path / "new"), [record], {})
    parts = [OwnPart(record, bounds, rank) for rank in range(3)]
    everyone: list[Checksums] = [{}, {}, {}]
    descriptor = os.open(blank.path, os.O_RDWR)
    for rank, (own, checksums) in enumerate(zip(parts, everyone, strict=True)):
        (pieces,) = layout.deal([record], rank, 3, [bounds])
        write_pieces(descriptor, blank.offsets[0], record, content, pieces, own, checksums)
    for own in parts:
        write_at(descriptor, own.following([one.head for one in parts]), blank.offsets[0] + own.end)
    assert read_at(descriptor, size, blank.offsets[0]) == content.tobytes()
    os.close(descriptor)
    publish(blank, everyone, str(tmp_path / "whole"), DirectoryWork())
    file = SavedFile(hdf5.read_contents(str(tmp_path / "whole")))
    verify(SoloCommunicator(), file, ["a"])


@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 0, 1), (0, 3, 3, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("edges", [(5000, 9000, 9001), (100, 200, 20_000), (0, 8192, 16_384), (30_000, 30_000, 30_000)])
def test_ranks_have_parts_in_any_order_and_several_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owners: tuple[int, ...], edges: tuple[int, ...]
) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", 2 * PAGE_BYTES)
    size, bounds = 30_000, (0, *edges, 30_000)
    content = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    record = Record("a", (size,), content.dtype)
    blank = hdf5.create(str(tmp_path / "new"), [record], {})
    parts = [OwnPart(record, bounds, part) for part in range(4)]
    everyone: list[Checksums] = [{}, {}, {}, {}]
    descriptor = os.open(blank.path, os.O_RDWR)
    for rank, checksums in enumerate(everyone):
        (pieces,) = layout.deal([record], rank, 4, [bounds], [owners])
        own = [parts[part] for part in layout.parts_of(owners, rank)]
        assert sum(stop - start for _, start, stop in pieces) == sum(part.end - part.begin for part in own)
        for part in own:
            write_pieces(descriptor, blank.offsets[0], record, content, pieces, part, checksums)
    for part in parts:
        write_at(descriptor, part.following([one.head for one in parts]), blank.offsets[0] + part.end)
    assert read_at(descriptor, size, blank.offsets[0]) == content.tobytes()
    os.close(descriptor)
    publish(blank, everyone, str(tmp_path / "whole"), DirectoryWork())
    verify(SoloCommunicator(), SavedFile(hdf5.read_contents(str(tmp_path / "whole"))), ["a"])


def test_two_locks_of_a_process_hold_a_directory_until_both_are_released(tmp_path: Path) -> None:
    first, second = DirectoryLock(str(tmp_path)), DirectoryLock(str(tmp_path))
    first.acquire()
    second.acquire()
    first.release()
    first.release()
    assert (tmp_path / LOCK_FILE).exists()
    second.acquire()
    second.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_lock_is_touched_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host takes a holder for dead that touches it no more."""
    touched = threading.Semaphore(0)
    touch = os.utime

    def note(path: str) -> None:
        touch(path)
        touched.release()

    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(os, "utime", note)
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    for _ in range(5):
        assert touched.acquire(timeout=30)
    lock.release()


def test_of_checkpoints_of_one_time_the_largest_number_is_the_latest(tmp_path: Path) -> None:
    """As in a copy of a directory: the names are all that tells their order."""
    names = [f"ckpt-{number}.h5" for number in (8, 9, 10, 99, 100)]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9, 1e9))
    assert candidates(str(tmp_path), None) == names[::-1]
    os.utime(tmp_path / names[1], (2e9, 2e9))
    assert candidates(str(tmp_path), None)[0] == names[1], "times that differ go first"


def test_each_timeout_of_those_who_follow_is_as_long_as_the_first(tmp_path: Path) -> None:
    clock, asked = SetClock(0.0), [0.0]

    def is_done() -> bool:
        asked.append(clock.now)
        return len(asked) == 5

    assert list(following.follow(str(tmp_path), 0.0, 30.0, is_done, clock, clock.forward)) == []
    assert all(second - first >= 30 for first, second in itertools.pairwise(asked))
