"""The calls of Python functions in mpidist's own files: how many a program enters, and in how many files."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import mpidist

PACKAGE = str(Path(mpidist.__file__).parent) + "/"


def calls_of(run: Callable[[], object]) -> list[tuple[str, str]]:
    """(file, function) of every call in mpidist's files while `run` runs, in order; files relative to the package."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename[len(PACKAGE) :], frame.f_code.co_name))

    # A collection would run the finalizers of what other tests have left.
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
