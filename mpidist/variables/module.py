"""The module: a base class whose objects find the variables and modules that they hold, however nested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

from mpidist.attributes import CONTAINERS, SETS, attributes_of, children_of, has_children, slots_of
from mpidist.variables.variable import BaseVariable

# The attribute of a module, or of a checkpoint that another one holds, with its watcher.
WATCHER = "_watcher"


class Watcher(Protocol):
    """A listener for new attributes: a restored checkpoint with values for variables that do not exist yet.

    Attributes:
        number: The place in the order of watchers.
    """

    number: int

    def attribute_set(self, value: object) -> None:
        """Collective where `value` has a new variable, else Local. React to an attribute that was set to `value`."""


class Module:
    """Local. A named group of variables, found in the attributes of the subclass's objects.

    The search follows attributes (also those in `__slots__`), lists, tuples, deques, dictionaries and the
    attributes of other objects, in the order of attribute names, indices and keys. An object's own variables come
    before those of the objects it holds, and each variable counts once. Optimizers, strategies, data and sets are not
    searched.

    Setting an attribute to a new variable, or to an object that holds one, restores the values that a checkpoint has
    kept for it. Then it is collective, like the creation of the variable. See `Checkpoint.restore`.

    Args:
        name: A Python identifier; default: the class's name in snake case, such as `dense_layer`.

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
        watcher = vars(self).get(WATCHER)
        if watcher is not None and name != WATCHER:
            watcher.attribute_set(value)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # The checkpoint holds the original and not the copy.
        attributes = {name: value for name, value in vars(self).items() if name != WATCHER}
        slots = {name: getattr(self, name) for name in slots_of(type(self)) if hasattr(self, name)}
        return attributes, slots

    @property
    def name(self) -> str:
        """Local. The module's name."""
        return getattr(self, "_name", None) or _snake_case(type(self).__name__)

    @property
    def variables(self) -> tuple[BaseVariable, ...]:
        """Local. All variables of this module and of the objects it holds; of a `ShardedVariable` its shards."""
        return tuple(part for found in _walk(self) if isinstance(found, BaseVariable) for part in found.parts)

    @property
    def trainable_variables(self) -> tuple[BaseVariable, ...]:
        """Local. Those with `trainable=True`."""
        return tuple(variable for variable in self.variables if variable.trainable)

    @property
    def non_trainable_variables(self) -> tuple[BaseVariable, ...]:
        """Local. Those with `trainable=False`."""
        return tuple(variable for variable in self.variables if not variable.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """Local. All modules that this one holds, however nested, without itself."""
        return tuple(found for found in _walk(self) if isinstance(found, Module))


def watch(module: object, watcher: Watcher) -> None:
    """Local. Report new attributes to `watcher`, unless a watcher with a higher number gets them."""
    present: Watcher | None = vars(module).get(WATCHER)
    if present is None or present.number < watcher.number:
        vars(module)[WATCHER] = watcher


def unwatch(module: object, watcher: Watcher) -> None:
    """Local. Stop reporting to `watcher`."""
    if vars(module).get(WATCHER) is watcher:
        del vars(module)[WATCHER]


def _walk(root: object) -> Iterator[BaseVariable | Module]:
    """Variables and modules below `root`, each once: first those in its own attributes, then those in its objects."""
    seen = {id(root)}
    waiting: list[object] = [root]
    while waiting:
        held: list[object] = []
        for leaf in _leaves(waiting.pop(), seen):
            if isinstance(leaf, (BaseVariable, Module)):
                yield leaf
            if not isinstance(leaf, BaseVariable):
                held.append(leaf)
        waiting.extend(reversed(held))


def _leaves(owner: object, seen: set[int]) -> Iterator[object]:
    """The new objects in the attributes of `owner`, with containers opened."""
    waiting = _reversed_children(owner)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not (isinstance(value, BaseVariable) or _is_followed(value)):
            continue
        seen.add(id(value))
        # A module is more than the container that it may be, too.
        if isinstance(value, CONTAINERS) and not isinstance(value, Module):
            waiting.extend(_reversed_children(value))
        else:
            yield value


def _reversed_children(owner: object) -> list[object]:
    children = [child for _, child in children_of(owner)]
    if isinstance(owner, Module) and isinstance(owner, CONTAINERS):
        children += [value for _, value in sorted(attributes_of(owner).items())]
    return children[::-1]


def _is_followed(value: object) -> bool:
    if isinstance(value, Module):
        return True
    package, *rest = type(value).__module__.split(".")
    if package == "mpidist" and rest[:1] != ["metrics"]:
        return False
    # The members of a set have no order that is the same on every rank.
    return has_children(value) and not isinstance(value, SETS)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
