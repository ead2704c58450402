"""The module: a base class whose objects find the variables and modules that they hold, however nested."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from mpidist.variables.variable import Variable

# Objects of these packages are not searched: they are not the user's, and some lead to everything in the program.
_OPAQUE = sys.stdlib_module_names - {"__main__"} | {"numpy", "h5py", "mpi4py"}


# The attribute of a module that holds its watcher.
_WATCHER = "_watcher"


class Watcher(Protocol):
    """A listener for new attributes: a restored checkpoint with values for variables that do not exist yet.

    Attributes:
        number: The place in the order of watchers.
    """

    number: int

    def attribute_set(self, value: object) -> None:
        """Collective where `value` brings a new variable, else Local. React to an attribute that was set to `value`."""


class Module:
    """A named group of variables, found in the attributes of the subclass's objects.

    Local. The search follows attributes, lists, tuples, dictionaries and the attributes of other objects, in the order
    of attribute names, indices and keys. An object's own variables come before those of the objects it holds, and each
    variable counts once. Optimizers, strategies and data are not searched.

    Setting an attribute to a new variable, or to an object that holds one, restores the values that a checkpoint has
    kept for it. Then it is collective, like the creation of the variable. See `Checkpoint.restore`.

    Args:
        name: A Python identifier; default: the class's name as in `dense_layer`.

    Raises:
        ValueError: `name` is no identifier.

    Example:
        >>> import mpidist
        >>> class Dense(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel = mpidist.Variable([[1.0]], name="kernel")
        ...         self.bias = mpidist.Variable([0.0], name="bias")
        >>> [v.name for v in Dense().trainable_variables]
        ['bias', 'kernel']
    """

    def __init__(self, name: str | None = None) -> None:
        if name is not None and not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"`name` of a module must be a Python identifier, got {name!r}")
        self._name = name

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        watcher = vars(self).get(_WATCHER)
        if watcher is not None and name != _WATCHER:
            watcher.attribute_set(value)

    def __getstate__(self) -> dict[str, Any]:
        # The checkpoint holds the original and not the copy.
        return {name: value for name, value in vars(self).items() if name != _WATCHER}

    @property
    def name(self) -> str:
        """Local. The module's name."""
        return getattr(self, "_name", None) or _snake_case(type(self).__name__)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Local. All variables of this module and of the objects it holds; of a `ShardedVariable` its shards."""
        return tuple(part for found in _walk(self) if isinstance(found, Variable) for part in found.parts)

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Local. Those with `trainable=True`."""
        return tuple(variable for variable in self.variables if variable.trainable)

    @property
    def non_trainable_variables(self) -> tuple[Variable, ...]:
        """Local. Those with `trainable=False`."""
        return tuple(variable for variable in self.variables if not variable.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """Local. All modules that this one holds, however nested, without itself."""
        return tuple(found for found in _walk(self) if isinstance(found, Module))


def watch(module: Module, watcher: Watcher) -> None:
    """Local. Report new attributes to `watcher`, unless a watcher with a higher number gets them."""
    present: Watcher | None = vars(module).get(_WATCHER)
    if present is None or present.number < watcher.number:
        vars(module)[_WATCHER] = watcher


def unwatch(module: Module, watcher: Watcher) -> None:
    """Local. Stop reporting to `watcher`."""
    if vars(module).get(_WATCHER) is watcher:
        del vars(module)[_WATCHER]


def _walk(root: object) -> Iterator[Variable | Module]:
    """Variables and modules below `root`, each once: first those in its own attributes, then those in its objects."""
    seen = {id(root)}
    waiting: list[object] = [root]
    while waiting:
        held: list[object] = []
        for leaf in _leaves(waiting.pop(), seen):
            if isinstance(leaf, (Variable, Module)):
                yield leaf
            if not isinstance(leaf, Variable):
                held.append(leaf)
        waiting.extend(reversed(held))


def _leaves(owner: object, seen: set[int]) -> Iterator[object]:
    """The new objects in the attributes of `owner`, with lists, tuples and dictionaries opened."""
    waiting = [value for _, value in sorted(vars(owner).items(), reverse=True, key=lambda item: item[0])]
    while waiting:
        value = waiting.pop()
        is_container = isinstance(value, (list, tuple, dict))
        if id(value) in seen or not (is_container or isinstance(value, Variable) or _is_followed(value)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting.extend(child for _, child in sorted(value.items(), reverse=True, key=_place))
        elif isinstance(value, (list, tuple)):
            waiting.extend(reversed(value))
        else:
            yield value


def _place(item: tuple[object, object]) -> tuple[bool, int, str]:
    """The place of an entry of a dictionary: by integer keys as numbers, then by all others as text."""
    key = item[0]
    return (False, key, "") if isinstance(key, int) else (True, 0, str(key))


def _is_followed(value: Any) -> bool:
    if isinstance(value, Module):
        return True
    kind = type(value)
    package, *rest = kind.__module__.split(".")
    is_opaque = package in _OPAQUE or (package == "mpidist" and rest[:1] != ["metrics"])
    return not is_opaque and not isinstance(value, type) and isinstance(getattr(value, "__dict__", None), dict)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
