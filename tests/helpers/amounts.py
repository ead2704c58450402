"""How much a test draws or repeats: little in CI, much under pytest's option `--long`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from tests.helpers.selection import seed

T = TypeVar("T")

# Set by tests/conftest.py before it collects tests, so `amount` may be called where a module is imported.
_IS_LONG = [False]


def run_long() -> None:
    """Take the long form of every amount from now on."""
    _IS_LONG[0] = True


def amount(short: int, long: int) -> int:
    """The number for this run.

    Args:
        short: Takes a moment and finds what breaks at once.
        long: Finds what is rare, or what grows slowly.
    """
    return long if _IS_LONG[0] else short


def turns(cases: Sequence[T], count: int, *, always: Sequence[T] = ()) -> list[T]:
    """The cases of this run, for `parametrize`: all in the long form, else some, which the seed of the run chooses.

    Args:
        cases: All of them.
        count: How many the short form has beside those that it always has.
        always: Those that it always has, since a fault shows nowhere else.
    """
    others = [case for case in cases if case not in always]
    chosen = random.Random(f"{seed()} {cases!r}").sample(others, min(count, len(others)))
    return [case for case in cases if _IS_LONG[0] or case in always or case in chosen]
