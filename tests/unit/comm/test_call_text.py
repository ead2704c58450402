"""Where a call of the library was made, as errors name it."""

from __future__ import annotations

import inspect
import threading
from typing import Any

from mpidist.comm.calls.text import where_called


def test_the_programs_line_is_named() -> None:
    called, line = where_called(), inspect.stack()[0].lineno
    assert called == f" at {__file__}:{line}"


def test_at_the_programs_end_no_line_of_the_library_is_named() -> None:
    # As the exit function of the package, and as its threads.
    inside: dict[str, Any] = {"__name__": "mpidist", "where_called": where_called, "found": []}
    exec("def leave():\n    found.append(where_called())", inside)
    thread = threading.Thread(target=inside["leave"])
    thread.start()
    thread.join()
    inside["leave"]()
    at_the_end, called_here = inside["found"]
    assert at_the_end == ""
    assert __file__ in called_here
