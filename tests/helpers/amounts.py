"""How much a test draws or repeats: little in CI, much under pytest's option `--long`."""

from __future__ import annotations

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
