"""The doctor's look at the ranks of a job: where they are, how they speak with each other, and how fast."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from mpidist.cli.doctor_gpus import look_at_gpus
from mpidist.cli.doctor_times import SECONDS, look_at_times
from mpidist.cli.finding import Finding
from mpidist.cluster.launch_line import find_starter, launch_line, survives_deaths
from mpidist.comm.agreement import together
from mpidist.comm.choice.selection import OVERRIDE, agreed, asked_for, choose
from mpidist.comm.communicator import Communicator
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.mpi_library import loaded_library
from mpidist.errors import MpidistError
from mpidist.options import CommunicationOptions


def look_at_ranks(
    communicator: Communicator, *, measures: bool = True, seconds: float = SECONDS
) -> list[Finding]:
    """Collective. Look at the ranks of this job; every rank gets the findings.

    Args:
        communicator: All ranks.
        measures: Measure sums over the ranks, and messages between hosts.
        seconds: For so many at most.
    """
    findings = [*_places(communicator), *_threads(communicator), *_deaths(communicator), *look_at_gpus(communicator)]
    findings += _collective(communicator, measures=measures, seconds=seconds)
    # What ranks find themselves may differ: rank 0's is shown.
    return communicator.broadcast_object(findings)


def _places(communicator: Communicator) -> Iterator[Finding]:
    told = communicator.all_gather_object(
        (communicator.host, communicator.node_index, own_cores(), os.environ.get("OMP_NUM_THREADS", ""))
    )
    sizes = communicator.node_sizes
    hosts = dict.fromkeys(host for host, *_ in told)
    text = f"{communicator.size} on {len(sizes)} node(s) of {min(sizes)} to {max(sizes)}, {len(hosts)} host(s)"
    if len(sizes) > len(hosts):
        yield Finding(
            "ranks", "note", f"{text}: ranks of a host share no memory, so variables are stored more than once there",
            "give the containers of a host one /dev/shm and one PID namespace (docker run --ipc=host --pid=host)",
        )
    else:
        yield Finding("ranks", "ok", text)
    for node in range(len(sizes)):
        here = [(cores, threads) for _, index, cores, threads in told if index == node]
        count = count_cores([cores for cores, _ in here])
        own = [count_cores([cores]) for cores, _ in here]
        asked = [int(threads) if threads.isdecimal() else most for (_, threads), most in zip(here, own, strict=True)]
        wanted = sum(asked)
        text = f"node {node}: {len(here)} rank(s) on {count} core(s), {min(own)} to {max(own)} each, {wanted} thread(s)"
        mend = f"export OMP_NUM_THREADS={max(1, count // len(here))}"
        if len(here) > count:
            yield Finding("cores of ranks", "note", f"{text}: ranks wait for each other's cores", f"mpirun -n {count}")
        elif wanted > count:
            yield Finding("cores of ranks", "note", f"{text}: threads wait for each other's cores", mend)
        else:
            yield Finding("cores of ranks", "ok", text)


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
        yield Finding("death of a rank", "ok", "the other ranks live on")
        return
    try:
        mend = launch_line(find_starter(), communicator.size, ("python", "train.py"), survives=True)
    except MpidistError as error:
        mend = str(error)
    yield Finding("death of a rank", "ok", f"ends the job; parameter servers go on if it is started by: {mend}")


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Local. Keep a line."""
        self.lines.append(record.getMessage())


def _collective(communicator: Communicator, *, measures: bool, seconds: float) -> Iterator[Finding]:
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
        if measures and communicator.size > 1:
            yield from look_at_times(communicator, collective, seconds)
