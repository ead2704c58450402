"""The default step of summaries, one for each thread."""

from __future__ import annotations

import numbers
import threading
from typing import SupportsIndex, SupportsInt

Step = SupportsInt | SupportsIndex


class _DefaultStep(threading.local):
    def __init__(self) -> None:
        self.step: Step | None = None


_default = _DefaultStep()


def get_step() -> Step | None:
    """Local. The default step of this thread, as it was set; None if none was set."""
    return _default.step


def set_step(step: Step | None) -> None:
    """Local. Set the default step of this thread.

    Args:
        step: A number, or a variable that is read whenever a summary is written; None removes the default.
    """
    _default.step = step


def require_step(step: Step | None) -> int:
    """Local. `step`, or else the default step, as a number.

    Raises:
        ValueError: There is no step at all, or it has more than 64 bits.
        TypeError: The step is no number.
    """
    chosen = get_step() if step is None else step
    if chosen is None:
        raise ValueError(
            "a summary needs a step, got none. Pass `step`, or set one with "
            "mpidist.summary.experimental.set_step() or writer.as_default(step)"
        )
    try:
        # Neither a text nor a part of a step counts as a number of steps.
        if isinstance(chosen, (str, bytes)) or (isinstance(chosen, numbers.Real) and chosen != int(chosen)):
            raise TypeError
        number = int(chosen)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"`step` of a summary must be an integer or a variable of one, got {chosen!r} of type "
            f"{type(chosen).__name__}"
        ) from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"`step` of a summary must be an integer of at most 64 bits, got {chosen!r}")
    return number
