"""The strategy of a call that may name one: the given one, that of the scope, or the only one that is open."""

from __future__ import annotations

import gc
from typing import cast

from mpidist import context
from mpidist.arguments import described
from mpidist.launch import world_size
from mpidist.strategy.base import Strategy
from mpidist.strategy.default import DefaultStrategy


def chosen_strategy(strategy: Strategy | None, caller: str) -> Strategy:
    """Local. The strategy that a function of an adapter uses.

    Args:
        strategy: The function's argument. None: the strategy of the scope, or else the only one that is open.
        caller: The name of the function, for errors.

    Raises:
        ValueError: None was given, and no strategy is open, or several are; or the default strategy was given in a job
            of several ranks, each of which would train alone.
        TypeError: `strategy` is no strategy.
        RuntimeError: It is closed.
    """
    if strategy is None:
        strategy = _current() or _only(caller)
    elif not isinstance(strategy, Strategy):
        raise TypeError(
            f"{caller}: `strategy` must be a strategy, such as mpidist.MultiWorkerMirroredStrategy(), or None, got "
            f"{described(strategy)}"
        )
    if isinstance(strategy, DefaultStrategy) and world_size() > 1:
        raise ValueError(
            f"{caller}: the default strategy distributes nothing, each of the {world_size()} ranks would train alone. "
            "Make a mpidist.MultiWorkerMirroredStrategy(), and pass it as `strategy=`"
        )
    strategy.replicas.require_open()
    return strategy


def _current() -> Strategy | None:
    entry = context.innermost()
    # Inside a `merge_call` of the default context the default strategy itself is on the stack.
    is_default = entry is None or isinstance(entry.strategy, DefaultStrategy)
    return None if entry is None or is_default else cast(Strategy, entry.strategy)


def _only(caller: str) -> Strategy:
    found = _open()
    if len(found) > 1:
        # One that the program has forgotten is there until a collection.
        del found
        gc.collect()
        found = _open()
    if len(found) == 1:
        return found[0]
    got = f"{len(found)} are open: {', '.join(sorted(map(repr, found)))}" if found else "none is open"
    raise ValueError(
        f"{caller} needs a strategy, and {got}. Make one, such as mpidist.MultiWorkerMirroredStrategy(), and pass it "
        "as `strategy=`, or call this in its `scope()`"
    )


def _open() -> list[Strategy]:
    return [one for one in cast("list[Strategy]", context.open_strategies()) if not isinstance(one, DefaultStrategy)]
