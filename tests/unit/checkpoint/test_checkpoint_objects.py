"""From objects to arrays and back, in one process."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file.saved import SavedArray
from mpidist.checkpoint.walk.objects import walk
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.optimizers.families.adam import Adam
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())


def variable(value: npt.ArrayLike) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


class Layer:
    def __init__(self, value: float = 1.0) -> None:
        self.kernel = variable(np.full((3, 2), value, "float32"))
        self.bias = variable(np.full(2, value, "float64"))
        self.units = 2


class Model:
    def __init__(self, value: float = 1.0) -> None:
        self.layers = [Layer(value), Layer(value + 1)]
        self.table = {"a/b": variable(value), ".x": variable([value])}
        self.me = self
        self.function = math.sin


class Keeper:
    """An object with state that is not built before it is used, as an optimizer."""

    def __init__(self, tree: Any = None) -> None:
        self.tree = tree
        self.saved: Any = None

    def state(self) -> Any:
        return self.tree if self.tree is not None else {}

    def load_state(self, saved: Any) -> None:
        self.saved = saved


def test_walk_finds_attributes_lists_and_dictionaries_in_order() -> None:
    found = walk([(("model",), Model())])
    assert list(found.leaves) == [
        "model/layers/0/bias", "model/layers/0/kernel", "model/layers/1/bias", "model/layers/1/kernel",
        "model/table/%2Ex", "model/table/a%2Fb",
    ]
    assert found.shared == {"model/me": "model"}


def test_save_writes_plain_hdf5(tmp_path: Path) -> None:
    model = Model(3.0)
    path = Checkpoint(model=model).save(tmp_path / "sub" / "ckpt")
    assert path == str(tmp_path / "sub" / "ckpt-1.h5")
    with h5py.File(path) as file:
        assert file["model/layers/1/kernel"].shape == (3, 2)
        assert file["model/layers/1/kernel"].dtype == "float32"
        assert (file["model/layers/1/kernel"][:] == 4.0).all()
        assert file["model/table/a%2Fb"][()] == 3.0
        assert file["save_counter"][()] == 1
        assert file["model/layers/1/kernel"].chunks is None
        names: list[str] = []
        file.visit(names.append)
        assert not file.attrs
        assert sorted(name for name in names if name.startswith("_mpidist/")) == [
            "_mpidist/checksums", "_mpidist/complete", "_mpidist/index",
        ]
    assert sorted(os.listdir(tmp_path / "sub")) == ["checkpoint", "ckpt-1.h5"]


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_reads_it(tmp_path: Path) -> None:
    path = Checkpoint(v=variable(np.arange(3.0))).save(tmp_path / "ckpt")
    dump = subprocess.run(["h5dump", "-d", "/v", path], capture_output=True, text=True, check=True, timeout=30).stdout
    assert "0, 1, 2" in dump


def test_superblock_is_one_that_hdf5_1_10_reads(tmp_path: Path) -> None:
    with open(Checkpoint(v=variable(1.0)).write(tmp_path / "c"), "rb") as file:
        head = file.read(9)
    assert head[:8] == b"\x89HDF\r\n\x1a\n"
    assert head[8] == 0


@pytest.mark.parametrize(
    "value",
    [
        np.array(True), np.array([True, False, True]), np.zeros((0, 3), "float32"), np.array(2.5, "float16"),
        np.arange(4).astype("complex64") * (1 + 2j), np.arange(5, dtype="int8"), np.array(7, "uint64"),
        np.arange(600_000, dtype="float64").reshape(3, -1), np.arange(6, dtype="float32").reshape(2, 3).T,
    ],
    ids=lambda value: f"{value.dtype}-{value.shape}",
)
def test_round_trip_of_every_kind(value: np.ndarray[Any, Any], tmp_path: Path) -> None:
    held, keeper = variable(value), Keeper({"x": value})
    path = Checkpoint(v=held, k=keeper).write(tmp_path / "c")
    fresh, other = variable(np.zeros_like(value)), Keeper()
    Checkpoint(v=fresh, k=other).read(path).assert_consumed()
    assert np.array_equal(fresh.numpy(), value)
    assert fresh.dtype == value.dtype
    got = other.saved["x"].numpy()
    assert np.array_equal(got, value)
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    with h5py.File(path) as file:
        assert np.array_equal(file["v"][()], value)


def test_state_holds_numbers_and_strings(tmp_path: Path) -> None:
    tree = {"step": 12, "rate": 0.5, "on": True, "name": "größe", "empty": "", "rows": [1, [2, 3]], "big": 2**63}
    path = Checkpoint(k=Keeper(tree)).write(tmp_path / "c")
    other = Keeper()
    Checkpoint(k=other).read(path).assert_consumed()
    saved = other.saved
    assert all(isinstance(saved[key], SavedArray) for key in ("step", "rate", "on", "name"))
    assert saved["step"].shape == ()
    values = {key: saved[key].numpy().item() for key in ("step", "rate", "on", "name", "empty", "big")}
    assert values == {key: tree[key] for key in values}
    assert saved["rows"]["1"]["0"].numpy() == 2
    assert int(saved["step"]) == 12
    with h5py.File(path) as file:
        assert file["k/name"].asstr()[()] == "größe"


@pytest.mark.parametrize("value", [object(), 2**70, np.array([1], "M8[s]"), np.array([None]), {1, 2}])
def test_state_of_something_else_is_an_error_that_names_the_path(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'k/a/0'"):
        Checkpoint(k=Keeper({"a": [value]})).write(tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_saved_arrays_outlive_the_file(tmp_path: Path) -> None:
    path = Checkpoint(k=Keeper({"x": np.arange(10.0)})).write(tmp_path / "c")
    keeper = Keeper()
    Checkpoint(k=keeper).read(path)
    os.unlink(path)
    assert keeper.saved["x"].read(3, 5).tolist() == [3.0, 4.0]
    assert keeper.saved["x"].numpy().sum() == 45
    with pytest.raises(IndexError, match=r"\[9, 11\)"):
        keeper.saved["x"].read(9, 11)


def test_shared_objects_are_stored_once_and_restored_under_any_path(tmp_path: Path) -> None:
    layer = Layer(5.0)
    path = Checkpoint(a=layer, z=layer, k=Keeper({"v": layer.bias})).write(tmp_path / "c")
    with h5py.File(path) as file:
        assert set(file) == {"a", "_mpidist"}
    fresh = Layer(0.0)
    Checkpoint(z=fresh).read(path).assert_existing_objects_matched()
    assert (fresh.kernel.numpy() == 5).all()
    keeper = Keeper()
    Checkpoint(k=keeper).read(path)
    assert keeper.saved["v"].numpy().tolist() == [5.0, 5.0]
    path = Checkpoint(z=Layer(6.0)).write(tmp_path / "d")
    Checkpoint(a=fresh, z=fresh).read(path).assert_consumed()
    assert (fresh.kernel.numpy() == 6).all()


def test_the_names_of_all_are_found_without_a_look_at_all_shared_paths_each_time() -> None:
    class Counted(dict[str, str]):
        looks = 0

        def items(self) -> Any:
            Counted.looks += 1
            return super().items()

    layers = [SimpleNamespace(k=variable(float(n))) for n in range(3)]
    found = walk([(("m",), SimpleNamespace(layers=layers, twin=layers[0], weights=[one.k for one in layers]))])
    found.shared = Counted(found.shared)
    names = {path: [*found.names_of(path)] for path in found.leaves}
    assert names["m/layers/0/k"] == ["m/layers/0/k", "m/twin/k", "m/weights/0"]
    assert names["m/layers/2/k"] == ["m/layers/2/k", "m/weights/2"]
    assert Counted.looks <= 1


def test_root_stands_without_a_name(tmp_path: Path) -> None:
    layer = Layer(2.0)
    path = Checkpoint(layer, extra=variable(1.0)).write(tmp_path / "c")
    with h5py.File(path) as file:
        assert set(file) == {"bias", "kernel", "extra", "_mpidist"}
    Checkpoint(root={"kernel": layer.kernel, "bias": layer.bias, "extra": variable(0.0)}).read(path).assert_consumed()
    with pytest.raises(ValueError, match="'kernel' is also an attribute of root"):
        Checkpoint(layer, kernel=variable(1.0))


@pytest.mark.parametrize("value", [3, "text", 1.5, None, np.zeros(2), math.sin, {1}, object()])
def test_a_value_without_variables_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match="was expecting x to be"):
        Checkpoint(x=value)


def test_names_of_methods_are_refused_and_objects_are_attributes() -> None:
    with pytest.raises(ValueError, match="'save' is a name of Checkpoint itself"):
        Checkpoint(save=variable(1.0))
    held = variable(1.0)
    checkpoint = Checkpoint(step=held)
    assert checkpoint.step is held
    with pytest.raises(AttributeError, match="'other'"):
        _ = checkpoint.other


def test_equal_paths_and_odd_keys_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two arrays"):
        Checkpoint(d={1: variable(1.0), "1": variable(2.0)}).write(tmp_path / "c")
    with pytest.raises(ValueError, match=r"keys, got \(1, 2\)"):
        Checkpoint(d={(1, 2): variable(1.0)}).write(tmp_path / "c")
    with pytest.raises(ValueError, match="a root cannot be a variable"):
        Checkpoint(variable(1.0)).write(tmp_path / "c")


@pytest.mark.parametrize("key", [1, "1"])
def test_an_array_on_the_way_to_another_is_an_error(tmp_path: Path, key: object) -> None:
    other = "1" if key == 1 else 1
    checkpoint = Checkpoint(m={key: variable(1.0), other: SimpleNamespace(b=variable(2.0))})
    with pytest.raises(ValueError, match=r"'m/1(/b)?': another array has this path, or the path of one is inside"):
        checkpoint.save(tmp_path / "c")
    assert not os.listdir(tmp_path)


def test_instances_that_answer_to_any_name_are_not_asked(tmp_path: Path) -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    path = Checkpoint(x=SimpleNamespace(proxy=Proxy(), v=variable(1.0))).write(tmp_path / "c")
    with h5py.File(path) as file:
        assert list(file["x"]) == ["v"]


def test_long_chains_are_walked() -> None:
    head = SimpleNamespace(v=variable(0.0))
    for _ in range(1500):
        head = SimpleNamespace(next=head)
    assert len(walk([(("head",), head)]).leaves) == 1


def test_status_lists_what_does_not_fit(tmp_path: Path) -> None:
    path = Checkpoint(a=variable(1.0), b=variable(2.0)).save(tmp_path / "c")
    fresh = variable(0.0)
    status = Checkpoint(a=fresh, c=variable(0.0)).restore(path)
    assert fresh.numpy() == 1.0
    assert status.expect_partial() is status
    with pytest.raises(AssertionError, match="nothing for 'c'; it also holds 'b'"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="nothing for 'c'"):
        status.assert_existing_objects_matched()
    assert status.assert_nontrivial_match() is status
    with pytest.raises(AssertionError, match="holds values that no object has taken: 'b'"):
        Checkpoint(a=fresh).restore(path).assert_consumed()
    Checkpoint(a=fresh).restore(path).assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="holds 'a', 'b', the objects are 'x'"):
        Checkpoint(x=fresh).restore(path).assert_nontrivial_match()
    for check in ("assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"):
        with pytest.raises(AssertionError, match="the path was None"):
            getattr(Checkpoint(a=fresh).restore(None), check)()


def test_counter_belongs_to_save_and_restore(tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=variable(1.0))
    checkpoint.save(tmp_path / "c")
    path = checkpoint.save(tmp_path / "c")
    assert checkpoint.save_counter == 2
    fresh = Checkpoint(v=variable(0.0))
    fresh.restore(path).assert_consumed()
    assert fresh.save_counter == 2
    plain = checkpoint.write(tmp_path / "plain")
    assert plain == str(tmp_path / "plain.h5")
    assert checkpoint.save_counter == 2
    fresh.read(tmp_path / "plain").assert_consumed()
    with pytest.raises(AssertionError, match="nothing for 'save_counter'"):
        fresh.restore(plain).assert_consumed()
    with pytest.raises(ValueError, match="own count"):
        Checkpoint({"save_counter": variable(1)}).save(tmp_path / "c")
    assert checkpoint.save_counter == 2


def test_objects_that_come_later_are_restored_by_the_next_assertion(tmp_path: Path) -> None:
    path = Checkpoint(m=Model(7.0)).write(tmp_path / "c")
    late = SimpleNamespace()
    status = Checkpoint(m=late).read(path)
    late.layers = Model(0.0).layers
    os.unlink(path)
    status.assert_existing_objects_matched()
    assert late.layers[1].kernel[0, 0] == 8.0
    late.layers[1].kernel.assign(np.zeros((3, 2)))
    status.assert_nontrivial_match()
    assert late.layers[1].kernel[0, 0] == 0.0


def test_what_has_taken_its_state_is_not_set_back_when_others_come(tmp_path: Path) -> None:
    path = Checkpoint(keeper=Keeper({"steps": 1}), v=variable(5.0), w=variable(6.0)).write(tmp_path / "c")
    keeper = Keeper({"steps": 0})
    checkpoint = Checkpoint(keeper=keeper)
    status = checkpoint.read(path)
    assert keeper.saved["steps"].numpy() == 1
    keeper.saved = None
    checkpoint.v = variable(0.0)
    assert checkpoint.v.numpy() == 5.0
    # It is found by another name first, and an assertion looks once more.
    checkpoint.another = keeper
    checkpoint.w = variable(0.0)
    status.assert_nontrivial_match()
    assert (checkpoint.w.numpy(), keeper.saved) == (6.0, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((2, 3), "float32"), r"'m/v' has shape \(2, 3\), but \(3, 2\) was saved"),
        (np.zeros((3, 2), "float64"), "'m/v' has dtype float64, but float32 was saved"),
    ],
)
def test_what_does_not_fit_overwrites_nothing(value: np.ndarray[Any, Any], text: str, tmp_path: Path) -> None:
    path = Checkpoint(m=SimpleNamespace(a=variable(1.0), v=variable(np.ones((3, 2), "float32")))).write(tmp_path / "c")
    fresh = SimpleNamespace(a=variable(0.0), v=variable(value))
    with pytest.raises(CheckpointError, match=text):
        Checkpoint(m=fresh).read(path)
    with pytest.raises(CheckpointError, match=text):
        Checkpoint(m=Keeper({"a": fresh.a, "v": fresh.v})).read(path)
    assert fresh.a.numpy() == 0.0
    with pytest.raises(CheckpointError, match=r"'m' is a variable of shape .* below that path"):
        Checkpoint(m=variable(1.0)).read(path)


def test_bfloat16_comes_back_bit_for_bit(tmp_path: Path) -> None:
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    bits = np.array([0, 1, 0x3F81, 0x7F80, 0x7FC1, 0x8000, 0xFF7F] * 1000, np.uint16)
    kept, value = Keeper({"x": bits.view(types.bfloat16)}), create_variable(ARENA, bits.view(types.bfloat16))
    optimizer = Adam(0.1)
    optimizer.build([value])
    path = Checkpoint(k=kept, v=value, o=optimizer).write(tmp_path / "c")
    with h5py.File(path) as file:
        assert file["v"].dtype == np.uint16
        np.testing.assert_array_equal(file["v"][()], bits)
    other, fresh, again = Keeper(), create_variable(ARENA, np.zeros(7000, types.bfloat16)), Adam(0.1)
    again.build([fresh])
    Checkpoint(k=other, v=fresh, o=again).read(path).assert_consumed()
    assert other.saved["x"].numpy().tobytes() == bits.tobytes()
    assert fresh.numpy().dtype == types.bfloat16
    np.testing.assert_array_equal(fresh.numpy().view(np.uint16), bits)
    with pytest.raises(CheckpointError, match="'v' has dtype float16, but bfloat16 was saved"):
        Checkpoint(v=create_variable(ARENA, np.zeros(7000, np.float16))).read(path)
