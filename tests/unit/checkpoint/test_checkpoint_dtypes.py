"""Every dtype and value that a checkpoint keeps comes back as it was; metadata too."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file.datasets import NAME_OF_TYPE
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.optimizers.families.sgd import SGD
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.amounts import amount
from tests.helpers.strategies import make_arena

ROOT = Path(__file__).resolve().parents[3]
ARENA = make_arena(SoloCommunicator())
ML_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
DTYPES = st.one_of(
    arrays.boolean_dtypes(), arrays.integer_dtypes(), arrays.unsigned_integer_dtypes(), arrays.floating_dtypes(),
    arrays.complex_number_dtypes(), arrays.unicode_string_dtypes(max_len=4), arrays.byte_string_dtypes(max_len=4),
).filter(lambda dtype: dtype.itemsize <= 16)
TEXTS = st.text(st.characters(codec=None, categories=None), max_size=8)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.complex_numbers(), TEXTS,
    st.binary(max_size=8), DTYPES.flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))
    ),
)


class Keeper:
    """An object with any state."""

    def __init__(self, tree: Any = None) -> None:
        self.tree = tree
        self.saved: Any = None

    def state(self) -> Any:
        return self.tree

    def load_state(self, saved: Any) -> None:
        self.saved = saved


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


def is_same(value: object, saved: object) -> bool:
    if value is None or isinstance(value, (str, bytes)):
        return type(saved) in (type(value), np.bytes_) and value == saved
    given, got = np.asarray(value), np.asarray(saved)
    return given.shape == got.shape and given.dtype.kind == got.dtype.kind and given.tolist().__repr__() == (
        got.tolist().__repr__()
    )


@settings(max_examples=amount(30, 1000))
@example(tree={"text": "end\0", "half": "\ud800", "bytes": b"\0\1\0", "empty": "", "none": None})
@example(tree={"a": np.array("\ud800"), "b": np.array(["x", "\udfff"])})
@given(tree=st.dictionaries(st.text("ab/.%", min_size=1, max_size=3), LEAVES, min_size=1, max_size=4))
def test_any_value_of_a_state_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = Checkpoint(k=Keeper(tree)).write(folder / "c")
    other = Keeper({})
    Checkpoint(k=other).read(path).assert_consumed()
    for key, value in tree.items():
        assert is_same(value, other.saved[key].value()), (key, value, other.saved[key].value())
    # What was restored and not touched is saved again as it was.
    again = Checkpoint(k=Keeper(other.saved)).write(folder / "again")
    third = Keeper({})
    Checkpoint(k=third).read(again)
    assert all(is_same(value, third.saved[key].value()) for key, value in tree.items())


@pytest.mark.parametrize("name", ML_DTYPES)
def test_dtypes_of_ml_dtypes_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    dtype = np.dtype(getattr(types, name))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = np.arange(np.iinfo(unsigned).max + 1, dtype=unsigned)
    value, kept, optimizer = variable(bits.view(dtype)), Keeper({"x": bits.view(dtype)[:3]}), SGD(0.1, momentum=0.5)
    optimizer.build([value])
    path = Checkpoint(v=value, k=kept, o=optimizer).write(tmp_path / "c")
    with h5py.File(path) as file:
        data = file["v"]
        np.testing.assert_array_equal(data[()], bits)
        assert data.attrs[NAME_OF_TYPE] == name.encode()
        assert NAME_OF_TYPE not in file["_mpidist/checksums"].attrs
    fresh, other, again = variable(np.zeros(bits.size, dtype)), Keeper(), SGD(0.1, momentum=0.5)
    again.build([fresh])
    Checkpoint(v=fresh, k=other, o=again).read(path).assert_consumed()
    np.testing.assert_array_equal(fresh.numpy().view(unsigned), bits)
    assert other.saved["x"].numpy().dtype == dtype
    with pytest.raises(CheckpointError, match=f"'v' has dtype float16, but {name} was saved"):
        Checkpoint(v=variable(np.zeros(bits.size, np.float16))).read(path)


def test_bits_are_read_without_ml_dtypes(tmp_path: Path) -> None:
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    path = Checkpoint(v=variable(np.array([1.0, -2.0], types.float8_e5m2)), w=variable(1.0)).write(tmp_path / "c")
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import mpidist, numpy as np\n"
        "w = mpidist.Variable(np.float64(0))\n"
        "mpidist.Checkpoint(w=w).read(sys.argv[1]); print(float(w.numpy()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr


def test_a_variable_takes_no_bytes(tmp_path: Path) -> None:
    path = Checkpoint(v=Keeper(b"abc")).write(tmp_path / "c")
    with pytest.raises(CheckpointError, match="'v' has dtype uint8, but bytes was saved"):
        Checkpoint(v=variable(np.zeros(3, "u1"))).read(path)


def test_h5dump_reads_what_is_no_number(tmp_path: Path) -> None:
    if shutil.which("h5dump") is None:
        pytest.skip("h5dump is not installed")
    tree = {"bytes": b"ab", "none": None, "text": "end\0", "names": np.array(["a", "bc"])}
    path = Checkpoint(k=Keeper(tree)).write(tmp_path / "c", metadata={"epoch": 3})
    shown = subprocess.run(["h5dump", path], capture_output=True, text=True, timeout=60, check=True).stdout
    for text in (NAME_OF_TYPE, '"bytes', '"none', '"text', '"a', '"bc', "epoch"):
        assert text in shown, text


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS), lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)
    ), max_leaves=6,
)


@settings(max_examples=amount(20, 500))
@given(metadata=st.dictionaries(TEXTS, JSON, max_size=3))
def test_metadata_comes_back(tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any]) -> None:
    one = Checkpoint(a=variable(1.0))
    assert one.metadata == {}
    path = one.write(tmp_path_factory.getbasetemp() / "m", metadata=metadata)
    other = Checkpoint(a=variable(0.0))
    other.read(path).assert_consumed()
    assert json.dumps(one.metadata) == json.dumps(other.metadata) == json.dumps(metadata)
    with h5py.File(path) as file:
        assert json.dumps(json.loads(file["_mpidist/metadata"][()])) == json.dumps(metadata)
    Checkpoint(a=variable(0.0)).read(one.write(path)).assert_consumed()
    assert one.metadata == {}


def test_a_manager_has_the_metadata_of_its_last_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(Checkpoint(a=variable(1.0)), tmp_path, 2)
    manager.save(metadata={"epoch": np.int64(1), "loss": np.float32(0.5), "worst": math.inf, "names": ("a", "b")})
    expected = {"epoch": 1, "loss": 0.5, "worst": math.inf, "names": ["a", "b"]}
    assert manager.metadata == expected
    manager.close()
    resumed = CheckpointManager(Checkpoint(a=variable(0.0)), tmp_path, 2)
    assert resumed.metadata == {}
    resumed.restore_or_initialize()
    assert resumed.metadata == expected


@pytest.mark.parametrize(("metadata", "text"), [
    (3, "must be a dictionary, got 3"), ({1: 2}, "strings as keys, got 1"), ({"a": [{"b": {1}}]}, r"\['b'\]` must be"),
    ({"a": np.zeros(2)}, r"metadata\['a'\]` must be"),
])
def test_metadata_that_json_lacks_is_an_error(metadata: Any, text: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(a=variable(1.0))
    with CheckpointManager(checkpoint, tmp_path, 2) as manager:
        first = manager.save()
        with pytest.raises(TypeError, match=text):
            manager.save(metadata=metadata)
        assert (manager.checkpoints, manager.latest_checkpoint) == ([first], first)
        assert manager.save() == str(tmp_path / "ckpt-2.h5")


def test_damaged_metadata_is_an_error(tmp_path: Path) -> None:
    path = Checkpoint(a=variable(1.0)).write(tmp_path / "c", metadata={"epoch": 3})
    with h5py.File(path, "r+") as file:
        offset = file["_mpidist/metadata"].id.get_offset()
    with open(path, "r+b") as raw:
        raw.seek(offset + len('{"epoch": '))
        raw.write(b"4")
    fresh = Checkpoint(a=variable(0.0))
    with pytest.raises(CheckpointError, match="_mpidist/metadata' do not have the checksum"):
        fresh.read(path)
    assert (fresh.metadata, float(fresh.a.numpy())) == ({}, 0.0)
