"""Forged files: whatever a file says, reading it is a CheckpointError or gives what was saved."""

from __future__ import annotations

import json
import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file.hdf5 import CHECKSUMS, COMPLETE, INDEX
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, DamagedCheckpointError
from mpidist.optimizers.families.adam import Adam
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


class Program:
    """A variable that two names lead to, an optimizer and a random generator."""

    def __init__(self, value: float) -> None:
        self.v = variable(np.full(4, value))
        self.adam = Adam(0.1)
        self.adam.apply_gradients([(np.ones(4), self.v)])
        model = SimpleNamespace(v=self.v)
        self.checkpoint = Checkpoint(m=model, other=model, adam=self.adam, rng=np.random.default_rng(1))


def save(folder: Path) -> Path:
    return Path(Program(2.0).checkpoint.save(folder / "c"))


def replaced(name: str, value: Any, **options: Any) -> Callable[[h5py.File, Any], None]:
    """A dataset, or a group, that has become another dataset; the index agrees with it."""

    def change(file: h5py.File, index: Any) -> None:
        if name in file:
            del file[name]
        dataset = file.create_dataset(name, data=value, **options)
        index["arrays"] = [a for a in index["arrays"] if not f"{a['path']}/".startswith(f"{name}/")]
        if not name.startswith("_mpidist"):
            dtype = dataset.dtype.str
            index["arrays"].append({"path": name, "shape": list(dataset.shape), "dtype": dtype})

    return change


def forge(path: Path, change: Callable[[h5py.File, Any], object], *, seals: bool = True) -> None:
    """Change datasets and the index, and then make all checksums right."""
    with h5py.File(path, "r+") as file:
        index = json.loads(bytes(file[INDEX][()]))
        change(file, index)
        if seals:
            seal(file, index)


def seal(file: h5py.File, index: Any) -> None:
    content = [zlib.crc32(file[array["path"]][()].tobytes()) for array in index["arrays"] if file[array["path"]].size]
    seal_index(file, index, np.array(content, "<u4"))


def seal_index(file: h5py.File, index: Any, checksums: Any) -> None:
    text = json.dumps(index).encode()
    for name in (INDEX, CHECKSUMS, COMPLETE):
        del file[name]
    file[INDEX] = np.array(text, f"S{len(text)}")
    file[CHECKSUMS] = checksums
    file[COMPLETE] = np.array([1, zlib.crc32(checksums.tobytes(), zlib.crc32(text))], "<u4")


def require_error(path: Path, text: str, kind: type[Exception] = CheckpointError) -> None:
    program = Program(3.0)
    before = program.v.numpy()
    with pytest.raises(kind, match=text) as caught:
        program.checkpoint.restore(path)
    assert path.name in str(caught.value)
    np.testing.assert_array_equal(program.v.numpy(), before)


