"""Modules: which variables and modules they find, and in which order."""

from __future__ import annotations

import copy
import pickle
from collections import ChainMap, UserDict, UserList, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.walk.objects import walk
from mpidist.variables.module import Module

Pair = namedtuple("Pair", "first second")


class Dense(Module):
    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__(name)
        self.kernel = mpidist.Variable(np.zeros((size, size)), name=f"kernel{size}")
        self.bias = mpidist.Variable(np.zeros(size), name=f"bias{size}")
        self.count = mpidist.Variable(0, trainable=False, name=f"count{size}")


class Plain:
    """No module; a module that holds it finds its variables."""

    def __init__(self, value: Any) -> None:
        self.value = value


def names(variables: Any) -> list[str]:
    return [variable.name for variable in variables]


def test_own_variables_in_the_order_of_attributes() -> None:
    module = Dense(2)
    assert names(module.variables) == ["bias2", "count2", "kernel2"]
    assert names(module.trainable_variables) == ["bias2", "kernel2"]
    assert names(module.non_trainable_variables) == ["count2"]
    assert module.submodules == ()
    assert module.variables[0] is module.bias


def test_names() -> None:
    class HTTPDenseLayer2D(Module):
        pass

    class Silent(Module):
        def __init__(self) -> None:  # does not call the base class
            self.x = 1

    assert (Dense(1).name, Dense(1, "mine").name) == ("dense", "mine")
    assert (HTTPDenseLayer2D().name, Silent().name) == ("http_dense_layer2_d", "silent")
    for bad in ("a b", "", "1x"):
        with pytest.raises(ValueError, match="must be a Python identifier"):
            Module(bad)


def test_own_variables_come_before_those_of_what_is_held() -> None:
    outer: Any = Module("outer")
    outer.a = inner = Dense(3)
    outer.b = mpidist.Variable(1.0, name="own")
    outer.c = [Dense(1), {"z": (Dense(2),), "y": mpidist.Variable(2.0, name="deep")}, None, 5, "text"]
    outer.d = Plain(Pair(mpidist.Variable(3.0, name="in a pair"), inner))
    outer.e = SimpleNamespace(inside=mpidist.Variable(4.0, name="in a namespace"))
    assert names(outer.variables) == [
        "own", "deep", "bias3", "count3", "kernel3", "bias1", "count1", "kernel1", "bias2", "count2", "kernel2",
        "in a pair", "in a namespace",
    ]
    assert outer.submodules == (inner, outer.c[0], outer.c[1]["z"][0])


def test_cycles_and_shared_ones_count_once() -> None:
    first: Any = Module("first")
    second: Any = Module("second")
    shared = mpidist.Variable(1.0, name="shared")
    first.other, second.other = second, first
    first.v = second.v = first.again = shared
    first.loop = loop = [shared]
    loop.append(loop)  # type: ignore[arg-type]  # that is the point
    assert names(first.variables) == ["shared"]
    assert first.submodules == (second,)
    assert second.submodules == (first,)


def test_a_long_chain_is_no_deep_recursion() -> None:
    first: Any = Module()
    last = first
    for number in range(5000):
        last.next = Module()
        last = last.next
        last.number = number
    last.v = mpidist.Variable(1.0, name="end")
    assert names(first.variables) == ["end"]
    assert len(first.submodules) == 5000


def test_metrics_are_followed_and_optimizers_are_not() -> None:
    module: Any = Dense(1)
    module.optimizer = mpidist.optimizers.Adam(0.1)
    module.optimizer.build([mpidist.Variable([1.0], name="of another model")])
    module.strategy = mpidist.get_strategy()
    module.array = np.zeros(3)
    module.kind = Dense
    before = len(module.variables)
    assert before == 3
    module.metric = mpidist.metrics.Mean()
    assert len(module.variables) > before
    assert names(module.trainable_variables) == ["bias1", "kernel1"]


def test_gradients_flow_through_the_list() -> None:
    module = Dense(1)
    optimizer = mpidist.optimizers.SGD(1.0)
    variables = module.trainable_variables
    optimizer.apply_gradients(zip([np.ones(v.shape) for v in variables], variables, strict=True))
    assert module.bias.numpy() == -1


def test_integer_keys_are_ordered_as_numbers() -> None:
    module = Module()
    holder: Any = module
    holder.layers = {
        key: mpidist.Variable(0.0, name=f"key {key}") for key in (10, "b", 2, -1, "10", 1, ("x", 2))
    }
    assert names(module.variables) == [f"key {key}" for key in (-1, 1, 2, 10, ("x", 2), "10", "b")]


@dataclass(slots=True)
class Record:
    weight: mpidist.Variable


class Slotted(Module):
    __slots__ = ("__hidden", "layer", "unset")

    def __init__(self) -> None:
        super().__init__()
        self.bias = mpidist.Variable(1.0, name="bias")
        self.layer = Dense(1)
        self.__hidden = mpidist.Variable(2.0, name="hidden")

    def hidden(self) -> Any:
        return self.__hidden


@pytest.mark.parametrize(
    "hold",
    [
        lambda v: SimpleNamespace(x=v), lambda v: deque([v]), lambda v: UserList([v]), lambda v: UserDict(x=v),
        lambda v: MappingProxyType({"x": v}), Record, lambda v: ChainMap({}, {"x": v}),
        lambda v: ChainMap({"x": 1}, {"x": v}), lambda v: deque([UserDict(x=[Record(v)])]),
    ],
    ids=["namespace", "deque", "UserList", "UserDict", "mappingproxy", "slots", "ChainMap", "hidden", "nested"],
)
def test_a_module_finds_what_a_checkpoint_finds(hold: Any) -> None:
    module: Any = Module()
    held = mpidist.Variable(1.0, name="held")
    module.place = hold(held)
    assert module.variables == (held,)
    assert [leaf.value for leaf in walk([((), module)]).leaves.values()] == [held]


def test_slots_of_a_module_are_attributes_also_of_its_copy() -> None:
    module = Slotted()
    assert names(module.variables) == ["hidden", "bias", "bias1", "count1", "kernel1"]
    assert module.submodules == (module.layer,)
    twin = copy.copy(module)
    assert (twin.layer, twin.hidden(), hasattr(twin, "unset")) == (module.layer, module.hidden(), False)
    plain: Any = Module("plain")
    plain.size = 3
    assert pickle.loads(pickle.dumps(plain)).size == 3


def test_a_module_that_is_a_list_has_items_and_attributes() -> None:
    class Layers(Module, list):  # type: ignore[type-arg]  # of anything
        pass

    layers: Any = Layers()
    layers.append(mpidist.Variable(1.0, name="item"))
    layers.scale = mpidist.Variable(2.0, name="attribute")
    outer: Any = Module()
    outer.layers = layers
    assert names(layers.variables) == names(outer.variables) == ["item", "attribute"]
    assert outer.submodules == (layers,)


def test_members_of_sets_and_objects_of_libraries_are_not_searched() -> None:
    module: Any = Module()
    module.kinds = {mpidist.Variable(1.0)}
    module.numbers = np.ma.MaskedArray([1.0])
    assert module.variables == ()
