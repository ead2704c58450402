"""Output of a rank whose job may end at any moment: whole lines, and nothing left in buffers."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Local. Write to stderr by one system call, so that the lines of several ranks do not mix."""
    # A closed stderr or a full disk must not keep a job from its end.
    with contextlib.suppress(OSError):
        os.write(2, f"mpidist: {text}".rstrip("\n").encode(errors="replace") + b"\n")


def flush() -> None:
    """Local. Write what the program has printed: the rank that ends the job does not know the buffers of the others."""
    for stream in (sys.stdout, sys.stderr):
        # None where Python was started without it.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
