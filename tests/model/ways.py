"""All ways through a job in which several things can happen at a time, one way after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.model.parties import BrokenError


class Walk(Protocol):
    """One way through a job.

    Attributes:
        counts: How many things could happen, at each choice so far.
    """

    counts: list[int]

    def go(self) -> None:
        """Go to the end.

        Raises:
            BrokenError: A rule does not hold.
        """
        ...


def go_all_ways(begin: Callable[[list[int]], Walk]) -> tuple[str, int]:
    """Go all ways through a job.

    Args:
        begin: Begins a way by its choices, which are numbers; the first one is taken when these are used up.

    Returns:
        The rule that does not hold, or an empty text, and the number of ways.
    """
    choices: list[int] = []
    ways = 0
    while True:
        walk = begin(choices)
        ways += 1
        try:
            walk.go()
        except BrokenError as broken:
            return str(broken), ways
        # The next way: the last choice that has another one.
        choices = [*choices, *[0] * (len(walk.counts) - len(choices))]
        while choices and choices[-1] + 1 == walk.counts[len(choices) - 1]:
            choices.pop()
        if not choices:
            return "", ways
        choices[-1] += 1
