"""Whether the MPI library takes pointers to GPU memory. A wrong yes is a segmentation fault, so a wrong no is better.

Asked in this order: a switch in the environment that is off; the library itself (`MPIX_Query_cuda_support`, after
MPI_Init); what its switches in the environment say; and where these leave it open, as with Cray's MPICH, which may
deny what it can do, a child process tries. The child is begun by `fork` and `exec` at once, in an environment without
the launcher's variables; where a strategy binds GPUs, that is before MPI and CUDA start. Untested on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator
from mpidist.comm.mpi_library import Library, device_limit, loaded_library
from mpidist.options import parse_enum

TRANSPORT = "MPIDIST_GPU_TRANSPORT"
PROBE_SECONDS = 120.0

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Transport(enum.Enum):
    """How arrays in GPU memory are combined; the values of `MPIDIST_GPU_TRANSPORT`, with - for _."""

    # In the order in which they are tried.
    AUTO = "auto"
    NCCL = "nccl"
    CUDA_AWARE = "cuda-aware"
    STAGED = "staged"


@dataclass(frozen=True)
class Switch:
    """A variable that switches a library's use of GPUs on or off.

    Attributes:
        library: Whose; empty: of any library that has UCX below.
        variable: Its name.
        needed: Without it the library takes no GPU memory.
    """

    library: str
    variable: str
    needed: bool


SWITCHES: tuple[Switch, ...] = (
    Switch("Cray MPICH", "MPICH_GPU_SUPPORT_ENABLED", needed=True),
    Switch("MVAPICH", "MV2_USE_CUDA", needed=True),
    Switch("ParaStation MPI", "PSP_CUDA", needed=True),
    Switch("Intel MPI", "I_MPI_OFFLOAD", needed=True),
    Switch("MPICH", "MPIR_CVAR_ENABLE_GPU", needed=False),
    Switch("Open MPI", "OMPI_MCA_opal_cuda_support", needed=False),
)

# What a launcher tells its ranks; settings of a user (OMPI_MCA_pml, UCX_TLS, ...) stay, as the answer depends on them.
_LAUNCHER_PREFIXES = (
    "PMI_", "PMI2_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "MV2_COMM_WORLD_", "MVP_COMM_WORLD_",
    "PALS_", "FLUX_", "JSM_", "SLURM_", "ALPS_", "I_MPI_HYDRA_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_",
    "OMPI_WORLD_", "OMPI_FILE_", "OMPI_FIRST_", "OMPI_NUM_", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_TOOL_",
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_prte", "OMPI_MCA_schizo", "OMPI_MCA_initial_wdir",
    "OMPI_MCA_num_procs",
)
_SETTING_PREFIXES = ("OMPI_MCA_", "MPICH_", "MPIR_CVAR_", "MV2_", "PSP_", "I_MPI_", "UCX_", "FI_", "MPI4PY_", "CUDA_")


@dataclass(frozen=True)
class Answer:
    """Whether MPI takes pointers to GPU memory, None where it is not known, and who says so."""

    is_aware: bool | None
    why: str


def asked_transport(environment: Mapping[str, str] | None = None) -> Transport:
    """Local. What `MPIDIST_GPU_TRANSPORT` asks for.

    Raises:
        ValueError: It names no transport.
    """
    text = (os.environ if environment is None else environment).get(TRANSPORT) or "auto"
    return parse_enum(Transport, text.replace("-", "_"), TRANSPORT)


def find_out(communicator: Communicator) -> Answer:
    """Collective. Whether all ranks may give MPI pointers to GPU memory; the same answer on all.

    Slow, seconds, where a child process has to try for the first time on a host.
    """
    def ask() -> Answer | None:
        return _ask(loaded_library(), os.environ) if communicator.node.rank == 0 else None

    answers = communicator.all_gather_object(together(communicator, "asking whether MPI is CUDA-aware", ask))
    told = [answer for answer in answers if answer is not None]
    return next((answer for answer in told if not answer.is_aware), told[0])


def _ask(library: Library, environment: Mapping[str, str]) -> Answer:
    limit = device_limit(library)
    if limit is not None:
        return Answer(False, limit)
    answer = decide(library, environment, query())
    if answer.is_aware is not None:
        return answer
    return start_probe().answer(str(library))


def decide(library: Library, environment: Mapping[str, str], queried: bool | None) -> Answer:
    """Local. The answer from the library and its switches.

    Args:
        library: The MPI library.
        environment: With its switches.
        queried: What the library says, None where it cannot be asked.

    Returns:
        `is_aware` is None where a child process has to try.
    """
    is_on = False
    for switch in (switch for switch in SWITCHES if switch.library == library.name):
        value = environment.get(switch.variable, "").strip().lower()
        if value in _OFF:
            return Answer(False, f"{switch.variable}={value}")
        is_on = is_on or value in _ON
        if switch.needed and not is_on:
            return Answer(False, f"{library} takes GPU memory under {switch.variable}=1, which is not set")
    if queried:
        return Answer(True, f"{library} says so")
    if queried is False and not is_on:
        return Answer(False, f"{library} denies it")
    return Answer(None, f"{library} does not say")


def may_need_probe(environment: Mapping[str, str] | None = None) -> bool:
    """Local. Whether a switch is on, so that the library's own answer may not be the last word."""
    environment = os.environ if environment is None else environment
    return any(environment.get(switch.variable, "").strip().lower() in _ON for switch in SWITCHES)


