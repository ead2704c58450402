"""The scope of a strategy: a context manager that makes it current."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from mpidist import context
from mpidist.context import Entry

S = TypeVar("S")


class Scope(Generic[S]):
    """Makes a strategy current while it is entered, which may be any number of times.

    Args:
        strategy: The strategy.
        entry: Its level of the stack of contexts.
        require_allowed: Raises RuntimeError where the strategy must not become current.
    """

    __slots__ = ("_entry", "_require_allowed", "_strategy")

    def __init__(self, strategy: S, entry: Entry, require_allowed: Callable[[], None]) -> None:
        self._strategy = strategy
        self._entry = entry
        self._require_allowed = require_allowed

    def __enter__(self) -> S:
        self._require_allowed()
        context.push(self._entry)
        return self._strategy

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        context.pop()
