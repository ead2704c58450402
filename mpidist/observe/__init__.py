"""Output for people who watch a run: progress, and who waits for whom."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.observe.progress import Progress

__all__ = ["Progress"]


def __getattr__(name: str) -> Any:
    # Loaded at first use: the recorder, below the communicators, needs nothing of it.
    if name not in __all__:
        raise AttributeError(f"module 'mpidist.observe' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("mpidist.observe.progress"), name)
    return value
