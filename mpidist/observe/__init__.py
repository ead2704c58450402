"""Output for users who watch a run: progress, and the ranks that wait for others."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpidist.missing import no_attribute

if TYPE_CHECKING:
    from mpidist.observe.progress import Progress

__all__ = ["Progress"]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Loaded at first use: `progress` imports modules that import the recorder, which imports this package.
        if name not in __all__:
            no_attribute(__name__, name)
        value = globals()[name] = getattr(importlib.import_module("mpidist.observe.progress"), name)
        return value
