"""The library's duplicates of a user's communicator, one for each purpose. The first one prepares the program's end."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import cast

from mpidist.comm.group import pages
from mpidist.comm.group.communicator import SERVED, Communicator
from mpidist.comm.group.mpi_communicator import MPI, MpiCommunicator
from mpidist.comm.group.mpi_library import check_launcher
from mpidist.comm.group.mpi_start import end_mpi
from mpidist.comm.group.object_exchange import gather_objects
from mpidist.comm.group.shared_file import descriptors_missing
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import mark_shared
from mpidist.failures import ending
from mpidist.failures.deaths import SOME_RANK, WATCH, Process, this_process
from mpidist.failures.exit_code import tell_opened
from mpidist.failures.farewell import Farewell

# The user's communicator keeps its duplicates, one per purpose, as an MPI attribute (MPI 4.1, section 7.7). A
# table keyed by handles would be wrong: MPI may use the handle of a freed communicator again. When the user frees the
# communicator the attribute is deleted, and with it the duplicates that are not in use.
_DUPLICATES = MPI.Comm.Create_keyval()


@dataclass
class _Duplicates:
    """The attribute of a user's communicator.

    Attributes:
        by_purpose: The library's duplicates of it, by purpose.
        farewell: The agreement by which its ranks end the program together, over a channel of the first duplicate.
    """

    by_purpose: dict[str, MpiCommunicator]
    farewell: Farewell | None


def open_duplicate(user: MPI.Intracomm | None, purpose: str) -> Communicator:
    """Collective. Our duplicate of `user` (default: all ranks) for a purpose; see `opening.open_communicator`."""
    if user is None:
        check_launcher(MPI.COMM_WORLD.size, MPI.Get_library_version())
        user = MPI.COMM_WORLD
    elif not isinstance(user, MPI.Intracomm) or user == MPI.COMM_NULL:
        raise TypeError(
            f"`communicator` must be an mpi4py intracommunicator, got {user!r}: pass MPI.COMM_WORLD, or a communicator "
            "made from it by Split or Dup"
        )
    if user.size == 1:
        return SoloCommunicator()
    duplicates = cast("_Duplicates | None", user.Get_attr(_DUPLICATES))
    if duplicates is None:
        duplicates = _Duplicates({}, None)
        user.Set_attr(_DUPLICATES, duplicates)
    if not SERVED.isdisjoint(duplicates.by_purpose.values()):
        raise RuntimeError(
            "this program has built its ParameterServerStrategy: the other ranks are serving it and will not reach "
            "later code, so no other strategy or collective call is possible. Use that strategy in the whole program, "
            "and put what all ranks do together above it"
        )
    if purpose not in duplicates.by_purpose:
        start = pages.begin(this_process(MPI.Get_processor_name()), user.rank, user.size)
        with start.during("opening a communicator"):
            known = next((one.processes for one in duplicates.by_purpose.values()), ())
            communicator = _open(user.Dup(), known)
        if duplicates.farewell is None:
            duplicates.farewell = Farewell(communicator.open_channel().mpi, communicator.processes)
        duplicates.by_purpose[purpose] = communicator
    return duplicates.by_purpose[purpose]


def prepare_end(mpi: MPI.Intracomm) -> None:
    """Local. From now on an exception on this rank ends the job, and with it ranks that wait for this one.

    Args:
        mpi: A communicator of this rank; error texts name the rank by its number there, unless another one was opened
            before.
    """
    if not ending.is_switched_off():
        ending.install(
            mpi.rank, mpi.size, MPI.Get_processor_name(),
            ending.MpiFunctions(MPI.COMM_WORLD.Abort, MPI.Is_finalized, end_mpi, _find_dead_ranks),
            aborts_in_threads=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        )


def _open(mpi: MPI.Intracomm, known: tuple[Process, ...]) -> MpiCommunicator:
    # An error of MPI becomes a Python exception, and the job ends with its traceback. MPI's default handler would
    # end the process without one.
    mpi.Set_errhandler(MPI.ERRORS_RETURN)
    # Errors between processes without a common communicator are reported there: a death must not end this process.
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    here = this_process(MPI.Get_processor_name())
    told = gather_objects(mpi, (here, ending.is_switched_off(), descriptors_missing()))
    processes = [process for process, _, _ in told]
    # Before more is done: what fails on one rank from here on ends the job.
    # One rank's environment counts for all: a rank without hooks takes no leave, and others would wait for it.
    if not any(is_off for _, is_off, _ in told):
        prepare_end(mpi)
    for rank, (process, _, why) in enumerate(told):
        if why:
            raise mark_shared(OSError(errno.EMFILE, f"opening a communicator: rank {rank} ({process.host}): {why}"))
    WATCH.refuse_children()
    # Before the nodes are known: MPI may count the ranks of a host as several.
    WATCH.watch(processes, mpi.rank)
    WATCH.take_notices(has_other_hosts=len({process.host for process in processes}) > 1)
    communicator = MpiCommunicator(mpi, known=known)
    communicator.is_shared = True
    tell_opened()
    return communicator


def _find_dead_ranks(error: BaseException) -> list[str]:
    """The names of the ranks whose death an error of MPI reports (MPI 5.0, chapter 12; before it, ULFM)."""
    if not isinstance(error, MPI.Exception):
        return []
    classes = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")}
    if error.Get_error_class() not in classes:
        return []
    try:
        world = MPI.COMM_WORLD.Get_group()
        failed = MPI.COMM_WORLD.Get_failed()
        ranks = MPI.Group.Translate_ranks(failed, list(range(failed.size)), world)
    except (MPI.Exception, NotImplementedError):
        ranks = []
    return [f"rank {rank} of {MPI.COMM_WORLD.size}" for rank in ranks] or [SOME_RANK]
