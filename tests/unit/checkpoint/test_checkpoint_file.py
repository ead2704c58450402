"""Files that are not what they should be, and directories that cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.file.layout import PIECE_BYTES
from mpidist.checkpoint.manager import latest_checkpoint
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import make_arena

ROOT = Path(__file__).resolve().parents[3]
ARENA = make_arena(SoloCommunicator())
SIZE = 3 * PIECE_BYTES // 8 + 5


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return Checkpoint(a=variable(1.0), v=variable(np.arange(SIZE, dtype="f8"))).save(tmp_path / "ckpt")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def require_error(path: str, text: str) -> None:
    fresh = {"a": variable(0.0), "v": variable(np.zeros(SIZE))}
    with pytest.raises(CheckpointError, match=text) as caught:
        Checkpoint(**fresh).restore(path)
    assert path in str(caught.value)
    assert not fresh["a"].numpy().any()
    assert not fresh["v"].numpy().any()


@pytest.mark.parametrize("kept", [0, 7, 100, 2000, 0.5, -1])
def test_a_truncated_file_is_an_error(saved: str, kept: float) -> None:
    size = os.path.getsize(saved)
    os.truncate(saved, int(size * kept) if kept == 0.5 else int(kept) % size)
    require_error(saved, "truncated, damaged or no HDF5 file|is not a complete checkpoint")


def test_garbage_is_an_error(saved: str) -> None:
    Path(saved).write_bytes(os.urandom(5000))
    require_error(saved, "no HDF5 file")


def test_another_hdf5_file_is_an_error(saved: str) -> None:
    with h5py.File(saved, "w") as file:
        file["a"] = 1.0
    require_error(saved, "not written by mpidist")


@pytest.mark.parametrize("piece", [0, 2, 3])
def test_one_flipped_bit_is_an_error_that_names_the_array(saved: str, piece: int) -> None:
    with h5py.File(saved) as file:
        offset = file["v"].id.get_offset()
    flip(saved, offset + min(piece * PIECE_BYTES + 11, SIZE * 8 - 1))
    require_error(saved, rf"bytes \[{piece * PIECE_BYTES}, \d+\) of 'v'")


@pytest.mark.parametrize("name", [hdf5.INDEX, hdf5.CHECKSUMS, hdf5.COMPLETE])
def test_one_flipped_bit_in_the_own_datasets_is_an_error(saved: str, name: str) -> None:
    with h5py.File(saved) as file:
        offset = file[name].id.get_offset()
    flip(saved, offset + 5)
    require_error(saved, "checksum")


def test_flipped_bits_anywhere_in_the_structure_never_give_other_values(saved: str) -> None:
    """Whatever byte of HDF5's own structure is hit, the values are right or there is an error."""
    content = Path(saved).read_bytes()
    with h5py.File(saved) as file:
        used = [file[n].id for n in ("a", "v", "save_counter", hdf5.INDEX, hdf5.CHECKSUMS, hdf5.COMPLETE)]
        spans = [(d.get_offset(), d.get_offset() + d.get_storage_size()) for d in used]
    structure = [at for at in range(len(content)) if not any(start <= at < stop for start, stop in spans)]
    structure = [at for at in structure if content[at]]
    assert len(structure) > 300
    for at in structure[::29]:
        Path(saved).write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        a, v = variable(0.0), variable(np.zeros(SIZE))
        try:
            Checkpoint(a=a, v=v).restore(saved).assert_consumed()
        except CheckpointError:
            continue
        assert a.numpy() == 1.0
        assert np.array_equal(v.numpy(), np.arange(SIZE))


