"""What a person sees of a run: progress."""

from mpidist.observe.progress import Progress

__all__ = ["Progress"]
