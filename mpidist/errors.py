"""The errors that a caller may want to catch; everything else is a built-in exception.

An error text says, in this order: what happened, what was expected, what was got, where, and the advice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mpidist.missing import no_attribute

# The advice where a part of CUDA is missing.
PACKAGES = "pip install 'mpidist[cuda12]', or 'mpidist[cuda13]' for a driver of CUDA 13"


class MpidistError(Exception):
    """Root of the errors below."""


class MismatchError(MpidistError, ValueError):
    """Ranks differ where they must agree: in shapes, dtypes, lists of variables, or the order of calls."""


class LauncherError(MpidistError, RuntimeError):
    """The launcher, the MPI library and the cluster's description do not fit together."""


class CollectiveTimeoutError(MpidistError, TimeoutError):
    """Some ranks did not reach a call within `timeout_seconds`, or a group a meeting within `MPIDIST_TIMEOUT`.

    The text names them and the call.
    """


class UnavailableError(MpidistError, LookupError):
    """The thing asked for by name is not available here; the text gives the reason and lists what is available."""


class CheckpointError(MpidistError, ValueError):
    """A checkpoint cannot be read, or does not fit the objects that it is restored into."""


class DamagedCheckpointError(CheckpointError):
    """The file of a checkpoint is truncated, damaged, or no checkpoint; an older one may be whole."""


class DeadRankError(MpidistError, RuntimeError):
    """A rank of the group has died, so that nothing collective can be done; the text names it."""


class CancelledError(MpidistError, RuntimeError):
    """A scheduled function was not run, since another one had failed."""


class FatalFunctionError(MpidistError, RuntimeError):
    """A scheduled function has failed, since its workers terminated again and again while they ran it."""


class EndOfDataError(MpidistError, LookupError):
    """A scheduled function has no value, since the data of the workers that may run it has ended."""


class InterruptedCallError(MpidistError, RuntimeError):
    """An exception has left a call in the middle, so that variables and results may hold half of it."""


class RankError(MpidistError, RuntimeError):
    """Another rank failed with an exception that cannot be rebuilt here; the text contains it."""


def mark_shared(error: Exception) -> Exception:
    """Local. Mark an error that every rank raises; the job then prints it once if the program does not catch it.

    An error without the mark is one rank's own. If it is not caught, the whole job ends at once, since the other ranks
    would wait for that rank without end. So mark an error only where all ranks are certain to raise it.
    """
    error.__dict__["raised_on_all_ranks"] = True
    return error


def is_shared(error: BaseException | None) -> bool:
    """Local. Whether the error, or an error that led to it, is marked as raised on every rank."""
    while error is not None:
        if error.__dict__.get("raised_on_all_ranks", False):
            return True
        error = error.__cause__ or error.__context__
    return False


# Of interrupts that a framework has made other errors of.
_interrupts: set[str] = set()


def note_interrupt(text: str) -> None:
    """Local. Note that a framework raises an error with this text in the place of a KeyboardInterrupt."""
    _interrupts.add(text)


def is_interrupt(error: BaseException) -> bool:
    """Local. Whether an error is a KeyboardInterrupt, or what a framework has made of one."""
    return isinstance(error, KeyboardInterrupt) or any(text in str(error) for text in _interrupts)


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
