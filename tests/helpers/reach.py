"""The reach of a call: the functions of the package that it enters, and the files in which they are."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import mpidist
from mpidist.comm.memory.node_barrier import NodeBarrier

_ROOT = str(Path(mpidist.__file__).parent)
_BARRIER = NodeBarrier.__call__.__code__


class Reach(NamedTuple):
    """What a call has entered.

    Attributes:
        functions: The functions, as "file: function".
        files: The files.
    """

    functions: frozenset[str]
    files: frozenset[str]

    def within(self, functions: int, files: int) -> bool:
        """Whether there are no more than these."""
        return len(self.functions) <= functions and len(self.files) <= files


def reach_of(call: Callable[[], object]) -> Reach:
    """The reach of a call of this thread.

    What a barrier enters while it waits is left out: how long a rank waits is not the call's doing.
    """
    entered: list[tuple[str, str]] = []
    waiting: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and not waiting and code.co_filename.startswith(_ROOT):
            entered.append((code.co_filename[len(_ROOT) + 1 :], getattr(code, "co_qualname", code.co_name)))
        if code is _BARRIER and event in ("call", "return"):
            if event == "call":
                waiting.append(frame)
            else:
                waiting.pop()

    # What the collector of garbage calls is not the call's doing, either.
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return Reach(frozenset(f"{file}: {name}" for file, name in entered), frozenset(file for file, _ in entered))
