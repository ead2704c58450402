"""The end of the program: its last line, or an exception that leaves it, and the exit code that it gives."""

from __future__ import annotations

import ctypes
import dis
import gc
import os
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn, Protocol

# The code of a program that SIGINT has ended: 128 and the number of the signal.
INTERRUPTED = 130


def _outermost() -> FrameType | None:
    """The outermost frame of the main thread: the program's, or at its end that of an exit function."""
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
    # A frame that has ended keeps the index of its last instruction.
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def leave_later(seconds: float, code: int) -> None:
    """Local. End this process after a time if an exception has left the program: an exit function may never return.

    Args:
        seconds: Seconds until then.
        code: The exit code.
    """
    def leave() -> None:
        if was_left():
            os._exit(code)

    timer = threading.Timer(seconds, leave)
    timer.name = "mpidist-leave"
    timer.daemon = True
    timer.start()


_codes: list[object] = []


class _Code:
    """The attribute `code` of SystemExit, which notes the code when the interpreter reads it at the program's end."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, error: SystemExit | None, kind: type | None = None) -> Any:
        if error is None:
            return self
        code = self._original.__get__(error, kind)
        # If the program reads the attribute of an exception that it has caught, there is a calling frame.
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():  # noqa: SLF001 - documented; private only to say "of this interpreter"
            _codes.append(code)
        return code

    def __set__(self, error: SystemExit, code: object) -> None:
        self._original.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        self._original.__delete__(error)


def _exit(code: object = None) -> NoReturn:
    # The interpreter's own `sys.exit` raises no complete exception whose attribute could be read.
    raise SystemExit(code)


def watch_code() -> None:
    """Local. Make `code` return the code of a SystemExit from now on. Later calls change nothing.

    The interpreter calls no hook for a SystemExit, and frees it before exit functions run. But it reads the attribute
    before that. Only CPython gives access to the attributes of a built-in type; elsewhere nothing changes.
    """
    original = vars(SystemExit)["code"]
    names = [one for one in gc.get_referents(vars(SystemExit)) if isinstance(one, dict)]
    if isinstance(original, _Code) or len(names) != 1 or not hasattr(ctypes, "pythonapi"):
        return
    names[0]["code"] = _Code(original)
    # The interpreter caches the attributes of types.
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if type(sys.exit) is type(len):
        sys.exit = _exit


def code() -> int:
    """Local. The exit code of this process, as its parent will see it; 0 while the program runs.

    Without `watch_code` the code of a SystemExit is 1.
    """
    if not was_left():
        return 0
    if _codes:
        return number_of(_codes[-1])
    return INTERRUPTED if getattr(sys, "last_type", None) is KeyboardInterrupt else 1


def number_of(given: object) -> int:
    """Local. The exit code of `sys.exit(given)`, as the parent of the process sees it."""
    return given & 0xFF if isinstance(given, int) else int(given is not None)


class Observer(Protocol):
    """An object that is told of the end of this process; see `failures.restart.rank`."""

    def on_opened(self) -> None:
        """Local. The first communicator is open."""
        ...

    def on_dead(self, names: Iterable[str]) -> None:
        """Local. These ranks have died."""
        ...

    def on_end(self, code: int, error: BaseException | None, text: str, *, ends_job: bool, hangs: bool) -> None:
        """Local. The process ends with a code, by this exception, if any; `ends_job`: so do all; `hangs`: they hung."""
        ...


OBSERVERS: list[Observer] = []
_expected: list[bool] = []


def tell_end(
    code: int, text: str = "", error: BaseException | None = None, *, ends_job: bool = False, hangs: bool = False
) -> None:
    """Local. Tell the observers of the end of this process; see `Observer.on_end`."""
    for observer in OBSERVERS:
        observer.on_end(code, error, text, ends_job=ends_job, hangs=hangs)


def tell_dead(names: Iterable[str]) -> None:
    """Local. Tell the observers of deaths."""
    for observer in OBSERVERS:
        observer.on_dead(names)


def tell_opened() -> None:
    """Local. Tell the observers that a communicator of several ranks is open."""
    for observer in OBSERVERS:
        observer.on_opened()


def expect_code() -> None:
    """Local. Note that an exit code of this process is no failure of the job from now on."""
    _expected.append(True)


def is_code_expected() -> bool:
    """Local. Whether an exit code of this process is no failure of the job."""
    return bool(_expected)


def end_later(seconds: float) -> None:
    """Local. End this process after a time in any case: after a death an exit function may never return."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def forget() -> None:
    """Local. Release the program's globals, so that they are freed as usual; the last exit function calls this."""
    _program[0] = None
