"""The end of a job by an error on a thread of a framework, which does not reach the program's main thread."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import NoReturn

from mpidist.failures.exit_code import INTERRUPTED
from mpidist.observe.output import flush

# The threads that have made calls with other ranks.
_callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def fail(error: BaseException) -> NoReturn:
    """Local. End the job with the traceback of an error, as an uncaught exception of the main thread ends it.

    Args:
        error: The error.
    """
    # With several ranks the hook of `failures.ending`: it prints the traceback, and ends all ranks.
    sys.excepthook(type(error), error, error.__traceback__)
    flush()
    os._exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def note_caller() -> None:
    """Local. Note that this thread makes calls with other ranks: an uncaught exception of it ends the job from now on.

    Python itself would only print the exception, and the other ranks would wait for the next call.
    """
    _install()
    _callers.add(threading.current_thread())


@functools.cache
def _install() -> None:
    previous = threading.excepthook

    def on_exception(args: threading.ExceptHookArgs) -> None:
        if args.thread in _callers and args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            fail(args.exc_value)
        previous(args)

    threading.excepthook = on_exception
