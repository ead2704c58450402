"""A function that is called before the first calls of a program, and adds no time to later calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.comm.calls.order import CallOrder

# The methods that sign a call.
_METHODS = ("enter", "sign_step")


def call_before(function: Callable[[str], bool]) -> None:
    """Local. Call a function before each call that begins, until it returns True; later calls take no more time.

    Args:
        function: A function of the name of the call.
    """
    originals = {name: getattr(CallOrder, name) for name in _METHODS}
    waiting = [function]

    def before(original: Any) -> Any:
        def method(order: CallOrder, name: str, *args: Any, **named: Any) -> Any:
            # Code that has fetched this method earlier keeps it.
            if waiting and function(name):
                waiting.clear()
                for one, unchanged in originals.items():
                    setattr(CallOrder, one, unchanged)
            return original(order, name, *args, **named)

        return method

    for name, original in originals.items():
        setattr(CallOrder, name, before(original))
