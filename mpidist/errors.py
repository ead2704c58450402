"""The few errors that a caller may want to catch; everything else is a built-in exception.

Texts say, in this order: what happened, what was expected, what was got, where, and the way out.
"""

from __future__ import annotations


class MpidistError(Exception):
    """Root of the errors below."""


class MismatchError(MpidistError, ValueError):
    """Ranks that have to agree do not: other shapes, dtypes, lists of variables, or another order of calls."""


class LauncherError(MpidistError, RuntimeError):
    """The launcher, the MPI library and the described cluster do not fit together."""


class CollectiveTimeoutError(MpidistError, TimeoutError):
    """Some ranks did not come to a collective call in `timeout_seconds`; the text names them and the call."""


class UnavailableError(MpidistError, LookupError):
    """Something was asked for by name that cannot be had here; the text lists what can, and the reasons."""


class CheckpointError(MpidistError, ValueError):
    """A checkpoint cannot be read, or does not fit the objects it is restored into."""


class RankError(MpidistError, RuntimeError):
    """Another rank failed with an exception that cannot be rebuilt here; the text carries it."""


def mark_shared(error: Exception) -> Exception:
    """Local. Note on an error that every rank raises it, so that an uncaught one is printed once, not by each rank."""
    error.__dict__["raised_on_all_ranks"] = True
    return error


def is_shared(error: BaseException | None) -> bool:
    """Local. Whether the error, or one that led to it, is raised on every rank."""
    while error is not None:
        if error.__dict__.get("raised_on_all_ranks", False):
            return True
        error = error.__cause__ or error.__context__
    return False
