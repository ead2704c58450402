"""Reading and checking in one pass: what is damaged never gets into a variable, and what that leaves."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.state import DirectoryWork
from mpidist.checkpoint.file import checked, hdf5, layout
from mpidist.checkpoint.file.checksum import crc32
from mpidist.checkpoint.file.datasets import Datasets
from mpidist.checkpoint.file.layout import PIECE_BYTES, Record, deal
from mpidist.checkpoint.file.saved import SavedFile
from mpidist.checkpoint.transfer import Checksums, publish, write_pieces
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, DamagedCheckpointError
from mpidist.variables.making.creation import create_variable
from mpidist.variables.reading import BLOCK_BYTES, block_range
from mpidist.variables.variable import BaseVariable
from tests.helpers.amounts import amount
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())
SIZE = 3 * PIECE_BYTES // 8 + 5


def variable(value: object) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


def flip(path: str, name: str, byte: int) -> None:
    with h5py.File(path) as file:
        place = file[name].id.get_offset() + byte
    with open(path, "r+b") as raw:
        raw.seek(place)
        (old,) = raw.read(1)
        raw.seek(place)
        raw.write(bytes([old ^ 1]))


def test_a_damaged_block_of_a_large_file_never_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks before it may have: then nothing is saved until a restore has succeeded."""
    monkeypatch.setattr(checked, "HELD_BYTES", 1 << 16)
    v = variable(np.arange(SIZE, dtype="f8"))
    checkpoint = Checkpoint(v=v)
    good, bad = checkpoint.write(tmp_path / "good"), checkpoint.write(tmp_path / "bad")
    flip(bad, "v", PIECE_BYTES + 11)
    v.assign(np.full(SIZE, -1.0))
    with pytest.raises(DamagedCheckpointError, match=rf"bytes \[{PIECE_BYTES}, {2 * PIECE_BYTES}\) of 'v'"):
        checkpoint.read(bad)
    block = PIECE_BYTES // 8
    np.testing.assert_array_equal(v.numpy()[:block], np.arange(block))
    np.testing.assert_array_equal(v.numpy()[block:], -1.0)
    with pytest.raises(CheckpointError, match="failed half-way"):
        checkpoint.write(tmp_path / "later")
    checkpoint.read(good).assert_consumed()
    np.testing.assert_array_equal(v.numpy(), np.arange(SIZE))
    checkpoint.write(tmp_path / "later")


@pytest.mark.parametrize("limit", [1 << 16, 1 << 25])
def test_what_is_small_is_checked_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(checked, "HELD_BYTES", limit)
    v, z = variable(np.arange(SIZE, dtype="f8")), variable(np.ones(3))
    checkpoint = Checkpoint(v=v, z=z)
    path = checkpoint.write(tmp_path / "c")
    flip(path, "z", 3)
    v.assign(np.zeros(SIZE))
    with pytest.raises(DamagedCheckpointError, match="of 'z'"):
        checkpoint.read(path)
    assert not v.numpy().any()
    assert checkpoint.pending is None


def test_a_file_of_many_blocks_takes_the_memory_of_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "HELD_BYTES", 1 << 16)
    v = variable(np.arange(SIZE, dtype="f8"))
    file = SavedFile(hdf5.read_contents(Checkpoint(v=v, z=variable(np.ones(3))).write(tmp_path / "c")))
    file.hold(["v", "z"])
    assert file.opened._held
    largest = max(file.arrays["v"].read(start, start + 1000).nbytes for start in range(0, SIZE - 1000, 7777))
    held = len(file.opened._held) + (0 if file.opened._last is None else len(file.opened._last[1]))
    assert largest == 8000
    assert held <= PIECE_BYTES + (1 << 16)
    file.release()
    assert not file.opened._held
    assert file.opened._last is None


def test_places_count_only_while_the_structure_is_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5, "LEAST_DATASETS", 2)
    looked_up: list[str] = []
    place_of = Datasets.place_of

    def look_up(self: Datasets, record: Record) -> int:
        looked_up.append(record.path)
        return place_of(self, record)

    monkeypatch.setattr(Datasets, "place_of", look_up)
    path = Checkpoint(a=variable(np.arange(9.0)), b=variable(np.zeros(9000))).write(tmp_path / "c")
    first = hdf5.read_contents(path)
    assert looked_up == []
    with h5py.File(path, "r+") as file:
        file["a"].attrs["note"] = 1
    assert hdf5.read_contents(path).offsets == first.offsets
    assert looked_up == ["a", "b"]
    looked_up.clear()
    with h5py.File(path, "r+") as file:
        del file["_mpidist/places"]
    assert hdf5.read_contents(path).checksums == first.checksums
    assert looked_up == ["a", "b"]


@settings(max_examples=amount(30, 1000), deadline=None)
@given(st.data())
def test_any_range_of_any_array_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With components and without, whatever is held in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PIECE_BYTES", 4096)
        patch.setattr(checked, "HELD_BYTES", data.draw(st.sampled_from([0, 5000, 1 << 25])))
        path = str(tmp_path_factory.mktemp("c") / "c")
        shapes = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3000)), min_size=1, max_size=4))
        dtypes = [np.dtype(data.draw(st.sampled_from(["u1", "<f4", "<c16"]))) for _ in shapes]
        records = [
            Record(f"a{n}", (replicas, size) if replicas else (size,), dtype, replicas)
            for n, ((replicas, size), dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        arrays = [np.random.default_rng(1).integers(0, 99, record.shape).astype(record.dtype) for record in records]
        blank, sums = hdf5.create(path + ".new", records, {}), Checksums()
        descriptor = os.open(blank.path, os.O_RDWR)
        for record, array, offset, pieces in zip(records, arrays, blank.offsets, deal(records, 0, 1), strict=True):
            write_pieces(descriptor, offset, record, array.reshape(-1), pieces, None, sums)
        os.close(descriptor)
        publish(blank, [sums], path, DirectoryWork())
        file = SavedFile(hdf5.read_contents(path))
        if data.draw(st.booleans()):
            file.hold([record.path for record in records])
        for record, array in zip(records, arrays, strict=True):
            for _ in range(3):
                start = data.draw(st.integers(0, record.size))
                stop = data.draw(st.integers(start, record.size))
                np.testing.assert_array_equal(
                    file.arrays[record.path].read(start, stop), array.reshape(-1)[start:stop]
                )


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_every_library_gives_zlibs_checksum(data: bytes, value: int) -> None:
    assert crc32(data, value) == zlib.crc32(data, value)
    assert crc32(memoryview(bytearray(data))) == zlib.crc32(data)


def test_a_block_of_a_load_is_a_piece_of_a_file() -> None:
    """Otherwise pieces would be read twice."""
    assert BLOCK_BYTES == PIECE_BYTES


@given(st.one_of(st.integers(0, 10**7), st.integers(0, 10**4)), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5))
def test_ranks_have_whole_blocks_and_together_everything(size: int, itemsize: int, parts: int) -> None:
    ranges = [block_range(size, itemsize, part, parts) for part in range(parts)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == size
    if size * itemsize > BLOCK_BYTES:
        assert all(start * itemsize % BLOCK_BYTES == 0 or start == size for start, _ in ranges)
    elif size * itemsize >= 4096:
        assert max(stop - start for start, stop in ranges) <= -(-size // parts)
    else:
        assert (0, size) in ranges
