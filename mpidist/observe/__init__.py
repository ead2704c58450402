"""Output for people who watch a run: progress."""

from mpidist.observe.progress import Progress

__all__ = ["Progress"]
