"""What a checkpoint finds in objects of many kinds: all is saved, or it is an error that says where."""

from __future__ import annotations

import array
import random
from collections import UserDict, UserList, deque
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.walk.objects import walk
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.variables.making.creation import create_variable
from mpidist.variables.module import Module
from mpidist.variables.variable import BaseVariable
from tests.helpers.calls import calls_of
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())


def variable(value: npt.ArrayLike) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


class Slotted:
    __slots__ = ("__hidden", "kernel", "unset")

    def __init__(self, value: float) -> None:
        self.kernel = variable(value)
        self.__hidden = variable(value + 1)

    def sum(self) -> float:
        return float(self.kernel.numpy() + self.__hidden.numpy())


class Extended(Slotted):
    """With a dictionary beside the slots of its parent."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.bias = variable(value)


@dataclass(slots=True)
class Record:
    weight: BaseVariable
    steps: int = 3


@pytest.mark.parametrize(
    ("build", "paths"),
    [
        (lambda v: deque([v, v + 1]), ["x/0", "x/1"]),
        (lambda v: UserList([v]), ["x/0"]),
        (lambda v: UserDict(a=v), ["x/a"]),
        (lambda v: MappingProxyType({"a": v}), ["x/a"]),
        (lambda v: [deque([{"k": v}])], ["x/0/0/k"]),
    ],
    ids=["deque", "UserList", "UserDict", "mappingproxy", "nested"],
)
def test_containers_are_walked(build: Any, paths: list[str], tmp_path: Path) -> None:
    def holding(value: float) -> Any:
        return SimpleNamespace(x=as_variables(build(np.array(value))))

    first, fresh = holding(1.0), holding(0.0)
    assert list(walk([((), first)]).leaves) == paths
    Checkpoint(fresh).read(Checkpoint(first).write(tmp_path / "c")).assert_consumed()
    values: list[list[Any]] = [[leaf.value for leaf in walk([((), one)]).leaves.values()] for one in (fresh, first)]
    assert all(np.array_equal(one, other) for one, other in zip(*values, strict=True))


def as_variables(value: Any) -> Any:
    if isinstance(value, (deque, list, UserList)):
        return type(value)(map(as_variables, value))
    if isinstance(value, (dict, UserDict)):
        return type(value)({key: as_variables(item) for key, item in value.items()})
    if isinstance(value, MappingProxyType):
        return MappingProxyType({key: as_variables(item) for key, item in value.items()})
    return variable(value)


def test_a_container_of_another_class_has_items_and_attributes() -> None:
    class Layers(list):  # type: ignore[type-arg]  # of anything
        pass

    layers: Any = Layers([variable(1.0)])
    layers.scale = variable(2.0)
    layers.table = np.zeros(3)
    found = walk([(("m",), SimpleNamespace(layers=layers))])
    assert list(found.leaves) == ["m/layers/0", "m/layers/scale"]
    assert list(found.lost) == ["m/layers/table"]


def test_a_module_that_is_a_container_has_items_and_attributes(tmp_path: Path) -> None:
    class Layers(Module, list):  # type: ignore[type-arg]  # of anything
        pass

    class Heads(Module, UserDict):  # type: ignore[type-arg]  # of anything
        def __init__(self, **items: BaseVariable) -> None:
            Module.__init__(self)
            UserDict.__init__(self, items)

    def build(value: float) -> tuple[Any, Any]:
        layers: Any = Layers()
        layers.append(variable(value))
        heads: Any = Heads(main=variable(value + 1))
        layers.scale, heads.scale, layers.heads = variable(value + 2), variable(value + 3), heads
        return layers, heads

    layers, _ = build(1.0)
    paths = ["m/0", "m/heads/main", "m/heads/scale", "m/scale"]
    assert list(walk([(("m",), layers)]).leaves) == paths
    path = Checkpoint(m=layers).save(tmp_path / "c")
    again, heads = build(0.0)
    Checkpoint(m=again).restore(path).assert_consumed()
    assert [float(v.numpy()) for v in (again[0], heads["main"], heads.scale, again.scale)] == [1.0, 2.0, 4.0, 3.0]
    # What comes later is restored when it is set.
    late: Any = Layers()
    status = Checkpoint(m=late).restore(path)
    late.scale = variable(0.0)
    assert late.scale.numpy() == 3.0
    late.heads = heads
    late.append(variable(0.0))
    status.assert_consumed()


def test_slots_are_attributes(tmp_path: Path) -> None:
    first = {"a": Slotted(1.0), "b": Extended(2.0), "c": Record(variable(3.0))}
    fresh = {"a": Slotted(0.0), "b": Extended(0.0), "c": Record(variable(0.0))}
    assert list(walk([((), first)]).leaves) == [
        "a/_Slotted__hidden", "a/kernel", "b/_Slotted__hidden", "b/bias", "b/kernel", "c/weight",
    ]
    Checkpoint(fresh).read(Checkpoint(first).write(tmp_path / "c")).assert_consumed()
    a, b, c = fresh["a"], fresh["b"], fresh["c"]
    assert isinstance(a, Slotted)
    assert isinstance(b, Extended)
    assert isinstance(c, Record)
    assert [a.sum(), b.sum(), float(b.bias.numpy()), float(c.weight.numpy())] == [3.0, 5.0, 2.0, 3.0]
    Checkpoint(slotted=Slotted(1.0))


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_an_error_unless_its_members_have_names_elsewhere(kind: Any, tmp_path: Path) -> None:
    v = variable(1.0)
    alone, named = SimpleNamespace(parts=kind([v])), SimpleNamespace(all_parts=kind([v]), parts=[v])
    for act in (Checkpoint(m=alone).write, Checkpoint(m=SimpleNamespace(parts=kind([Slotted(1.0)]))).read):
        with pytest.raises(ValueError, match=r"'m/parts/\(member\).*members of a set have no names.*use a list"):
            act(tmp_path / "c")
    path = Checkpoint(m=named).write(tmp_path / "c")
    v.assign(0.0)
    Checkpoint(m=named).read(path).assert_consumed()
    assert v.numpy() == 1.0
    Checkpoint(m=SimpleNamespace(kinds=kind(["a", 3]), v=v)).write(tmp_path / "c")


@pytest.mark.parametrize(
    "make",
    [
        np.random.default_rng, lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda seed: np.random.Generator(np.random.Philox(seed)), np.random.RandomState, random.Random,
    ],
    ids=["PCG64", "MT19937", "Philox", "RandomState", "random"],
)
@pytest.mark.parametrize("where", ["attribute", "argument"])
def test_random_generators_go_on_where_they_were(make: Any, where: str, tmp_path: Path) -> None:
    def hold(generator: Any) -> Checkpoint:
        if where == "argument":
            return Checkpoint(x=generator, v=variable(1.0))
        return Checkpoint(x=SimpleNamespace(dropout=generator), v=variable(1.0))

    def draw(generator: Any) -> list[float]:
        normal = generator.gauss if isinstance(generator, random.Random) else generator.normal
        return [normal(0.0, 1.0) for _ in range(5)]

    saved, fresh = make(1), make(2)
    draw(saved)
    path = hold(saved).write(tmp_path / "c")
    expected = draw(saved)
    hold(fresh).read(path).assert_consumed()
    assert draw(fresh) == expected


def test_the_state_of_another_generator_is_an_error(tmp_path: Path) -> None:
    path = Checkpoint(x=np.random.default_rng(1)).write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"generator random\.Random, the checkpoint has that of numpy PCG64"):
        Checkpoint(x=random.Random(1)).read(path)
    Checkpoint(x=SimpleNamespace(v=variable(1.0), system=random.SystemRandom())).write(tmp_path / "d")


def test_a_generator_of_another_library_would_be_lost(tmp_path: Path) -> None:
    generator = pytest.importorskip("torch", reason="PyTorch is not installed").Generator()
    with pytest.raises(ValueError, match=r"'m/dropout': .*got .* of type Generator, .*would be lost\. Make it"):
        Checkpoint(m=SimpleNamespace(dropout=generator, v=variable(1.0))).write(tmp_path / "c")


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (lambda array: SimpleNamespace(mean=array), "m/mean"), (lambda array: [{"a": array}], "m/0/a"),
        (lambda array: SimpleNamespace(pair=(array, 1)), "m/pair/0"), (lambda _: {"count": 3}, "m/count"),
        (lambda _: [0.5], "m/0"), (lambda array: [array[0]], "m/0"),
        (lambda _: SimpleNamespace(mean=array.array("d", [0.0])), "m/mean"),
    ],
)
def test_what_would_be_lost_is_an_error_of_save(build: Any, path: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(m=build(np.zeros(3)), v=variable(1.0))
    with pytest.raises(ValueError, match=rf"'{path}': .*got .* of type \w+, .*would be lost\. Make it"):
        checkpoint.write(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_an_array_of_another_library_would_be_lost(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    check_that_an_array_would_be_lost(torch.zeros(3), variable(1.0), tmp_path)


def check_that_an_array_would_be_lost(zeros: Any, saved: BaseVariable, folder: Path) -> None:
    for place, path in ((SimpleNamespace(mean=zeros), "m/mean"), ([zeros], "m/0"), (Record(zeros), "m/weight")):
        checkpoint = Checkpoint(m=place, v=saved)
        with pytest.raises(ValueError, match=rf"'{path}': .*got an array of shape .*\[?3.* would be lost"):
            checkpoint.write(folder / "c")
    with pytest.raises(ValueError, match="was expecting m to be a variable"):
        Checkpoint(m=zeros)


def test_constants_and_settings_are_no_error(tmp_path: Path) -> None:
    mask = np.ones(3)
    mask.flags.writeable = False
    settings = SimpleNamespace(units=3, shape=(4, 5), rates=[0.1], name="x", mask=mask, v=variable(1.0))
    Checkpoint(m=settings).write(tmp_path / "c")


def test_plain_numbers_that_have_changed_are_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = Record(variable(0.0))
    trainer = SimpleNamespace(
        v=variable(1.0), epoch=0, rate=np.float32(0.1), losses=[], best={}, seen=set(), is_built=False, units=3,
        sizes=[2, 3], unknown=np.nan, name="x", record=record,
    )
    checkpoint = Checkpoint(trainer, alias=trainer, parts=[record])

    def warnings() -> list[str]:
        caplog.clear()
        checkpoint.write(tmp_path / "c")
        return [entry.getMessage() for entry in caplog.records]

    trainer.is_built, trainer.inputs = True, 4
    assert warnings() == []
    trainer.epoch += 1
    trainer.losses.append(0.5)
    trainer.best["loss"] = 0.5
    trainer.seen.add(7)
    record.steps += 1
    (text,) = warnings()
    assert "c.h5' does not hold 'best', 'epoch', 'losses', 'record/steps', 'seen': plain numbers, which have" in text
    trainer.epoch += 1
    assert warnings() == []
    # A list that becomes a number, and a number that came after the first save.
    trainer.sizes, trainer.inputs, trainer.rate = np.float64(2), 5, np.float64(0.2)
    (text,) = warnings()
    assert "does not hold 'inputs', 'rate', 'sizes': plain" in text
    assert warnings() == []


def test_plain_values_of_an_object_are_not_looked_into() -> None:
    settings = SimpleNamespace(words={str(n): n for n in range(1000)}, scores=[0.5] * 1000, v=variable(1.0))
    calls = calls_of(lambda: walk([((), settings)]))
    # The object, the dictionary and the list.
    assert calls.count(("attributes.py", "has_children")) == 3


def test_a_checkpoint_asks_for_no_state_when_it_is_made(tmp_path: Path) -> None:
    class Counting:
        calls = 0

        def state(self) -> dict[str, int]:
            self.calls += 1
            return {"calls": self.calls}

        def load_state(self, saved: Any) -> None:
            raise NotImplementedError

    counting = Counting()
    checkpoint = Checkpoint({"root": counting}, counting=counting)
    assert counting.calls == 0
    checkpoint.write(tmp_path / "c")
    assert counting.calls == 1


@pytest.mark.parametrize("value", [3, 0.5, np.zeros(2), None])
def test_plain_values_cannot_be_set_as_attributes(value: Any) -> None:
    checkpoint: Any = Checkpoint(v=variable(1.0))
    with pytest.raises(ValueError, match="was expecting epoch to be a variable"):
        checkpoint.epoch = value


class Dense(Module):
    """A layer as people write it with NumPy: it keeps its input for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = variable([1.0, 2.0])

    def call(self, x: npt.NDArray[np.float64]) -> None:
        self._x = x
        self._cache: Any = {"x": x, "all": [x, x]}
        self._state = variable(x)
        self._helper = SimpleNamespace(kept=variable(3.0))


