"""Output of a rank whose job may end at any moment: whole lines, and nothing left in buffers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

_STDERR = 2


class Beside(NamedTuple):
    """A second place for texts, in addition to a redirected stderr.

    Attributes:
        descriptor: The descriptor of what stderr was before.
        heading: A function that returns a line that says what the program is doing.
    """

    descriptor: int
    heading: Callable[[], str]


_beside: list[Beside] = []


def say(text: str) -> None:
    """Local. Write to stderr by one system call, so that the lines of several ranks do not mix."""
    data = f"mpidist: {text}".rstrip("\n").encode(errors="replace") + b"\n"
    _write(_STDERR, data)
    for descriptor, heading in _beside:
        if not _is_same(descriptor, _STDERR):
            # pytest may have begun a line there.
            _write(descriptor, f"\n{heading()}\n".encode(errors="replace") + data)


def say_also_to(beside: Beside | None) -> None:
    """Local. Write texts to another place, too, as long as stderr is redirected; None ends this.

    A program that captures its stderr loses it where its job ends in the middle.
    """
    _beside[:] = [] if beside is None else [beside]


def _write(descriptor: int, data: bytes) -> None:
    # A closed stderr or a full disk must not keep a job from its end.
    with contextlib.suppress(OSError):
        os.write(descriptor, data)


def _is_same(descriptor: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(descriptor, other)
    except OSError:
        return False


def flush() -> None:
    """Local. Write what the program has printed: the rank that ends the job does not know the buffers of the others."""
    for stream in (sys.stdout, sys.stderr):
        # None where Python was started without it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
