"""Checkpoints read from outside: by name, by the commands, and by h5py alone as the page of the format says."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import mpidist
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file.layout import PIECE_BYTES
from mpidist.cli.main import main
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, DamagedCheckpointError
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.amounts import amount
from tests.helpers.markdown import ROOT, blocks_of
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())
SAMPLE = str(ROOT / "tests/samples/checkpoint_1.h5")


class Keeper:
    """An object with any state."""

    def __init__(self, tree: Any = None) -> None:
        self.tree = tree

    def state(self) -> Any:
        return self.tree

    def load_state(self, saved: Any) -> None:
        self.tree = saved


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


def plain_reader() -> Any:
    """The reader of docs/checkpoint-format.md."""
    blocks = blocks_of((ROOT / "docs/checkpoint-format.md").read_text())
    code = next(block.text for block in blocks if "def read" in block.text)
    assert len(code.splitlines()) <= 30
    assert "mpidist" not in code.replace('"_mpidist"', "")
    names: dict[str, Any] = {}
    exec(compile(code, "docs/checkpoint-format.md", "exec"), names)
    return names["read"]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *words])


def flip(path: str, name: str, place: int = 0) -> None:
    with h5py.File(path) as file:
        offset = file[name].id.get_offset() + place
    with open(path, "r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 1]))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    shared = variable(np.arange(6.0))
    model = {"a/b": shared, "big": variable(np.arange(PIECE_BYTES // 4 + 3, dtype="f4")), "flag": variable(True)}
    keeper = Keeper({"text": "größe", "bytes": b"\0a\0", "none": None, "names": np.array(["a", "bc"])})
    return Checkpoint(model=model, again=[shared], k=keeper).save(tmp_path / "ckpt", metadata={"epoch": 3})


def test_values_are_read_by_name(saved: str) -> None:
    assert mpidist.list_variables(saved)[0] == ("again/0", [6])
    assert dict(mpidist.list_variables(os.path.dirname(saved))) == {
        "again/0": [6], "k/bytes": [3], "k/names": [2], "k/none": [0], "k/text": [],
        "model/big": [PIECE_BYTES // 4 + 3], "model/flag": [], "save_counter": [],
    }
    reader = mpidist.load_checkpoint(saved)
    assert reader.get_variable_to_shape_map() == dict(mpidist.list_variables(saved))
    assert reader.get_variable_to_dtype_map()["model/flag"].kind == "b"
    assert reader.has_tensor("model/a%2Fb")
    assert not reader.has_tensor("model")
    assert reader.get_tensor("model/a%2Fb").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert reader.metadata == {"epoch": 3}
    values = [mpidist.load_variable(saved, f"k/{name}") for name in ("text", "bytes", "none")]
    assert values == ["größe", b"\0a\0", None]
    assert mpidist.load_variable(saved, "k/names").tolist() == ["a", "bc"]
    with pytest.raises(KeyError, match="no value 'model'; below that path are 'model/big', 'model/flag', 'again/0'"):
        reader.get_tensor("model")
    with pytest.raises(KeyError, match="list_variables"):
        reader.get_tensor("other")
    with pytest.raises(FileNotFoundError):
        mpidist.load_checkpoint(saved + "x")


def test_a_damaged_value_is_not_given(saved: str) -> None:
    size = mpidist.checkpoint.verify(saved)
    assert size == mpidist.checkpoint.verify(os.path.dirname(saved)) > PIECE_BYTES
    flip(saved, "model/big", PIECE_BYTES + 3)
    reader = mpidist.load_checkpoint(saved)
    assert reader.get_tensor("model/flag")
    for act in (lambda: mpidist.checkpoint.verify(saved), lambda: reader.get_tensor("model/big")):
        with pytest.raises(DamagedCheckpointError, match=rf"bytes \[{PIECE_BYTES}, \d+\) of 'model/big'"):
            act()


def test_h5py_alone_reads_a_checkpoint(saved: str) -> None:
    read = plain_reader()
    reader = mpidist.load_checkpoint(saved)
    found = read(saved)
    assert json.loads(found.pop("_mpidist/metadata")) == reader.metadata
    assert found.keys() == reader.arrays.keys()
    assert found["k/text"].decode() == "größe"
    for name in ("again/0", "model/big", "model/flag", "save_counter"):
        np.testing.assert_array_equal(found[name], reader.get_tensor(name))
    assert read(SAMPLE)["each"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    flip(saved, "model/big", PIECE_BYTES + 3)
    with pytest.raises(AssertionError, match="model/big is damaged"):
        read(saved)


def test_the_commands_show_what_a_checkpoint_holds(saved: str) -> None:
    shown = run("show", saved)
    assert shown.exit_code == 0
    for text in ("model/flag", "bool", "[2]", "text", "bytes", "none", "model/a%2Fb is again/0", "metadata epoch: 3"):
        assert text in shown.output, text
    content = json.loads(run("show", os.path.dirname(saved), "--json").output)
    assert (content["format"], content["metadata"], len(content["arrays"])) == (3, {"epoch": 3}, 8)
    (row,) = json.loads(run("ls", os.path.dirname(saved), "--json").output)
    assert (row["path"], row["latest"], row["save_counter"], row["arrays"]) == (saved, True, 1, 8)
    assert f"* {saved}" in run("ls", os.path.dirname(saved)).output
    assert run("show", f"{saved}x").exit_code == 1


def test_the_commands_find_damage(saved: str, tmp_path: Path) -> None:
    whole = run("verify", saved)
    assert (whole.exit_code, whole.output.count("whole")) == (0, 1)
    flip(saved, "model/big")
    done = run("verify", SAMPLE, str(tmp_path), "--json")
    first, second = json.loads(done.output)
    assert (done.exit_code, "error" in first, "'model/big'" in second["error"]) == (1, False, True)
    # The structure is whole.
    assert run("ls", str(tmp_path)).exit_code == 0
    os.truncate(saved, 1000)
    listed = run("ls", str(tmp_path))
    assert (listed.exit_code, "truncated" in listed.output) == (1, True)


def test_the_commands_compare(saved: str, tmp_path: Path) -> None:
    assert (run("diff", saved, saved).exit_code, run("diff", saved, saved).output) == (0, "")
    big = np.arange(PIECE_BYTES // 4 + 3, dtype="f4")
    big[-2] += 1
    model = {"a": variable(np.zeros(6)), "big": variable(big), "flag": variable(1)}
    other = Checkpoint(model=model).write(tmp_path / "other", metadata={"epoch": 4})
    done = run("diff", saved, other, "--json")
    assert done.exit_code == 1
    found = {(one["path"], one["what"]) for one in json.loads(done.output)}
    assert found >= {
        ("model/a", "missing"), ("again/0", "missing"), ("model/big", "values"), ("model/flag", "type"),
        ("model/a%2Fb", "shared"), ("epoch", "metadata"),
    }
    text = run("diff", saved, other).output
    assert "model/flag: bool [] | int64 []" in text
    assert "model/big: values differ" in text
    assert run("diff", saved, f"{saved}x").exit_code == 2


VALUES = st.one_of(
    arrays.boolean_dtypes(), arrays.integer_dtypes(endianness="<"),
    arrays.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
).flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0)))


@settings(max_examples=amount(2, 100))
@given(values=st.dictionaries(st.sampled_from(["0/weight", "0/bias", "1/a-b", "file"]), VALUES, min_size=1))
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt", ".weights.h5"])
def test_a_checkpoint_is_converted_and_back(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, values: dict[str, np.ndarray[Any, Any]]
) -> None:
    pytest.importorskip({".safetensors": "safetensors", ".pt": "torch"}.get(suffix, "numpy"))
    folder = tmp_path_factory.getbasetemp()
    model = Keeper({"m": {}})
    for name, value in values.items():
        *way, last = name.split("/")
        node = model.tree["m"]
        for part in way:
            node = node.setdefault(part, {})
        node[last] = value
    path = Checkpoint(k=model).write(folder / "source")
    target, back = str(folder / f"other{suffix}"), str(folder / "back.h5")
    done = run("convert", path, target, "--below", "k/m", "--force", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {
        "arrays": len(values), "bytes": sum(value.nbytes for value in values.values()), "notes": {},
    }
    assert run("convert", target, back, "--below", "k/m", "--force").exit_code == 0
    assert run("diff", path, back).output == ""


def test_conversion_refuses_what_would_be_lost(saved: str, tmp_path: Path) -> None:
    target = str(tmp_path / "c.npz")
    done = json.loads(run("convert", saved, target, "--json").output)
    assert sorted(done["notes"]) == ["k/bytes", "k/names", "k/none", "k/text"]
    with np.load(target) as file:
        assert sorted(file.files) == ["again/0", "model/big", "model/flag", "save_counter"]
    for words, text in (
        ((saved, target), "--force replaces it"), ((saved, str(tmp_path / "d.h5")), "expected a checkpoint"),
        ((saved, str(tmp_path / "d.npz"), "--below", "nothing"), "no arrays below 'nothing'"),
    ):
        refused = run("convert", *words)
        assert (refused.exit_code, text in refused.output) == (1, True), refused.output
    flip(saved, "model/big")
    assert "is damaged" in run("convert", saved, target, "--force").output
    with np.load(target) as file:
        assert "again/0" in file.files


def test_small_dtypes_are_converted(tmp_path: Path) -> None:
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    values = {"half": np.array([1.5, -2.0], types.bfloat16), "tiny": np.array([[448.0]], types.float8_e4m3fn)}
    path = Checkpoint(k=Keeper(values)).write(tmp_path / "c")
    for suffix in (".pt", ".weights.h5"):
        target, back = str(tmp_path / f"o{suffix}"), str(tmp_path / f"back{suffix}.h5")
        assert run("convert", path, target).exit_code == 0
        assert run("convert", target, back).exit_code == 0
        assert run("diff", path, back).output == ""
    assert torch.load(tmp_path / "o.pt", weights_only=True)["k.half"].dtype is torch.bfloat16
    done = json.loads(run("convert", path, str(tmp_path / "o.npz"), "--json").output)
    assert "became float32" in done["notes"]["k/half"]
    with np.load(tmp_path / "o.npz") as file:
        assert file["k/tiny"].tolist() == [[448.0]]


def test_a_later_format_is_an_error_that_says_so(saved: str) -> None:
    with h5py.File(saved, "r+") as file:
        text = file["_mpidist/index"][()]
        offset = file["_mpidist/index"].id.get_offset()
        mark = file["_mpidist/complete"].id.get_offset()
        table = file["_mpidist/checksums"][()].tobytes()
    later = text.replace(b'"format": 3', b'"format": 9')
    with open(saved, "r+b") as raw:
        raw.seek(offset)
        raw.write(later)
        raw.seek(mark)
        raw.write(np.array([1, zlib.crc32(table, zlib.crc32(later))], "<u4").tobytes())
    with pytest.raises(CheckpointError, match="format 3 or lower, got format 9; update mpidist"):
        mpidist.load_checkpoint(saved)
