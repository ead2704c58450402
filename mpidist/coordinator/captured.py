"""The objects that a function uses besides its arguments: the function's identity, and their changes."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

# Stands for what does not exist when a function is sent.
_NOT_YET = object()


class _Space(Protocol):
    """Names and what they are bound to at the moment."""

    def get(self, name: str, default: object, /) -> Any:
        """Local. See `dict.get`."""
        ...


class Use(NamedTuple):
    """A name that a function uses: a global variable, or one of those of `kind`.

    Attributes:
        space: The namespace in which the name is bound.
        name: The name.
        value: The object to which it was bound when the function was sent.
        kind: The kind, for the texts of errors.
    """

    space: _Space
    name: str
    value: object
    kind: str = "global"


class _Cells:
    """The variables of surrounding functions that a function uses."""

    def __init__(self, function: object) -> None:
        self._function = function

    def get(self, name: str, default: object, /) -> Any:
        """Local. See `dict.get`."""
        return dict(_cells(self._function)).get(name, default)


class _Slots:
    """The attributes of an object whose class has `__slots__`."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def get(self, name: str, default: object, /) -> Any:
        """Local. See `dict.get`."""
        return getattr(self._owner, name, default)


class Uses:
    """The names that a function used when it was sent, and what they were bound to.

    Args:
        fn: The function.
    """

    def __init__(self, fn: object) -> None:
        spaces = _spaces_of(fn)
        attributes = [
            Use(space, name, value, "attribute") for space in spaces for name, value in list(space.items())
            if not _is_pythons(name)
        ]
        self._uses = [*_globals_of(fn, set()), *attributes, *_slots_of(fn)]
        self._spaces = [(space, frozenset(space)) for space in spaces]

    def changed(self) -> Use | None:
        """Local. A name that is now bound to another object, or is new since the function was sent; else None."""
        for one in self._uses:
            if one.space.get(one.name, one.value) is not one.value:
                return one
        for space, known in self._spaces:
            # At each use of the function: new names are looked for only where there are some.
            if space.keys() != known:
                for name in space:
                    if name not in known and not _is_pythons(name):
                        return Use(space, name, space[name], "attribute")
        return None


def identity(fn: Callable[..., Any]) -> tuple[tuple[Any, ...], list[object]]:
    """Local. The marks of a function: its code, what it captures and whose method it is; and the objects in them."""
    if isinstance(fn, functools.partial):
        key, parts = identity(fn.func)
        given = [*fn.args, *fn.keywords.values()]
        return (key, tuple(map(id, given)), tuple(fn.keywords)), [*parts, *given]
    function = getattr(fn, "__func__", fn)
    cells = dict(_cells(function))
    parts = [
        getattr(function, "__code__", function), getattr(fn, "__self__", None), *cells.values(),
        getattr(function, "__defaults__", None), *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]
    return (tuple(map(id, parts)), tuple(cells)), parts


def captured(fn: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    """Local. The things that a function is sent with, by its names."""
    if isinstance(fn, functools.partial):
        yield from captured(fn.func)
        yield from ((f"its argument {number}", value) for number, value in enumerate(fn.args))
        yield from ((f"its argument {name!r}", value) for name, value in fn.keywords.items())
        return
    function = getattr(fn, "__func__", fn)
    if hasattr(fn, "__self__"):
        yield "`self`", fn.__self__
    uses = ((one.name, one.value) for one in _globals_of(fn, set()) if one.value is not _NOT_YET)
    for name, value in [*_cells(function), *uses]:
        yield repr(name), value


def _cells(function: object) -> Iterator[tuple[str, object]]:
    """The variables of the surrounding functions that a function uses."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # The function names what does not exist yet.
            continue


def _globals_of(fn: object, seen: set[int]) -> Iterator[Use]:
    """The globals that a function is sent with; also those of the functions that it calls, with their variables."""
    if isinstance(fn, functools.partial):
        for one in (fn.func, *fn.args, *fn.keywords.values()):
            yield from _globals_of(one, seen)
    function = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType) or id(function) in seen or _has_a_name(function):
        return
    # The variables of `fn` itself identify the function: see `identity`.
    variables = [Use(_Cells(function), name, value, "variable") for name, value in _cells(function)] if seen else []
    seen.add(id(function))
    yield from variables
    space = function.__globals__
    for name in _global_names(function.__code__):
        yield Use(space, name, space.get(name, _NOT_YET))
        yield from _globals_of(space.get(name), seen)
    for _, value in _cells(function):
        yield from _globals_of(value, seen)


def _spaces_of(fn: object) -> list[Mapping[str, Any]]:
    """The attributes of the object whose method a function is, or that is called itself, and of its program's classes.

    A worker imports other classes, as it imports the functions of modules.
    """
    owner = _owner_of(fn)
    if isinstance(owner, types.ModuleType):
        return []
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    spaces: list[Mapping[str, Any]] = [vars(kind) for kind in kinds if kind.__module__ == "__main__"]
    return spaces if isinstance(owner, type) else [getattr(owner, "__dict__", {}), *spaces]


def _slots_of(fn: object) -> Iterator[Use]:
    """The attributes of that object which its classes name in `__slots__`."""
    owner = _owner_of(fn)
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if not _is_pythons(name):
                yield Use(_Slots(owner), name, getattr(owner, name, _NOT_YET), "attribute")


def _owner_of(fn: object) -> object:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__self__", fn)


def _is_pythons(name: str) -> bool:
    """Whether an attribute is one of Python's own, which may change with each look at an object."""
    return name.startswith("__")


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _has_a_name(function: types.FunctionType) -> bool:
    """Whether a worker imports the function, and so has globals of its own."""
    found: object = None if function.__module__ == "__main__" else sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function