@pytest.mark.usefixtures("saved")
def test_a_missing_file_names_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ckpt-9\.h5'; the directory has ckpt-1\.h5"):
        Checkpoint(a=variable(0.0)).restore(tmp_path / "ckpt-9")
    with pytest.raises(FileNotFoundError, match="its directory does not exist"):
        Checkpoint(a=variable(0.0)).restore(tmp_path / "other" / "ckpt-9")


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_goes_while_it_is_opened_is_not_called_damaged(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other = Checkpoint(b=variable(1.0)).write(tmp_path / "other")
    open_file = h5py.File

    def lose(*arguments: Any, **options: Any) -> Any:
        if how == "deleted":
            os.unlink(saved)
        else:
            os.replace(other, saved)
        return open_file(*arguments, **options)

    monkeypatch.setattr(h5py, "File", lose)
    with pytest.raises(FileNotFoundError, match=r"deleted or replaced|no checkpoint"):
        Checkpoint(a=variable(1.0)).restore(saved)


def test_a_repacked_file_is_an_error(saved: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.h5")
    with h5py.File(saved) as source, h5py.File(other, "w") as target:
        for name in ("a", "save_counter", "_mpidist"):
            source.copy(name, target)
        target.create_dataset("v", data=source["v"][:], chunks=True, compression="gzip")
    require_error(other, "'v' is not contiguous")


def test_a_copied_file_is_read_at_its_new_offsets(saved: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.h5")
    with h5py.File(saved) as source, h5py.File(other, "w") as target:
        target["more"] = np.arange(1000)
        for name in ("v", "a", "save_counter", "_mpidist"):
            source.copy(name, target)
    fresh = variable(np.zeros(SIZE))
    Checkpoint(a=variable(0.0), v=fresh).restore(other).assert_consumed()
    assert fresh[-1] == SIZE - 1


def test_a_full_disk_leaves_everything_as_it_was(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {name: Path(tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    checkpoint = Checkpoint(a=variable(2.0), v=variable(np.zeros(SIZE)))
    checkpoint.restore(saved)
    for call in ("posix_fallocate", "pwrite", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError, match="No space left") as caught:
                checkpoint.save(tmp_path / "ckpt")
            assert caught.value.errno == errno.ENOSPC
        assert {name: Path(tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
        assert checkpoint.save_counter == 1
    assert checkpoint.save(tmp_path / "ckpt").endswith("ckpt-2.h5")


def test_a_limit_of_the_system_is_met_before_anything_is_written(tmp_path: Path) -> None:
    code = f"""
import resource, numpy as np
from tests.unit.checkpoint.test_checkpoint_file import Checkpoint, variable, SIZE
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    Checkpoint(v=variable(np.zeros(SIZE))).save({str(tmp_path / "ckpt")!r})
except OSError as error:
    print(error.errno)
"""
    result = run(code)
    assert result.stdout.strip() == str(errno.EFBIG), result.stderr
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file"):
        Checkpoint(a=variable(1.0)).save(tmp_path / "file" / "sub" / "ckpt")


def test_a_state_file_that_cannot_be_written_keeps_the_latest(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(a=variable(2.0))
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if target.endswith("checkpoint"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path / "new")
    assert latest_checkpoint(tmp_path) == saved
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    # A save that failed is not counted: the next one takes its number, and its file's place.
    assert checkpoint.save_counter == 0
    assert checkpoint.save(tmp_path / "new") == str(tmp_path / "new-1.h5") == latest_checkpoint(tmp_path)


KILLED = """
import os, signal, sys
import numpy as np
from mpidist.checkpoint import transfer
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.manager import CheckpointManager
from tests.unit.checkpoint.test_checkpoint_file import Checkpoint, variable, SIZE

directory, moment = sys.argv[1:]
v = variable(np.full(SIZE, 1.0))
manager = CheckpointManager(Checkpoint(v=v), directory, 1)
manager.save()
v.assign(np.full(SIZE, 2.0))
module, name = moment.rsplit(".", 1)
module = {"hdf5": hdf5, "transfer": transfer, "os": os}[module]
original, calls = getattr(module, name), []
def kill(*arguments, **options):
    calls.append(arguments)
    if name != "write_at" or len(calls) > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
setattr(module, name, kill)
manager.save()
"""


@pytest.mark.parametrize(
    "moment", ["os.posix_fallocate", "transfer.write_at", "hdf5.complete", "os.replace", "os.unlink"]
)
def test_a_kill_leaves_the_previous_checkpoint(tmp_path: Path, moment: str) -> None:
    result = run(KILLED, str(tmp_path), moment)
    assert result.returncode == -signal.SIGKILL, result.stderr
    latest = latest_checkpoint(tmp_path)
    fresh = variable(np.zeros(SIZE))
    Checkpoint(v=fresh).restore(latest).assert_consumed()
    # os.unlink comes when the second is whole and named, and the first is to be deleted.
    assert (fresh.numpy() == (2.0 if moment == "os.unlink" else 1.0)).all()
    assert os.path.basename(str(latest)) == ("ckpt-2.h5" if moment == "os.unlink" else "ckpt-1.h5")


def test_h5py_reads_a_checkpoint_while_it_is_copied_away(saved: str, tmp_path: Path) -> None:
    shutil.copy(saved, tmp_path / "copy.h5")
    with h5py.File(tmp_path / "copy.h5") as file:
        assert file["v"].shape == (SIZE,)


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