def query() -> bool | None:
    """Local. What the loaded library itself says, None where it has no such function; only after MPI has started."""
    module = sys.modules["mpi4py.MPI"]
    for name in (module.__file__, None):
        with contextlib.suppress(OSError, AttributeError):
            function: Any = ctypes.CDLL(name).MPIX_Query_cuda_support
            function.restype = ctypes.c_int
            return bool(function())
    return None


@functools.cache
def start_probe() -> Probe:
    """Local. The probe of this process, begun at the first call."""
    return Probe()


class Probe:
    """A child process that gives MPI a pointer to GPU memory; if that ends it, the answer is no.

    Local. Args:
        memory: "cupy"; "numpy" tries the same with host memory, which must succeed.
        folder: Where answers are kept. Default: `mpidist` in the user's cache.
    """

    def __init__(self, memory: str = "cupy", folder: Path | None = None) -> None:
        self._path = (folder or _cache_folder()) / f"cuda-aware-{socket.gethostname()}-{_settings(memory)}.json"
        self._known = _read(self._path)
        self._child: subprocess.Popen[str] | None = None
        if self._known is None:
            self._child = _start_child(memory)

    @property
    def is_running(self) -> bool:
        """Local. Whether a child was started, since no answer was kept."""
        return self._child is not None

    def answer(self, library: str) -> Answer:
        """Local. The answer, when the child has ended, or the kept one.

        Args:
            library: The library that this process has loaded: an answer for another one does not count.
        """
        if self._known is None:
            if self._child is None:
                raise RuntimeError("the probe has neither an answer nor a child")
            self._known = _outcome(self._child)
            _keep(self._path, self._known)
        said = self._known.get("library")
        if said is not None and said != library:
            return Answer(False, f"the probe ran with {said} and not with {library}")
        if self._known.get("messages") and self._known.get("sums"):
            return Answer(True, "a child process tried it")
        return Answer(False, f"a child process tried it: {self._known.get('reason', 'it failed')}")


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Local. The environment without what a launcher tells its ranks: a child with it would join, or kill, the job."""
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
    """What the child could tell before it ended: one JSON object in each line."""
    known: dict[str, Any] = {}
    try:
        output, _ = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        known["reason"] = f"it did not end within {PROBE_SECONDS:g} s"
    for line in output.splitlines():
        # MPI libraries print to the same place.
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                known.update(said)
    if child.returncode and "reason" not in known:
        last = "messages" if "messages" not in known else "sums"
        known["reason"] = f"it ended with code {child.returncode} in {last}"
    return known


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mpidist"


def _settings(memory: str) -> str:
    """Names everything that the answer depends on and that is known before MPI starts."""
    described: dict[str, object] = {"memory": memory, "prefix": sys.prefix}
    for package in ("mpi4py", "cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            described[package] = importlib.metadata.version(package)
    described["settings"] = sorted(
        (name, value) for name, value in child_environment(os.environ).items()
        if name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "LOADEDMODULES")
        # Which of the GPUs a rank sees makes no difference.
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
    # Without a folder to write to the child runs again next time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps(known))
        part.replace(path)
