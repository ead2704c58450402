"""The doctor's look at the ranks of a job: where they are, how they communicate, and how fast."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from mpidist.cli.doctor.finding import Finding
from mpidist.cli.doctor.gpus import look_at_gpus
from mpidist.cli.doctor.places import look_at_hosts, look_at_places
from mpidist.cli.doctor.times import SECONDS, look_at_times
from mpidist.cluster.launch_line import find_starter, launch_line, survives_deaths
from mpidist.comm.choice.selection import OVERRIDE, agreed, asked_for, choose
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_library import loaded_library
from mpidist.errors import MpidistError
from mpidist.options import CommunicationOptions


def look_at_ranks(
    communicator: Communicator, own: Sequence[Finding] = (), seconds: float | None = SECONDS
) -> Iterator[list[Finding]]:
    """Collective. Look at the ranks of this job.

    Args:
        communicator: All ranks.
        own: The findings of `machine.look`, on the first rank of each host.
        seconds: The time limit for measuring sums over the ranks; None: no sums are measured.

    Yields:
        Findings, as they come. Those of rank 0 count.
    """
    yield list(look_at_hosts(communicator, own))
    yield list(look_at_places(communicator))
    yield list(_threads(communicator))
    yield list(_deaths(communicator))
    yield look_at_gpus(communicator)
    yield list(_collective(communicator, seconds))


def _threads(communicator: Communicator) -> Iterator[Finding]:
    mpi: Any = importlib.import_module("mpi4py.MPI")
    level = min(communicator.all_gather_object(int(mpi.Query_thread())))
    if level == mpi.THREAD_MULTIPLE:
        yield Finding("threads in MPI", "ok", f"THREAD_MULTIPLE, {loaded_library()}")
    else:
        yield Finding(
            "threads in MPI", "note", "less than THREAD_MULTIPLE: nothing is reduced in the background",
            "unset MPI4PY_RC_THREAD_LEVEL MPI4PY_RC_THREADS, or use an MPI that is built with threads",
        )


def _deaths(communicator: Communicator) -> Iterator[Finding]:
    answers = communicator.all_gather_object(survives_deaths())
    if False not in answers and True in answers:
        yield Finding("death of a rank", "ok", "the other ranks survive")
        return
    if communicator.rank:
        # Rank 0's findings count, and it asks the launcher.
        return
    try:
        fix = launch_line(find_starter(), communicator.size, ("python", "train.py"), survives=True)
    except MpidistError as error:
        fix = str(error)
    yield Finding("death of a rank", "ok", f"ends the job; parameter servers survive it if launched by: {fix}")


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Local. Keep a line."""
        self.lines.append(record.getMessage())


def _collective(communicator: Communicator, seconds: float | None) -> Iterator[Finding]:
    # The choice says why in the log.
    logger, lines = logging.getLogger("mpidist"), _Lines()
    level, spreads = logger.level, logger.propagate
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    options = CommunicationOptions()
    try:
        # A name that one rank cannot read; then names that differ: all ranks raise alike.
        together(communicator, f"reading {OVERRIDE}", lambda: asked_for(options))
        collective = choose(communicator, agreed(communicator, options))
    except (MpidistError, ValueError) as error:
        yield Finding("collective", "wrong", str(error), f"unset {OVERRIDE}, on all ranks")
        return
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
        logger.propagate = spreads
    with collective:
        yield Finding("collective", "ok", "; ".join(lines.lines) or "one rank needs none")
        if seconds is not None and communicator.size > 1:
            yield from look_at_times(communicator, collective, seconds)
