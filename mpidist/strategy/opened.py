"""The strategies of several replicas that are open in this process: where there is one, code outside them errs."""

from __future__ import annotations

import gc
import weakref
from typing import Protocol


class OpenedStrategy(Protocol):
    """A strategy, as far as it is asked here.

    Attributes:
        is_closed: Whether it was closed or dropped.
    """

    is_closed: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas."""
        ...


_made: weakref.WeakSet[OpenedStrategy] = weakref.WeakSet()


def note(strategy: OpenedStrategy) -> None:
    """Local. Note a strategy that was made."""
    if strategy.num_replicas_in_sync > 1:
        _made.add(strategy)


def open_strategy() -> OpenedStrategy | None:
    """Local. An open strategy of several replicas that the program can still reach, None if there is none."""
    if _find() is None:
        return None
    # A strategy refers to itself through its members: one that the program has forgotten is there until a collection.
    gc.collect()
    return _find()


def _find() -> OpenedStrategy | None:
    return next((strategy for strategy in list(_made) if not strategy.is_closed), None)
