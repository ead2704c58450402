"""Errors of one rank that all ranks raise, where they make something together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpidist.strategy.base import Strategy

T = TypeVar("T")


def together(strategy: Strategy, function: Callable[[], T]) -> list[T]:
    """Collective. Call `function` on every rank; every rank gets all results, or raises the same error.

    Args:
        strategy: The strategy of the ranks.
        function: A function that returns a picklable result. It must not communicate.

    Returns:
        The results of all ranks, in their order.

    Raises:
        Exception: What `function` raised on the first rank on which it failed; its text names the ranks, unless all
            failed alike.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    told = None if failure is None else (type(failure), str(failure))
    everyone = strategy.extended.all_gather_object((result, told))
    failed = {rank: other for rank, (_, other) in enumerate(everyone) if other is not None}
    if failed:
        kind, text = next(iter(failed.values()))
        where = "" if len(failed) == len(everyone) else f" (on rank {', '.join(map(str, failed))})"
        raise _remade(kind, text + where) from failure
    return [one for one, _ in everyone]  # type: ignore[misc]


def require_alike(strategy: Strategy, what: str, function: Callable[[], list[str]], advice: str) -> None:
    """Collective. Raise on every rank where the lists of lines that `function` gives differ between ranks.

    Raises:
        ValueError: The lists differ; the text names the first line that does.
    """
    everyone = together(strategy, function)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other == first:
            continue
        number = next(n for n in range(max(len(first), len(other))) if first[n : n + 1] != other[n : n + 1])
        ours, others = (lines[number] if number < len(lines) else "nothing more" for lines in (first, other))
        raise ValueError(
            f"{what} must be the same on every rank, got {ours} on rank 0, {others} on rank {rank}. {advice}"
        )


def _remade(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except Exception:
        # Its constructor takes something else.
        return RuntimeError(f"{kind.__name__}: {text}")