def test_an_array_in_a_hidden_attribute_of_a_module_is_a_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer: Any = Dense()
    fresh = Dense()
    for one in (layer, fresh):
        one.call(np.arange(2.0))
    checkpoint = Checkpoint(model=[layer])
    layer.kernel.assign([5.0, 6.0])
    path = checkpoint.save(tmp_path / "c")
    (line,) = caplog.records
    assert "does not hold 'model/0/_cache/all/0', 'model/0/_cache/all/1', 'model/0/_cache/x', 'model/0/_x': " in (
        line.getMessage()
    )
    checkpoint.save(tmp_path / "c")
    assert len(caplog.records) == 1
    # Variables and objects are saved wherever they are.
    assert list(checkpoint.find_objects().leaves) == ["model/0/_helper/kept", "model/0/_state", "model/0/kernel"]
    Checkpoint(model=[fresh]).restore(path).assert_consumed()
    assert fresh.kernel.numpy().tolist() == [5.0, 6.0]
    # The same array under another name is not, nor is one of another object.
    layer.x = layer._x
    with pytest.raises(ValueError, match=r"'model/0/x': .*would be lost\. .*begin with `_`, such as `self\._x`"):
        checkpoint.save(tmp_path / "c")
    del layer.x
    layer._helper.table = np.zeros(2)
    with pytest.raises(ValueError, match=r"'model/0/_helper/table': .*would be lost"):
        checkpoint.save(tmp_path / "c")
    for holder in (SimpleNamespace(_x=np.zeros(2)), {"_x": np.zeros(2)}):
        with pytest.raises(ValueError, match=r"'o/_x': .*would be lost"):
            Checkpoint(o=holder, v=variable(0.0)).save(tmp_path / "c")


