"""CUDA awareness: whether the MPI library takes pointers to GPU memory. A wrong "yes" would be a segmentation fault.

The answer comes from, in this order: known limits of the library; its switches in the environment that are off or
missing; the library itself (`MPIX_Query_cuda_support`, after MPI_Init). If these leave it open, as with Cray's MPICH,
which may deny its support, a child process tries it. The child is started by `fork` and `exec` at once, in an
environment without the launcher's variables. If a strategy binds GPUs, that is before MPI and CUDA start.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.comm.gpu.transport import OFF, ON, SWITCHES
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_library import Library, device_limit, loaded_library
from mpidist.comm.user_cache import cache_folder, write_whole

PROBE_SECONDS = 120.0


# Variables that a launcher sets for its ranks. Settings of the user (OMPI_MCA_pml, UCX_TLS, ...) are not among them,
# since the answer depends on them.
_LAUNCHER_PREFIXES = (
    "PMI_", "PMI2_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "MV2_COMM_WORLD_", "MVP_COMM_WORLD_",
    "PALS_", "FLUX_", "JSM_", "SLURM_", "ALPS_", "I_MPI_HYDRA_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_",
    "OMPI_WORLD_", "OMPI_FILE_", "OMPI_FIRST_", "OMPI_NUM_", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_TOOL_",
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_prte", "OMPI_MCA_schizo", "OMPI_MCA_initial_wdir",
    "OMPI_MCA_num_procs",
)
_SETTING_PREFIXES = ("OMPI_MCA_", "MPICH_", "MPIR_CVAR_", "MV2_", "PSP_", "I_MPI_", "UCX_", "FI_", "MPI4PY_", "CUDA_")


@dataclass(frozen=True)
class Awareness:
    """Whether MPI takes pointers to GPU memory, None if it is not known, and the reason."""

    is_aware: bool | None
    why: str


def find_out(communicator: Communicator) -> Awareness:
    """Collective. Whether all ranks may give MPI pointers to GPU memory; the same answer on every rank.

    Takes seconds if a child process has to try it, the first time on a host.
    """
    def ask() -> Awareness | None:
        return _ask(loaded_library(), os.environ) if communicator.node.rank == 0 else None

    answers = communicator.all_gather_object(together(communicator, "asking whether MPI is CUDA-aware", ask))
    told = [answer for answer in answers if answer is not None]
    return next((answer for answer in told if not answer.is_aware), told[0])


def _ask(library: Library, environment: Mapping[str, str]) -> Awareness:
    limit = device_limit(library)
    if limit is not None:
        return Awareness(False, limit)
    answer = decide(library, environment, query())
    if answer.is_aware is not None:
        return answer
    cuda: Any = importlib.import_module("mpidist.comm.gpu.cuda")
    if cuda.is_exclusive(cuda.current_device()):
        return Awareness(False, f"{answer.why}, and no child process can test it: the GPU takes one process at a time")
    return start_probe().answer(str(library))


def decide(library: Library, environment: Mapping[str, str], queried: bool | None) -> Awareness:
    """Local. The answer from the library and its switches.

    Args:
        library: The MPI library.
        environment: The environment, which has its switches.
        queried: The library's own answer, None if it has no function for it.

    Returns:
        The answer. Its `is_aware` is None if a child process has to try it.
    """
    is_on = False
    for switch in (switch for switch in SWITCHES if switch.library == library.name):
        value = environment.get(switch.variable, "").strip().lower()
        if value in OFF:
            return Awareness(False, f"{switch.variable}={value}")
        is_on = is_on or value in ON
        if switch.needed and not is_on:
            return Awareness(False, f"{library} takes GPU memory under {switch.variable}=1, which is not set")
    if queried:
        return Awareness(True, f"{library} says so")
    if queried is False and not is_on:
        return Awareness(False, f"{library} denies it")
    return Awareness(None, f"{library} does not say")


def query() -> bool | None:
    """Local. The loaded library's own answer, None if it has no function for it. To be called after MPI has started."""
    module = sys.modules["mpi4py.MPI"]
    # The function may be visible through mpi4py's module or in the process itself.
    for name in (module.__file__, None):
        with contextlib.suppress(OSError, AttributeError):
            function: Any = ctypes.CDLL(name).MPIX_Query_cuda_support
            function.restype = ctypes.c_int
            return bool(function())
    return None


