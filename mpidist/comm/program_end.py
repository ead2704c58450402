"""The end of the program: its last line, or an exception that leaves it, which may be a SystemExit that nobody saw."""

from __future__ import annotations

import dis
import sys
import threading
from types import FrameType


def _outermost() -> FrameType | None:
    """The frame in which the program's own thread has begun, or what runs at its end."""
    frames = sys._current_frames()  # noqa: SLF001 - documented; private only to say "for debuggers"
    frame = frames.get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


_program = [_outermost()]


def was_left() -> bool:
    """Local. Whether an exception has left the program; False while it runs."""
    frame = _program[0]
    if frame is None or frame is _outermost():
        return False
    # A frame that has ended keeps the place of its last instruction.
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def forget() -> None:
    """Local. Let go of the program's globals: the last exit function calls it, and then they end as they would."""
    _program[0] = None