class Layers(Module, UserList[Any]):
    """A module that is a list, too."""

    def __init__(self) -> None:
        Module.__init__(self)
        UserList.__init__(self, [variable(1.0)])


def test_a_module_that_is_a_list_has_caches_too() -> None:
    layers = Layers()
    layers._x, layers.y = np.zeros(2), np.zeros(2)
    found = walk([(("m",), layers)])
    assert (found.caches, list(found.lost)) == (["m/_x"], ["m/y"])


def test_a_checkpoint_in_a_checkpoint_is_an_object_like_others(tmp_path: Path) -> None:
    """As in TensorFlow's guide: only a part of a model is read, and a part of that later."""
    net = SimpleNamespace(l1=SimpleNamespace(bias=variable([1.0, 2.0]), kernel=variable([[3.0]])))
    path = Checkpoint(net=net).write(tmp_path / "nested")
    bias, kernel = variable([0.0, 0.0]), variable([[0.0]])
    layer = Checkpoint(bias=bias)
    status = Checkpoint(net=Checkpoint(l1=layer)).read(path)
    assert bias.numpy().tolist() == [1.0, 2.0]
    layer.kernel = kernel
    assert kernel.numpy().tolist() == [[3.0]]
    status.assert_consumed()
    # And the other way round: its objects, also those of its root, are saved under its path.
    outer = Checkpoint(net=Checkpoint(SimpleNamespace(l1=layer), extra=variable(7.0)))
    assert sorted(outer.find_objects().leaves) == ["net/extra", "net/l1/bias", "net/l1/kernel"]
    path = outer.save(tmp_path / "outer")
    kernel.assign([[9.0]])
    outer.restore(path).assert_consumed()
    assert kernel.numpy() == 3.0
    layer.itself = layer
    assert len(outer.find_objects().leaves) == 3
