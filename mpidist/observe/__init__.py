"""Output for users who watch a run: progress, and the ranks that wait for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.missing import from_homes

if TYPE_CHECKING:
    from mpidist.observe.progress import Progress

__all__ = ["Progress"]

if not TYPE_CHECKING:
    # `progress` imports modules that import the recorder, which imports this package.
    __getattr__ = from_homes(__name__, {"Progress": "mpidist.observe.progress"})
