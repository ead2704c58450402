"""The step at which summaries are written that name none; one for each thread."""

from __future__ import annotations

import threading
from typing import SupportsIndex, SupportsInt

Step = SupportsInt | SupportsIndex


class _State(threading.local):
    def __init__(self) -> None:
        self.step: Step | None = None


_state = _State()


def get_step() -> Step | None:
    """Local. The default step of this thread, as it was set; None before."""
    return _state.step


def set_step(step: Step | None) -> None:
    """Local. Set the default step of this thread.

    Args:
        step: A number, or a variable whose value counts when a summary is written; None takes it back.
    """
    _state.step = step


def require_step(step: Step | None) -> int:
    """Local. `step`, or else the default one, as a number.

    Raises:
        ValueError: There is neither.
    """
    chosen = get_step() if step is None else step
    if chosen is None:
        raise ValueError(
            "a summary needs a step, got none. Pass `step`, or set one with "
            "mpidist.summary.experimental.set_step() or writer.as_default(step)"
        )
    return int(chosen)
