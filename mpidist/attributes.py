"""The attributes of objects: what a checkpoint or a module finds in them, and which ones may be set."""

from __future__ import annotations

import array
import contextlib
import sys
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

CONTAINERS = (dict, list, tuple, deque, types.MappingProxyType, UserDict, UserList)
SETS = (set, frozenset)
PLAIN = {str, bytes, bool, int, float, complex, types.NoneType}

# The walk does not enter objects of these packages: none is the user's, and some lead to all that the program has.
_OPAQUE = sys.stdlib_module_names | {"numpy", "h5py", "mpi4py"}
# These classes of the standard library also hold the user's objects. A `ChainMap` has a list of dictionaries, and so
# also yields values of keys that an earlier dictionary hides.
_OPENED = (types.SimpleNamespace, ChainMap)
# Packages of this library.
_OPAQUE_HERE = {
    "comm", "cluster", "strategy", "checkpoint", "parameter_server", "coordinator", "failures", "recorder",
}


def is_array(value: object) -> bool:
    """Local. Whether this is an array of any library, or of Python's own."""
    return hasattr(type(value), "__dlpack__") or isinstance(value, array.array)


def has_children(value: object) -> bool:
    """Local. Whether a walk continues in `value`: a container, or an object with attributes that may be the user's."""
    if isinstance(value, (*CONTAINERS, *SETS)):
        return True
    kind = type(value)
    package, *rest = kind.__module__.split(".")
    is_opaque = package in _OPAQUE or (package == "mpidist" and rest[:1] and rest[0] in _OPAQUE_HERE)
    # Classes are no objects to save, whatever their metaclass; an array is more than the attributes that it may have.
    if isinstance(value, type) or is_array(value) or (is_opaque and kind not in _OPENED):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or slots_of(kind) != ()


def is_number(value: object) -> bool:
    """Local. Whether a plain value is a number; booleans are not."""
    return isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool)


def children_of(value: Any) -> list[tuple[Any, object]]:
    """Local. The items of a container by index or by key, or the attributes of an object, in the order of names.

    Integer keys come first, in the order of numbers.
    """
    content = value if isinstance(value, CONTAINERS) else attributes_of(value)
    if isinstance(content, Mapping):
        # Most often all are texts, or all numbers, which need no function to be put in order.
        place = None if set(map(type, content)) in ({str}, {int}) else _place
        return [(name, content[name]) for name in sorted(content, key=place)]
    return list(enumerate(content))


def _place(key: object) -> tuple[bool, int, str]:
    return (False, key, "") if isinstance(key, int) else (True, 0, str(key))


def attributes_of(value: object) -> dict[str, object]:
    """Local. The attributes of an object by name, also those that its classes keep in slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for name in slots_of(type(value)):
        with contextlib.suppress(AttributeError):
            attributes[name] = getattr(value, name)
    return attributes


def slots_of(kind: type) -> tuple[str, ...]:
    """Local. The names in `__slots__` of a class and of those that it extends."""
    names: list[str] = []
    for owner in kind.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{owner.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


class FixedAttributes:
    """Refuses assignments without an effect: to an attribute that does not exist, or to one that is fixed.

    Names that begin with an underscore are not checked, and properties have their own setters. A subclass in the
    program may add attributes of its own. The only cost is a call of Python for each assignment.
    """

    _assignable: ClassVar[frozenset[str]] = frozenset()
    # Public attributes that the constructor sets. Subclasses cannot set them again, either.
    _fixed: ClassVar[frozenset[str]] = frozenset()
    # True from the beginning in classes whose constructors set no public attribute.
    _is_settled: bool = False

    def _settle(self, owner: type) -> None:
        """Local. Refuse assignments from now on: the last line of a constructor.

        Args:
            owner: The class of the constructor. A constructor that extends it continues afterwards, and settles itself.
        """
        last = next(kind for kind in type(self).__mro__ if _is_ours(kind) and "__init__" in vars(kind))
        if last is owner:
            self._is_settled = True

    # Hidden from type checkers, which would take any name for one that may be set.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self._assignable and self._is_settled and not name.startswith("_"):
                self._require_assignable(name)
            super().__setattr__(name, value)

    def _require_assignable(self, name: str) -> None:
        kinds = type(self).__mro__
        found = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
        if isinstance(found, property) and found.fset is not None:
            return
        is_ours = _is_ours(kinds[0])
        has_it = name in self._fixed or any(name in vars(kind) for kind in kinds if _is_ours(kind))
        if not has_it and not is_ours:
            return
        has_it = has_it or name in vars(self)
        reason = "it is fixed when the object is created" if has_it else "it does not exist"
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be set, since {reason}: {self._way_out(name)}"
        )

    def _way_out(self, name: str) -> str:
        """Local. The advice in the error of an assignment that is refused."""
        near = get_close_matches(name, self._assignable, 1)
        if near:
            return f"did you mean {near[0]!r}?"
        way_out = "settings are arguments of the constructor: make another object"
        if not self._assignable:
            return way_out
        return f"only {', '.join(sorted(self._assignable))} may be set; {way_out}"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "mpidist"
