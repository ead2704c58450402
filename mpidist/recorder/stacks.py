"""Stacks: where a thread of this process is, and where one is in a process that holds its interpreter."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
# The number of innermost lines of a stack that are shown.
_LINES = 8
# The time limit for a process to write its stack.
_DUMP_SECONDS = 0.3


def line_of_call(thread: int) -> str:
    """Local. The line of the program that has called mpidist, and what it called: "train.py:12 (save)".

    Empty in a thread of mpidist's own.

    Args:
        thread: The identifier of the thread.
    """
    called = ""
    # Of this thread itself without a dictionary of all threads: a timeline asks in each call.
    frame = sys._getframe() if thread == get_ident() else next(_frames(thread), None)  # noqa: SLF001 - as in `_frames`
    while frame is not None:
        code = frame.f_code
        owner = _OWNERS[code.co_filename]
        if owner is _OWN:
            called = code.co_name
        elif owner is None and called:
            return "" if _is_threading(frame) else f"{_line(frame)} ({called})"
        frame = frame.f_back
    return ""


_CONTEXTLIB = contextlib.contextmanager.__code__.co_filename
_OWN, _BETWEEN = "mpidist's", "neither mpidist's nor the program's"


class _Owners(dict[str, str | None]):
    """The owner of each file, by its name; None for the program."""

    def __missing__(self, file: str) -> str | None:
        # The frames that note the call are not the called function, and a `with` makes frames of its own.
        is_between = file.startswith(_PACKAGE + "observe" + os.sep) or file == _CONTEXTLIB
        owner = self[file] = _BETWEEN if is_between else _OWN if file.startswith(_PACKAGE) else None
        return owner


_OWNERS = _Owners()


def line(thread: int) -> str:
    """Local. The innermost line of a thread, and its function: "load.py:40 in read"."""
    frame = next(_frames(thread), None)
    return "" if frame is None else f"{_line(frame)} in {frame.f_code.co_name}"


def stack(thread: int) -> str:
    """Local. The innermost lines of a thread."""
    frame = next(_frames(thread), None)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-_LINES:])


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented; private by name, since it is for debuggers
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_threading(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "threading"


def write_at_signal(descriptor: int) -> int:
    """Local. Let this process write its stack into a file at a signal, even while it holds the interpreter.

    Not by `faulthandler.dump_traceback_later`: there is one timer in a process, and it may be the program's.

    Args:
        descriptor: The descriptor of the file; stays open.

    Returns:
        The signal; 0 if none is free.
    """
    # Real-time signals are not sent by chance. MPI libraries and debuggers take the first ones.
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 4, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            faulthandler.register(number, file=descriptor, all_threads=False, chain=False)
            return number
    return 0


def end_of_signal(number: int) -> None:
    """Local. Ignore the signal from now on: by default it would end the process."""
    if number:
        faulthandler.unregister(number)
        # Only the main thread may: after a death another thread ends the process, and its stack is not needed any more.
        with contextlib.suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)


def stack_of_process(process: int, number: int, path: str) -> str:
    """Local. The stack of another process, which holds its interpreter.

    Args:
        process: The number of the process.
        number: The signal that `write_at_signal` returned there.
        path: The path of the file.
    """
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(process, number)
            time.sleep(_DUMP_SECONDS)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line for line in text.splitlines() if line)
