"""Derived classes: an object gets a class over its own with the same name, so that no class of Keras is changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import ref

from mpidist.keras.binding import ModelBinding

_PLAIN, _BINDING = "_mpidist_plain", "_mpidist_binding"


@functools.cache
def _derived(kind: Any, mixin: type) -> type:
    return type(kind.__name__, (mixin, kind), {
        _PLAIN: kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
    })


def plain_class(thing: Any) -> type:
    """Local. The class of an object as Keras or the user has written it."""
    kind: type = getattr(type(thing), _PLAIN, type(thing))
    return kind


def binding_of(thing: Any) -> ModelBinding | None:
    """Local. The binding of an object, None if it was not taken, or is a copy of one that was."""
    binding: ModelBinding | None = getattr(thing, _BINDING, None)
    return binding


def derive(thing: Any, mixin: type, binding: ModelBinding, *, is_shared: bool = False) -> None:
    """Local. Give an object the class over its own that takes part in distribution.

    Args:
        thing: The object.
        mixin: The methods of its new class.
        binding: The binding to which it belongs.
        is_shared: Whether it may belong to several; it then has no binding of its own.

    Raises:
        ValueError: The object belongs to another strategy already.
    """
    before = binding_of(thing)
    if before is binding:
        return
    is_other = before is not None and before.strategy is not binding.strategy
    if before is not None and is_other and not is_shared and not before.strategy.is_closed:
        raise ValueError(
            f"{getattr(thing, 'name', thing)!r} ({plain_class(thing).__name__}) is distributed over another strategy, "
            f"{type(before.strategy).__name__}. Make one of its own for each strategy"
        )
    if not hasattr(type(thing), _PLAIN):
        # Around Keras's own `__setattr__`, which tracks what is assigned.
        object.__setattr__(thing, "__class__", _derived(cast("Hashable", type(thing)), mixin))
    if not is_shared:
        object.__setattr__(thing, _BINDING, binding)
    if not any(member() is thing for member in binding.members):
        binding.members.append(ref(thing))


@contextmanager
def as_plain(binding: ModelBinding) -> Iterator[None]:
    """Local. Inside, all objects of a binding have their plain classes: files saved there load without mpidist."""
    things = [thing for member in binding.members if (thing := member()) is not None]
    kinds = {id(thing): type(thing) for thing in things}
    for thing in things:
        object.__setattr__(thing, "__class__", plain_class(thing))
    try:
        yield
    finally:
        for thing in things:
            object.__setattr__(thing, "__class__", kinds[id(thing)])


def plainly(method: str) -> Callable[..., Any]:
    """Local. A method that calls that of the plain class, with all objects of the binding plain."""
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        binding = binding_of(self)
        if binding is None:
            return getattr(plain_class(self), method)(self, *args, **kwargs)
        with as_plain(binding):
            return getattr(self, method)(*args, **kwargs)

    call.__name__ = method
    return call
