"""Sent functions: what they have captured is the same at each call."""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest

from mpidist.parameter_server.worker import sent_function
from mpidist.parameter_server.worker.sent_function import SentFunction

# Their globals are those of no module: they are sent by their code.
SPACE: dict[str, Any] = {
    "__name__": "__main__", "HISTORY": [1, 2], "TABLE": {"a": [0]}, "COUNT": 0, "MODEL": None, "np": np,
    "ARRAYS": {"one": np.zeros(3)},
}
exec("""
def append():
    HISTORY.append(3)
    return len(HISTORY)

def append_within():
    TABLE["a"].append(1)

def count():
    global COUNT
    COUNT += 1
    return COUNT

def load_once():
    global MODEL
    if MODEL is None:
        MODEL = Model()
    MODEL.calls += 1
    return MODEL.calls

class Model:
    calls = 0

def write():
    ARRAYS["one"][0] = 1

def by_another():
    return append()

def raises():
    HISTORY.clear()
    raise LookupError("of the function")

def default(given=[]):
    given.append(1)
    return len(given)

def keyword(*, given={}):
    given[1] = 1

def reads():
    return HISTORY, TABLE, COUNT, float(ARRAYS["one"].sum())
""", SPACE)


class Pair(NamedTuple):
    """A tuple with names."""

    first: list[int]
    second: int


def loaded(name: str) -> SentFunction:
    """A function as a worker has it."""
    return SentFunction(cloudpickle.loads(cloudpickle.dumps(SPACE[name])))


def closure(value: object, change: Callable[[Any], object]) -> Callable[[], object]:
    """A function that changes a value that it has captured, and returns it."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def make(value, change):\n    def fn():\n        change(value)\n        return value\n    return fn", space)
    made: Callable[[], object] = space["make"](value, change)
    return made


@pytest.mark.parametrize(("name", "what"), [
    ("append", "'HISTORY', a list"), ("append_within", "'TABLE', or what is in it, a list"), ("count", "'COUNT'"),
    ("by_another", "'HISTORY', a list"), ("default", "the default of 'given', a list"),
    ("keyword", "the default of 'given', a dict"),
])
def test_a_change_is_an_error_each_time_and_undone(name: str, what: str) -> None:
    function = loaded(name)
    for _ in range(3):
        with pytest.raises(TypeError) as caught:
            function()
        assert str(caught.value).startswith(f"function {name!r} has changed {what}, which was sent with it: each work")
        assert "create_per_worker_value" in str(caught.value)


def test_the_error_of_a_function_stays_and_the_change_is_undone() -> None:
    function = loaded("raises")
    for _ in range(2):
        with pytest.raises(LookupError, match="of the function"):
            function()
    (history,) = [one.container for one in function._contents]
    assert history == [1, 2]


def test_who_reads_only_gets_what_was_sent() -> None:
    function = loaded("reads")
    assert [function() for _ in range(2)] == [([1, 2], {"a": [0]}, 0, 0.0)] * 2


def test_arrays_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only") as caught:
        loaded("write")()
    if hasattr(caught.value, "__notes__"):
        assert "create_per_worker_value" in caught.value.__notes__[0]


def test_an_object_of_a_class_is_the_workers_own() -> None:
    """A model that is loaded at the first use, for instance."""
    function = loaded("load_once")
    assert [function() for _ in range(3)] == [1, 2, 3]
    own = types.SimpleNamespace(calls=0)

    def count(value: Any) -> None:
        value.calls += 1

    function = SentFunction(closure(own, count))
    function()
    assert own.calls == 1


def test_a_value_of_the_workers_own_may_change() -> None:
    own = {"n": 0}
    function = SentFunction(closure(own, lambda value: value.update(n=value["n"] + 1)), [own])
    function()
    assert function() == {"n": 2}


@pytest.mark.parametrize(("value", "change"), [
    ([1, [2, {3: 4}]], lambda value: value[1][1].update({3: 5})),
    ((1, [2]), lambda value: value[1].append(3)),
    (Pair([1], 2), lambda value: value.first.append(3)),
    ({"a": 1.5}, lambda value: value.update(a=float("nan"))),
    ({1, 2}, lambda value: value.add(3)),
    (bytearray(b"ab"), lambda value: value.extend(b"c")),
    (deque([1], maxlen=3), lambda value: value.append(2)),
    (defaultdict(list), lambda value: value[3]),
    (OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    (Counter("ab"), lambda value: value.update("b")),
    ([None], lambda value: value.__setitem__(0, [])),
    ([object()], lambda value: value.__setitem__(0, object())),
])
def test_every_kind_is_compared(value: Any, change: Callable[[Any], object]) -> None:
    before = cloudpickle.dumps(value)
    function = SentFunction(closure(value, change))
    with pytest.raises(TypeError, match="has changed 'value'"):
        function()
    if not isinstance(value, list) or type(value[0]) is not object:
        assert cloudpickle.dumps(value) == before


def test_equal_numbers_and_texts_are_no_change() -> None:
    value = [10**20, "text", 2.5, {"a": 10**20}]

    def rewrite(value: Any) -> None:
        value[0], value[1], value[2] = int("1" + "0" * 20), "".join(["tex", "t"]), float("2.5")
        value[3]["a"] = int("1" + "0" * 20)

    function = SentFunction(closure(value, rewrite))
    assert function() is value


@pytest.mark.parametrize(("kind", "changes"), [
    (list, [
        lambda one: one.append(1), lambda one: one.__setitem__(0, 5), lambda one: one.sort(), lambda one: one.pop(),
        lambda one: one.__iadd__([1]),
    ]),
    (dict, [lambda one: one.update(a=1), lambda one: one.pop(3), lambda one: one.setdefault(-1, 2)]),
    (set, [lambda one: one.add(-1), lambda one: one.discard(3), lambda one: one.__ior__({-1})]),
])
def test_a_large_one_cannot_be_changed(kind: Any, changes: list[Callable[[Any], object]]) -> None:
    numbers = range(sent_function.COMPARED_ELEMENTS + 1)
    value = kind(numbers) if kind is not dict else dict.fromkeys(numbers, 0)
    for change in changes:
        function = SentFunction(closure(value, change))
        for _ in range(2):
            with pytest.raises(TypeError, match=f"a {kind.__name__} that was sent with a function cannot be changed"):
                function()
    found: Any = SentFunction(closure(value, lambda one: None))()
    assert found == value
    assert isinstance(found, kind)
    # As a result it is one of the usual kind.
    assert type(cloudpickle.loads(cloudpickle.dumps(found))) is kind


def test_arguments_of_a_partial_are_captured() -> None:
    value: list[int] = []
    function = SentFunction(functools.partial(list.append, value, 1))
    with pytest.raises(TypeError, match="has changed its argument 0, a list"):
        function()
    assert value == []


def test_functions_of_modules_are_the_workers_own() -> None:
    assert SentFunction(np.sum)([1, 2]) == 3
    function = SentFunction(test_functions_of_modules_are_the_workers_own)
    assert function._names == []


def test_its_name_is_that_of_the_function() -> None:
    assert loaded("append").__qualname__ == "append"
    assert SentFunction(functools.partial(max, 1)).__qualname__ == "max"


def test_a_circle_is_looked_at_once() -> None:
    value: list[Any] = [1]
    value.append(value)
    function = SentFunction(closure(value, lambda one: one.append(2)))
    with pytest.raises(TypeError, match="has changed 'value'"):
        function()
    assert len(value) == 2