@pytest.mark.timeout_seconds(30)
@pytest.mark.parametrize("name", ["m/v", "m", INDEX, CHECKSUMS, COMPLETE, "_mpidist"])
def test_no_link_is_followed_out_of_the_file(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    os.mkfifo(tmp_path / "pipe.h5")

    def lead_out(file: h5py.File, _: Any) -> None:
        del file[name]
        file[name] = h5py.ExternalLink(str(tmp_path / "pipe.h5"), "/x")

    forge(path, lead_out, seals=False)
    require_error(path, "is a link to another place|not written by mpidist", DamagedCheckpointError)


def test_soft_links_virtual_and_external_datasets_are_errors(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(np.full(4, 9.0).tobytes())
    for number, text in enumerate(("is a link to another place", "is not contiguous", "is not contiguous")):
        path = save(tmp_path / str(number))

        def change(file: h5py.File, _: Any, number: int = number) -> None:
            del file["m/v"]
            if number == 0:
                file["away"] = np.full(4, 9.0)
                file["m/v"] = h5py.SoftLink("/away")
            elif number == 1:
                file["away"] = np.full(4, 9.0)
                layout = h5py.VirtualLayout((4,), "f8")
                layout[:] = h5py.VirtualSource(file["away"])
                file.create_virtual_dataset("m/v", layout)
            else:
                file.create_dataset("m/v", (4,), "f8", external=[(str(tmp_path / "raw"), 0, 32)])

        forge(path, change, seals=False)
        require_error(path, text, DamagedCheckpointError)


@pytest.mark.parametrize("name", [CHECKSUMS, COMPLETE])
def test_a_small_file_never_takes_much_memory(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)

    def grow(file: h5py.File, _: Any) -> None:
        del file[name]
        file.create_dataset(name, (2**30,), "<u4", chunks=(2**20,), compression="gzip", fillvalue=1)

    forge(path, grow, seals=False)
    assert os.path.getsize(path) < 20_000
    tracemalloc.start()
    try:
        require_error(path, "is not contiguous|impossible shape", DamagedCheckpointError)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (COMPLETE, np.uint32(1)), (COMPLETE, np.array([1.0, 2.0])), (COMPLETE, np.array([1, 2, 3], "<u4")),
        (CHECKSUMS, np.array(1, "<u4")), (CHECKSUMS, np.array(["a"], "S1")), (INDEX, np.array([1, 2], "<u4")),
        (INDEX, np.array(b"[")), (INDEX, np.array([b"{}", b"{}"])),
    ],
)
def test_the_own_datasets_may_be_anything(tmp_path: Path, name: str, value: Any) -> None:
    path = save(tmp_path)
    forge(path, replaced(name, value), seals=False)
    require_error(path, "is not a complete checkpoint|cannot be read", DamagedCheckpointError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_counter", np.array([1, 2])), ("save_counter", np.array(b"x")), ("save_counter/deeper", np.array(1)),
        ("adam", np.array(1.0)), ("adam/iterations", np.array([1, 2])), ("adam/iterations", np.array(b"many")),
        ("adam/iterations/deeper", np.array(1)), ("adam/velocity", np.array(1.0)),
        ("adam/velocity/m%2Fv", np.zeros(3)), ("adam/velocity/m%2Fv", np.zeros(4, "f4")),
        ("adam/velocity/m%2Fv/deeper", np.zeros(4)), ("rng", np.array(2)), ("rng/content", np.array(b"{")),
        ("rng/content", np.array(b"[]")), ("rng/content", np.array(b"\xff")),
        ("rng/content", np.array(7)), ("rng/generator", np.array([[1]])), ("m", np.zeros(4)),
        ("m/v/deeper", np.array(1)),
    ],
)
def test_what_is_saved_of_an_object_may_be_anything(tmp_path: Path, name: str, value: Any) -> None:
    path = save(tmp_path)

    def change(file: h5py.File, index: Any) -> None:
        if name.endswith("/deeper"):
            del file[name.removesuffix("/deeper")]
            index["arrays"] = [a for a in index["arrays"] if a["path"] != name.removesuffix("/deeper")]
        replaced(name, value)(file, index)
        index["shared"] = {}

    forge(path, change)
    require_error(path, r"cannot load: \w+: |was saved|were saved|needs|expected .*, got ")


ODD: tuple[Any, ...] = (
    None, True, -1, 2.5, 10**30, "", "x", "a//b", "/", "%zz", [], [1], {}, {"path": 1}, "O", "V8", "f4,f4", "S9",
)


def places(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values of nested lists and dictionaries."""
    yield way
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*way, key))


def test_the_index_may_say_anything(tmp_path: Path) -> None:
    """Every value of the index becomes each of many odd ones, with a checksum that is right."""
    path = save(tmp_path)
    with h5py.File(path) as file:
        text, checksums = bytes(file[INDEX][()]), file[CHECKSUMS][()]
    whole, program = path.read_bytes(), Program(3.0)
    refused = 0
    for place in places(json.loads(text)):
        for odd in ODD:
            index = json.loads(text)
            target = index
            for key in place[:-1]:
                target = target[key]
            if place:
                target[place[-1]] = odd
            else:
                index = odd
            path.write_bytes(whole)
            with h5py.File(path, "r+") as file:
                seal_index(file, index, checksums)
            try:
                program.checkpoint.read(path)
            except CheckpointError:
                refused += 1
    assert refused > 300


def test_bytes_of_the_file_may_be_anything(tmp_path: Path) -> None:
    path = save(tmp_path)
    whole, program = path.read_bytes(), Program(3.0)
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        start = int(draw.integers(0, min(len(content), 3000)))
        for at in range(start, min(start + int(draw.integers(1, 9)), len(content))):
            content[at] = int(draw.integers(0, 256))
        path.write_bytes(content)
        program.v.assign(np.full(4, 3.0))
        try:
            program.checkpoint.read(path)
        except CheckpointError:
            refused += 1
    assert refused > 30
