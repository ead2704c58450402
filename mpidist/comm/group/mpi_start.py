"""The start of MPI, and its end. Both wait for all ranks of the job, and a rank that waits for long reports it."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
from typing import Any

from mpidist import launch
from mpidist.comm.group import pages
from mpidist.comm.group.mpi_library import check_process_manager
from mpidist.failures.deaths import this_process
from mpidist.failures.startup.finding import STARTING

# mpi4py's module, where `start_mpi` has started MPI.
_started: list[Any] = []


def start_mpi() -> None:
    """Collective. Start MPI as `from mpi4py import MPI` does, and let other threads run meanwhile, the watchdog's too.

    It does nothing where the program has imported `mpi4py.MPI`, or asks something of mpi4py (`mpi4py.rc`, `MPI4PY_RC_*`
    in the environment): then that import starts MPI, and holds the interpreter until all ranks have come.

    Raises:
        ImportError: mpi4py finds no MPI library; or RuntimeError.
        LauncherError: The library cannot speak with the launcher, and would end this process.
        ValueError: A variable of the environment is not a number.
    """
    rc: Any = importlib.import_module("mpi4py").rc
    is_users = bool(vars(rc)) or any(name.startswith("MPI4PY_RC_") for name in os.environ)
    place = launch.read()
    if is_users or place is None or "mpi4py.MPI" in sys.modules:
        return
    rc(initialize=False, finalize=True)
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    finally:
        vars(rc).clear()
    check_process_manager(mpi.Get_library_version())
    start = _function(mpi, "MPI_Init_thread")
    if start is None:
        mpi.Init_thread()
    else:
        calls = pages.begin(this_process(socket.gethostname()), place.rank, place.size)
        with calls.during(STARTING):
            code = start(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        if code:
            raise RuntimeError(f"MPI_Init_thread failed with the error code {code}")
    # As that import does: an error of MPI is a Python exception.
    for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)
    _started.append(mpi)


def end_mpi() -> None:
    """Collective. End MPI if `start_mpi` has started it, and let other threads run meanwhile; else mpi4py ends it."""
    for mpi in _started:
        end = _function(mpi, "MPI_Finalize")
        if end is not None and not mpi.Is_finalized():
            end()


def _function(mpi: Any, name: str) -> Any:
    """A function of MPI itself, since mpi4py's keeps the lock of the interpreter while it waits; None if not found."""
    return getattr(ctypes.CDLL(getattr(mpi, "__file__", None)), name, None)
