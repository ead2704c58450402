"""Handles: what arguments name is sent by its name, however deep it lies in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpidist.parameter_server.protocol.references import dump_arguments, dump_function, load


class Named:
    """Is sent by its name."""


class Pair(NamedTuple):
    """A tuple of a kind of its own."""

    left: object
    right: object


NAMED = Named()
NESTS: dict[str, Callable[[object], object]] = {
    "list": lambda one: [1, [one]],
    "dictionary": lambda one: {"a": {"b": one}},
    "deep nest": lambda one: [[[[[[[[[[[[one]]]]]]]]]]]],
    "tuple of a kind": lambda one: (1.0, Pair(np.ones(3), one)),
    "array of objects": lambda one: np.array([one, 3], dtype=object),
    "metadata of an array": lambda one: np.zeros(2, np.dtype("f8", metadata={"a": one})),
}


def handle_of(given: object) -> tuple[Any, ...] | None:
    return ("named", 7) if given is NAMED else None


def find(handle: tuple[Any, ...]) -> object:
    assert handle == ("named", 7)
    return NAMED


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_what_is_named_comes_back_as_itself(nest: Callable[[object], object]) -> None:
    loaded = load(dump_arguments((nest(NAMED), "text"), handle_of), find)[0]
    while loaded is not NAMED:
        if isinstance(loaded, np.ndarray):
            loaded = loaded[0] if loaded.dtype.hasobject else loaded.dtype.metadata["a"]
        else:
            loaded = list(loaded.values())[-1] if isinstance(loaded, dict) else loaded[-1]


def test_plain_arguments_are_themselves() -> None:
    array = np.arange(6, dtype="complex64").reshape(2, 3)[:, ::2]
    given = ((None, True, 2**70, 1.5, "text", b"bytes", np.float32(2)), {"array": array, "nest": [[], {}, ()]})
    loaded = load(dump_arguments(given, handle_of), find)
    np.testing.assert_array_equal(loaded[1].pop("array"), array)
    assert loaded == (given[0], {"nest": [[], {}, ()]})
    assert type(loaded[0][-1]) is np.float32


def test_a_list_that_holds_itself() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    loaded = load(dump_arguments(circle, handle_of), find)
    assert loaded[0] == 1
    assert loaded[1] is loaded


def test_functions_sent_by_their_code_know_their_lines() -> None:
    """Reports and tracebacks of workers name them."""
    program = "def outer():\n    def inner():\n        return 1\n    return inner\n"
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "/home/me/program.py", "exec"), space)
    loaded = load(dump_function(space["outer"], handle_of), find)
    assert loaded is not space["outer"]
    for function, line in ((loaded, 1), (loaded(), 2)):
        assert (function.__code__.co_filename, function.__code__.co_firstlineno) == ("/home/me/program.py", line)
    assert loaded()() == 1
