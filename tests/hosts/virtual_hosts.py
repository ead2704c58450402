"""Virtual hosts as tests use them: opened, asked to run a job, closed."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from tests.helpers import launching, limits, waiting

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
# Half a second where nothing else runs.
START_SECONDS = 60
# Prints the commands that run on a host, without its first process, the shell that runs this, and itself. A process
# that has ended and was not yet collected has no command line.
_PROCESSES = """
import os
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid()):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                text = file.read().replace(chr(0), " ").strip()
        except OSError:
            continue
        if text:
            print(text)
"""


class HostsError(Exception):
    """The hosts could not be started."""


def unshare(*, network: bool = True) -> list[str]:
    """The command that starts another one in namespaces of its own: a host's, or all that hold hosts.

    Args:
        network: Whether that of the network is among them.
    """
    # Without root, a user namespace gives the rights of root inside it.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    net = ["--net"] if network else []
    return ["unshare", *user, *net, "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


@functools.cache
def why_unavailable() -> str | None:
    """The reason why this machine does not allow virtual hosts, or None. Tries each right that they need."""
    missing = [name for name in ("unshare", "nsenter", "mount", "ip") if shutil.which(name) is None]
    if missing:
        return f"virtual hosts need {', '.join(missing)} (Debian: util-linux, iproute2)"
    inside = "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys"
    attempt = (
        "ip link add name bridge0 type bridge && ip link add name end0 type veth peer name end1 && "
        f"unshare --net --uts --ipc --mount --pid --fork sh -c '{inside}'"
    )
    result = subprocess.run([*unshare(), "sh", "-c", attempt], capture_output=True, text=True, check=False, timeout=60)
    if result.returncode == 0:
        return None
    last = (result.stderr.strip().splitlines() or [f"code {result.returncode}"])[-1]
    return f"virtual hosts need the right to make namespaces: {last}"


class VirtualHosts:
    """Hosts `n1`, `n2` and so on, on one bridge.

    Args:
        count: Number of hosts.
        python: The interpreter whose MPI starts the jobs.

    Attributes:
        survivors_live: Whether ranks are to live after the death of another; default: the launcher's default.
        launcher_options: Further options of `mpirun`.

    Raises:
        HostsError: They did not start; with what was printed.
    """

    def __init__(self, count: int, python: str = sys.executable) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.python = python
        self.survivors_live = False
        self.launcher_options: list[str] = []
        # Not a test's own folder: a socket's name has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="mpidist-hosts-", dir="/tmp"))
        # MPICH's mpirun takes one word, which has no room for arguments.
        self.shell = self.folder / "shell"
        self.shell.write_text(f'#!/bin/sh\nexec {shlex.join(self._shell_command())} "$@"\n')
        self.shell.chmod(0o755)
        self._rack = subprocess.Popen(
            [*unshare(), sys.executable, "-IS", str(FOLDER / "rack.py"), str(self.folder), *self.names],
            # In a session of its own: an interrupt from the terminal must reach the test run only, which closes the
            # hosts when it has dealt with it.
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def start(
        self, ranks: Sequence[int], program: Path, *arguments: object, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a Python program by `mpirun` on the first host.

        Args:
            ranks: Number of ranks of each host, in the order of the hosts.
            program: What to run.
            *arguments: Of the program.
            **environment: Variables for every rank.

        Returns:
            The process of the job. Ending it kills `mpirun`.
        """
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        pace = {name: os.environ[name] for name in (limits.VARIABLE,) if name in os.environ}
        variables = {**launching.NEW_VARIABLES, **launching.GIVE_WAY, **pace, "PYTHONPATH": path, **environment}
        answering = launching.answering(program) if self.survivors_live else []
        command = [*self._mpirun(ranks, list(variables)), self.python, *answering, str(program), *map(str, arguments)]
        words = ["cd", str(ROOT), "&&", "exec", "env", *(shlex.quote(f"{k}={v}") for k, v in variables.items())]
        return self.execute(self.names[0], " ".join([*words, shlex.join(command)]))

    def run(
        self, ranks: Sequence[int], program: Path, *arguments: object, timeout_seconds: float = 60,
        meanwhile: Callable[[subprocess.Popen[str]], object] | None = None, **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program to its end, as `start` does; see `launching.run_program`."""
        process = self.start(ranks, program, *arguments, **environment)
        return launching.finish(process, program.name, timeout_seconds, meanwhile)

    def process_of(self, rank: int) -> int:
        """The process of a rank of the only job, by its number outside the hosts; waits until it has begun."""
        return waiting.process_of(rank, self._rack.pid)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank of the only job."""
        os.kill(self.process_of(rank), number)

    def cut(self, name: str) -> None:
        """Take a host off the network."""
        result = launching.finish(self.execute(name, "ip link set eth0 down"), "ip", 60)
        assert result.returncode == 0, result.stderr

    def execute(self, name: str, command: str) -> subprocess.Popen[str]:
        """Start a shell command on a host."""
        return subprocess.Popen(
            [*self._shell_command(), name, command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )

    def processes(self, name: str) -> list[str]:
        """The command lines of all that runs on a host, apart from the host itself."""
        process = self.execute(name, f"{shlex.quote(sys.executable)} -IS -c {shlex.quote(_PROCESSES)}")
        result = launching.finish(process, "the list of processes", 60)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    def close(self) -> None:
        """End everything that runs on the hosts, and remove them."""
        assert self._rack.stdin is not None
        assert self._rack.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._rack.stdin.close()
        try:
            self._rack.wait(10)
        except subprocess.TimeoutExpired:
            # Its child, the first process of the namespace, dies with it.
            self._rack.kill()
            self._rack.wait(10)
        self._rack.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> VirtualHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _mpirun(self, ranks: Sequence[int], variables: Sequence[str]) -> list[str]:
        if not 0 < len(ranks) <= len(self.names) or min(ranks) < 1:
            raise ValueError(f"`ranks` must hold 1 or more for each of at most {len(self.names)} hosts, got {ranks!r}")
        mpirun = launching.find_mpirun(self.python)
        hosts = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks, strict=False))
        if launching.is_open_mpi(mpirun):
            # Its daemons have the environment of a login: what ranks are to see has to be named.
            named = [word for name in variables for word in ("-x", name)]
            # All hosts have the same few cores, but each takes them for its own: ranks would be bound to the same
            # ones, and would never give way where they wait.
            yielding = ["--mca", "mpi_yield_when_idle", "1"]
            placed = ["--host", hosts, "--map-by", "slot", "--bind-to", "none", *yielding]
            start = [mpirun, "--prtemca", "plm_ssh_agent", str(self.shell), *placed, *named]
        else:
            start = [mpirun, "-launcher", "ssh", "-launcher-exec", str(self.shell), "-hosts", hosts]
        lasting = launching.survival_options(mpirun, tells_codes=True, hosts=len(ranks))
        survival = lasting if self.survivors_live else []
        return [*start, *survival, *self.launcher_options, "-n", str(sum(ranks))]

    def _shell_command(self) -> list[str]:
        return [sys.executable, "-IS", str(FOLDER / "shell.py"), str(self.folder)]

    def _wait_until_ready(self) -> None:
        assert self._rack.stdout is not None
        ready, _, _ = select.select([self._rack.stdout], [], [], limits.limit(START_SECONDS))
        line = self._rack.stdout.readline() if ready else ""
        if line.strip() != "ready":
            self._rack.kill()
            raise HostsError(f"virtual hosts did not start: {line}{self._rack.stdout.read()}")
