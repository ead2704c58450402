"""Sent functions: the captured objects of a function are the same at each of its calls, whichever worker runs it.

Arrays cannot be written. Lists, dicts and sets, and names bound to them or to plain values, are compared after each
call: a change is undone, and is an error. Large ones cannot be changed at all, since comparing them would take longer
than the call. Objects of classes are the worker's own: a model, an open file.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpidist.recorder.recorder import name_of_function

# A list with more elements is not compared: that takes some 20 ns for each.
COMPARED_ELEMENTS = 8192
# Nothing in them can change.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_MUTABLE = (list, dict, set, bytearray, Counter, OrderedDict, defaultdict, deque)
_WAY_OUT = (
    "each worker would have its own copy, so results would depend on which worker runs what. Pass it as an argument "
    "and return it, or make one for each worker by `create_per_worker_value`"
)


class _Name(NamedTuple):
    """A name that a function uses, and the object to which it was bound.

    Attributes:
        name: A name for display and errors.
        get: A function that returns the object to which it is bound now.
        bind: A function that binds it to an object.
        value: The object to which it was bound.
    """

    name: str
    get: Callable[[], object]
    bind: Callable[[Any], None]
    value: object


class _Content(NamedTuple):
    """A container, and its content at the beginning.

    Attributes:
        name: The name by which the function refers to it.
        container: The container.
        content: A shallow copy of the container.
    """

    name: str
    container: Any
    content: Any


class SentFunction:
    """A function that was sent, and the values that it has captured.

    Args:
        function: The loaded function.
        own: The worker's own values, which the function may change.
    """

    def __init__(self, function: Callable[..., Any], own: Sequence[object] = ()) -> None:
        self.__qualname__ = name_of_function(function)
        self._function = function
        self._names: list[_Name] = []
        self._contents: list[_Content] = []
        # Objects that were looked at: by identity, and held so that no other gets it.
        self._seen: dict[int, object] = {id(one): one for one in own}
        self._take_function(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Local. Call the function.

        Raises:
            TypeError: The function has changed an object that it captured; the change is undone.
        """
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            self._restore()
            if isinstance(error, ValueError) and "read-only" in str(error) and hasattr(error, "add_note"):
                error.add_note(f"An array that was sent with a function cannot be changed: {_WAY_OUT}")
            raise
        changed = self._restore()
        if changed:
            raise TypeError(
                f"function {self.__qualname__!r} has changed {changed}, which was sent with it: {_WAY_OUT}"
            )
        return result

    def _restore(self) -> str:
        """Undo the function's changes; return the name of a changed object, if there is one."""
        changed = ""
        for one in self._names:
            value = _value_of(one)
            if value is not one.value and not _is_own(value):
                changed = one.name
                one.bind(one.value)
        for name, container, content in self._contents:
            if not _is_same(container, content):
                changed = name
                _refill(container, content)
        return changed

    def _take_function(self, function: object) -> None:
        if isinstance(function, functools.partial):
            self._take_function(function.func)
            for number, value in enumerate(function.args):
                self._take(f"its argument {number}", value)
            for name, value in function.keywords.items():
                self._take(f"its argument {name!r}", value)
            return
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or id(function) in self._seen or _is_imported(function):
            return
        self._seen[id(function)] = function
        for place in _names_of(function):
            if self._take(place.name, place.value, place.bind):
                # A large value is another one now.
                self._names.append(place._replace(value=place.get()))
        for name, value in _defaults_of(function):
            self._take(f"the default of {name!r}", value)

    def _take(self, name: str, value: Any, bind: Callable[[Any], None] | None = None) -> bool:
        """Note a value; returns whether the name must stay bound to it."""
        if id(value) in self._seen:
            return False
        if isinstance(value, _PLAIN):
            return True
        kind = type(value)
        if kind is np.ndarray:
            self._seen[id(value)] = value
            value.setflags(write=False)
            return True
        if isinstance(value, tuple):
            for one in value:
                self._take(f"{name}, or what is in it", one)
            return True
        if kind in _MUTABLE:
            self._seen[id(value)] = value
            self._take_container(name, value, bind)
            return True
        self._take_function(value)
        return False

    def _take_container(self, name: str, value: Any, bind: Callable[[Any], None] | None) -> None:
        if len(value) > COMPARED_ELEMENTS and type(value) in _FIXED and bind is not None:
            bind(_FIXED[type(value)](value))
        else:
            self._contents.append(_Content(f"{name}, a {type(value).__name__}", value, value.copy()))
        inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, (list, deque)) else ()
        for one in inner:
            if not isinstance(one, _PLAIN):
                self._take(f"{name}, or what is in it", one)


def _is_imported(function: FunctionType) -> bool:
    """Whether a function is of a module of this process, which is the worker's own."""
    module = sys.modules.get(function.__module__ or "")
    return module is not None and function.__globals__ is vars(module)


def _names_of(function: FunctionType) -> Iterator[_Name]:
    """The variables of surrounding functions and the globals with which a function was sent."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            # The function names what did not exist yet.
            continue
        get = functools.partial(getattr, cell, "cell_contents", None)
        yield _Name(repr(name), get, functools.partial(setattr, cell, "cell_contents"), value)
    space = function.__globals__
    for name, value in list(space.items()):
        if not name.startswith("__"):
            bind = functools.partial(space.__setitem__, name)
            yield _Name(repr(name), functools.partial(space.get, name), bind, value)


def _value_of(name: _Name) -> object:
    try:
        return name.get()
    except ValueError:
        # It is bound to nothing any more.
        return None


def _defaults_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _is_own(value: object) -> bool:
    """Whether a worker may keep a value: an object of a class."""
    return not isinstance(value, (*_PLAIN, *_MUTABLE, tuple, np.ndarray))


def _is_same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, (list, deque)):
        return all(map(_are_same, container, content))
    if isinstance(container, dict):
        return all(map(_are_same, container, content)) and all(map(_are_same, container.values(), content.values()))
    # Sets have hashable elements, which have no state that counts; a bytearray has numbers.
    return bool(container == content)


def _are_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (list, bytearray, deque)):
        container.extend(content)
    else:
        container.update(content)


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    kind = type(self).__mro__[1].__name__
    raise TypeError(f"a {kind} that was sent with a function cannot be changed: {_WAY_OUT}")


def _plain_again(self: Any, _: object) -> tuple[Any, ...]:
    """As a result, or copied, it is one of the usual kind."""
    kind = type(self).__mro__[1]
    return kind, (kind(self.items()) if kind is dict else kind(self),)


def _fixed(kind: type, *names: str) -> type:
    return type(f"Fixed{kind.__name__.title()}", (kind,), {
        "__slots__": (), "__reduce_ex__": _plain_again, "__doc__": f"A captured {kind.__name__}, which is large.",
        **dict.fromkeys(names, _refuse),
    })


_FIXED: dict[type, type] = {
    list: _fixed(
        list, "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "extend", "insert", "pop", "remove",
        "clear", "sort", "reverse",
    ),
    dict: _fixed(
        dict, "__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update",
    ),
    set: _fixed(
        set, "__iand__", "__ior__", "__isub__", "__ixor__", "add", "clear", "difference_update", "discard",
        "intersection_update", "pop", "remove", "symmetric_difference_update", "update",
    ),
}
