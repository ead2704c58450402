"""The stack of contexts, one per thread: it says which strategy is current; and the strategies that are open.

The stack knows no types of the package: an entry holds the strategy and its replica context as plain objects, so that
every layer may import this module. An empty stack is the state at program start: the default strategy, in replica
context, as in tf.distribute.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S")


class Entry(NamedTuple):
    """One level of the stack.

    Attributes:
        strategy: The strategy that is current on this level.
        replica_context: Its replica context inside `run`; None in cross-replica context.
        home: The home of its variables, see `variables.variable.Home`.
        refusal: The reason why collectives cannot be called on this level; None where they can.
    """

    strategy: object
    replica_context: object | None
    home: object
    refusal: str | None = None


class _Stack(threading.local):
    """One list per thread. A thread that is started inside a scope begins with an empty one, as in tf.distribute."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []


# Read directly where a function call would cost as much as what is asked; written by `push` and `pop` only.
stack = _Stack()


def innermost() -> Entry | None:
    """Local. The top of this thread's stack, or None at program start."""
    entries = stack.entries
    return entries[-1] if entries else None


def in_replica() -> bool:
    """Local. Whether this thread runs inside `run` of some strategy."""
    entries = stack.entries
    return bool(entries) and entries[-1].replica_context is not None


def require_collectives() -> None:
    """Local. Raise RuntimeError where the replicas of the innermost level cannot all reach a collective."""
    entries = stack.entries
    if entries and entries[-1].refusal is not None:
        raise RuntimeError(entries[-1].refusal)


def require_home(home: object, name: str) -> None:
    """Local. Raise ValueError if a strategy is current whose variables live somewhere else.

    Args:
        home: The home of a variable that is about to be updated.
        name: The name of the variable.
    """
    entries = stack.entries
    if entries and entries[-1].home is not home:
        raise ValueError(
            f"variable {name!r} does not belong to the current strategy, so every replica would update its own copy: "
            "create it inside `with strategy.scope():`"
        )


def push(entry: Entry) -> None:
    """Local. Enter a level."""
    stack.entries.append(entry)


def pop() -> None:
    """Local. Leave the level entered last."""
    stack.entries.pop()


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
        push(self._entry)
        return self._strategy

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        pop()


class OpenedStrategy(Protocol):
    """The part of a strategy that this module uses.

    Attributes:
        is_closed: Whether it was closed or dropped.
    """

    is_closed: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas."""
        ...


_made: weakref.WeakSet[OpenedStrategy] = weakref.WeakSet()


def note_open(strategy: OpenedStrategy) -> None:
    """Local. Note a strategy that was made."""
    _made.add(strategy)


def open_strategies() -> list[OpenedStrategy]:
    """Local. The strategies that are not closed; if there are several, only those that the program can still reach."""
    if len(_open()) > 1:
        # As in `open_strategy`. Ranks collect at different moments, and would find different numbers.
        gc.collect()
    return _open()


def open_strategy() -> OpenedStrategy | None:
    """Local. An open strategy of several replicas that the program can still reach, None if there is none."""
    if _find() is None:
        return None
    # A strategy refers to itself through its members: one that the program has forgotten is there until a collection.
    gc.collect()
    return _find()


def _find() -> OpenedStrategy | None:
    return next((strategy for strategy in _open() if strategy.num_replicas_in_sync > 1), None)


def _open() -> list[OpenedStrategy]:
    return [strategy for strategy in list(_made) if not strategy.is_closed]
