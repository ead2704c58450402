"""Checkpoints beyond 2 GiB: one variable of more elements than an int32 counts, and a file of 20 GB without blocks."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.state import DirectoryWork
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.file.layout import PIECE_BYTES, Record
from mpidist.checkpoint.transfer import publish
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())


def bytes_read() -> int:
    """The bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.long
@pytest.mark.timeout_seconds(280)
def test_a_variable_of_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    """It takes 2 GiB of memory twice, and 2 GiB of the disk."""
    size = 2**31 + 5
    marks = [0, 1, 2**31 - 1, 2**31, size - 1]
    value = np.zeros(size, np.int8)
    value[marks] = range(1, 6)
    variable = create_variable(ARENA, value)
    del value
    checkpoint = Checkpoint(v=variable)
    path = checkpoint.write(tmp_path / "c")
    assert mpidist.list_variables(path) == [("v", [size])]
    variable.assign(np.zeros(size, np.int8))
    checkpoint.read(path).assert_consumed()
    assert variable.value()[marks].tolist() == [1, 2, 3, 4, 5]
    assert np.count_nonzero(variable.value()) == 5
    os.unlink(path)


@pytest.mark.long
@pytest.mark.timeout_seconds(280)
def test_a_checkpoint_of_20_gb_is_looked_at_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no blocks on the disk; its bytes are zeros, and so are those of its checksums."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    records = [Record(f"model/{number}", (5, 2**26), np.dtype("<f4")) for number in range(16)]
    path = str(tmp_path / "c.h5")
    blank = hdf5.create(path + ".tmp", records, {})
    whole = zlib.crc32(bytes(PIECE_BYTES)), PIECE_BYTES
    count = sum(record.piece_count for record in records)
    publish(blank, [{(number, 0): whole for number in range(count)}], path, DirectoryWork())
    assert os.path.getsize(path) > 20e9
    assert os.stat(path).st_blocks * 512 < 10e6
    before = bytes_read()
    reader = mpidist.load_checkpoint(path)
    shapes: Any = reader.get_variable_to_shape_map()
    assert bytes_read() - before < 1e6
    assert list(shapes.values()) == [[5, 2**26]] * 16
    last = reader.arrays["model/9"]
    assert not last.read(last.size - 1000, last.size).any()
    assert reader.verify() == 16 * 5 * 2**28
    with open(path, "r+b") as file:
        file.seek(-PIECE_BYTES, os.SEEK_END)
        file.write(b"1")
    with pytest.raises(mpidist.errors.DamagedCheckpointError, match="model/15"):
        reader.verify()