@functools.cache
def start_probe() -> Probe:
    """Local. The probe of this process, started by the first call."""
    return Probe()


class Probe:
    """Local. A child process that gives MPI a pointer to GPU memory. If the child dies of it, the answer is no.

    Args:
        memory: "cupy", or "numpy" to try the same with host memory, which must succeed.
        folder: The folder in which answers are kept. Default: `mpidist` in the user's cache.
    """

    def __init__(self, memory: str = "cupy", folder: Path | None = None) -> None:
        self._path = (folder or cache_folder()) / f"cuda-aware-{socket.gethostname()}-{_settings(memory)}.json"
        self._known = _read(self._path)
        self._child: subprocess.Popen[str] | None = None
        if self._known is None:
            self._child = _start_child(memory)

    @property
    def is_running(self) -> bool:
        """Local. Whether a child was started, because no answer was kept."""
        return self._child is not None

    def answer(self, library: str) -> Awareness:
        """Local. The kept answer, or the child's, after waiting for the child to end.

        Args:
            library: The library that this process has loaded. If the child has loaded another one, the answer is no.
        """
        if self._known is None:
            if self._child is None:
                raise RuntimeError("the probe has neither an answer nor a child")
            self._known = _outcome(self._child)
            if _is_final(self._known, self._child.returncode):
                _keep(self._path, self._known)
        said = self._known.get("library")
        if said is not None and said != library:
            return Awareness(False, f"the probe has loaded {said}, and this process {library}")
        if self._known.get("messages") and self._known.get("sums"):
            return Awareness(True, "a child process tested it")
        return Awareness(False, f"a child process tried it: {self._known.get('reason', 'it failed')}")


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Local. The environment without a launcher's variables, with which the child would join the job or end it."""
    return {name: value for name, value in environment.items() if not name.startswith(_LAUNCHER_PREFIXES)}


def _start_child(memory: str) -> subprocess.Popen[str]:
    environment = child_environment(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "mpidist.comm.gpu.cuda_probe", memory],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )


def _outcome(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The results that the child printed before it ended, one JSON object in each line."""
    known: dict[str, Any] = {}
    try:
        output, _ = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        known["reason"] = f"it did not end within {PROBE_SECONDS:g} s"
    for line in output.splitlines():
        # MPI libraries print to the same stream: lines that are no JSON are not the child's.
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                known.update(said)
    if child.returncode and "reason" not in known:
        last = "messages" if "messages" not in known else "sums"
        known["reason"] = f"it ended with code {child.returncode} in {last}"
    return known


def _is_final(known: Mapping[str, Any], code: int) -> bool:
    """Whether a child's result would be the same next time: not if the GPU was busy, or the child was killed."""
    return ("library" in known or bool(known.get("is_final"))) and code not in (-signal.SIGKILL, -signal.SIGTERM)


def _settings(memory: str) -> str:
    """A hash of everything that is known before MPI starts and on which the answer depends."""
    described: dict[str, object] = {"memory": memory, "prefix": sys.prefix}
    # Loaded by name: it takes as long as a tenth of a strategy, and is needed with GPUs only.
    metadata: Any = importlib.import_module("importlib.metadata")
    for package in ("mpi4py", "cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            described[package] = metadata.version(package)
    described["settings"] = sorted(
        (name, value) for name, value in child_environment(os.environ).items()
        if name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "LOADEDMODULES")
        # The choice of visible GPUs makes no difference, and differs between ranks.
        or (name.startswith(_SETTING_PREFIXES) and name != "CUDA_VISIBLE_DEVICES")
    )
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) else None


def _keep(path: Path, known: dict[str, Any]) -> None:
    # If the folder cannot be written to, the child runs again next time.
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(known))
