"""The daemons of Slurm on virtual hosts, and jobs as tests submit them and wait for them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.helpers import launching, stuck
from tests.helpers.limits import limit
from tests.helpers.processes import with_variable
from tests.hosts.virtual_hosts import ROOT, VirtualHosts, why_unavailable

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
PACKAGES = "slurm-wlm slurmd slurmctld slurm-client munge libpmix2"
# A second where nothing else runs.
START_SECONDS = 60
COMMAND_SECONDS = 60
JOB_SECONDS = 120
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
# Slurm loads it by a name that only the package for developers has.
PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")
# Seconds for which a job that was queued again waits; Slurm's own default is 120.
CREDENTIAL_SECONDS = 5

# Character devices that stand for GPUs: any will do, nobody opens them.
_GPUS = ("/dev/null", "/dev/zero")
_CONFIGURATION = """
ClusterName=private
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_seconds}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TmpFS={folder}/tmp.%n
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Believe the number of cores below, not the machine's.
SlurmdParameters=config_overrides
KillWait=15
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={nodes} CPUs=4 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


# Slurm's own server for MPICH was seen to misread a message of a start, once in 250 jobs; that job waits for ever. Once
# Open MPI crashed in its start, where a first message came too early (github.com/open-mpi/ompi/issues/12495).
NOT_STARTED = (
    re.compile(r"mpi/pmi2: invalid client request"),
    re.compile(r"mca_pml_ob1_recv_frag_callback_match.*\(ompi_mpi_init\+", re.DOTALL),
)


class SlurmError(Exception):
    """Slurm did not start, or has refused a command."""


# Seconds after which a step without tasks counts as one that does not end; an ordinary one ends within one.
STEP_END_SECONDS = 20
# The processes of a job whose tasks have ended, or have not begun.
_WITHOUT_TASKS = {"slurm_script", "srun"}


class NotStartedError(stuck.OutsideError):
    """Slurm has not brought the ranks of a job together."""


class NotEndedError(stuck.OutsideError):
    """All ranks of a job have ended, and `srun` has not."""


class Job(NamedTuple):
    """A job as Slurm shows it.

    Attributes:
        state: "COMPLETED" or another word of Slurm's.
        code: The exit code of its script.
        restarts: How often it was started again.
        output: What it has printed so far.
    """

    state: str
    code: int
    restarts: int
    output: str


@functools.cache
def why_no_slurm() -> str | None:
    """The reason why this machine has no Slurm for tests, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)} (Debian: {PACKAGES})"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    return why_unavailable()


class PrivateSlurm:
    """A cluster of nodes `n1`, `n2` and so on, with four cores and two fake GPUs each, in two partitions.

    A job of the partition `urgent` takes the nodes of one in `main`, which is queued again.

    Args:
        nodes: Number of nodes.
        python: The interpreter that jobs run as `python`; its MPI is theirs.

    Raises:
        SlurmError, HostsError: It did not start; with what the daemons have written.
    """

    def __init__(self, nodes: int = 4, python: str = sys.executable) -> None:
        self._hosts = VirtualHosts(nodes, python)
        self.folder = self._hosts.folder / "slurm"
        self._daemons: list[subprocess.Popen[str]] = []
        self.mpi = "pmix" if launching.is_open_mpi(launching.find_mpirun(python)) else "pmi2"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        script: str | Path,
        *arguments: object,
        folder: Path,
        options: Sequence[object] = (),
        **environment: str,
    ) -> int:
        """Submit a script by `sbatch`.

        Args:
            script: Its path, from `folder`.
            *arguments: Of the script.
            folder: The working folder, where its output goes; `copy_tree` makes it look like the repository.
            options: Of sbatch.
            **environment: Variables of the script.

        Returns:
            The number of the job.
        """
        words = ["sbatch", "--parsable", f"--chdir={folder}", *options, script, *arguments]
        return int(self._checked(words, self.attempt(*words, folder=folder, **environment)))

    def submit_command(self, command: str, *, folder: Path, options: Sequence[object] = (), **environment: str) -> int:
        """Submit lines of a shell, as `submit` does; they come into a file of the folder."""
        script = folder / "job.sbatch"
        script.write_text(f"#!/bin/bash\n{command}\n")
        return self.submit(script.name, folder=folder, options=["--output=%j.out", *options], **environment)

    def show(self, job: int | str) -> Job:
        """The job as it is now; "7_2" is an element of an array.

        Raises:
            NotStartedError: Slurm has not brought its ranks together; it is cancelled.
        """
        text = self.ask("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        found = {name: value for name, _, value in (word.partition("=") for word in text.split())}
        # Of a heterogeneous job the first component has the script.
        path = Path(found["StdOut"])
        output = path.read_text(errors="replace") if path.exists() else ""
        if any(one.search(output) for one in NOT_STARTED):
            self.ask("scancel", job)
            raise NotStartedError(output)
        # Slurm shows an exit code together with a signal.
        return Job(found["JobState"], int(found["ExitCode"].partition(":")[0]), int(found["Restarts"]), output)

    def wait(self, job: int | str, timeout_seconds: float = JOB_SECONDS) -> Job:
        """Wait for the end of a job; after the time limit it is cancelled, and the test fails with its output.

        Raises:
            NotEndedError: All ranks have ended, and `srun` has not; it is cancelled.
        """
        end = time.monotonic() + limit(timeout_seconds)
        has_tasks = time.monotonic()
        while (seen := self.show(job)).state not in ENDS:
            now = time.monotonic()
            running = self._running()
            if set(running.values()) != _WITHOUT_TASKS:
                has_tasks = now
            if now > min(end, has_tasks + limit(STEP_END_SECONDS)):
                text = f"job {job} did not end within {timeout_seconds} s: {seen}\n{stuck.describe(running)}"
                self.ask("scancel", job)
                # Slurm 22.05 has a race there: in 1 of 142 heterogeneous jobs with PMIx on a busy machine, srun waited
                # for a thread of its own (pmixp_abort_agent_stop).
                raise NotEndedError(text) if now <= end else AssertionError(text)
            time.sleep(0.2)
        return self.show(job)

    def _running(self) -> dict[int, str]:
        """The processes of jobs, with their names: the script, srun, and what they have started."""
        names = {}
        for process in with_variable(f"SLURM_CONF={self.folder / 'slurm.conf'}"):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{process}/comm").read_text().strip()
                # Those of Slurm's daemons for steps stay as long as these.
                if not name.startswith(("slurmstepd", "slurmd", "slurmctld", "munged")):
                    names[process] = name
        return names

    def wait_for(self, job: int | str, pattern: str, timeout_seconds: float = JOB_SECONDS) -> Job:
        """Wait until a job has printed a pattern; it fails the test if the job ends without."""
        end = time.monotonic() + limit(timeout_seconds)
        while not re.search(pattern, (seen := self.show(job)).output):
            assert seen.state not in ENDS, f"job {job} ended before it printed {pattern!r}: {seen}"
            assert time.monotonic() < end, f"job {job} has not printed {pattern!r} in {timeout_seconds} s: {seen}"
            time.sleep(0.1)
        return seen

    def ask(self, *words: object) -> str:
        """Run a command on the first node, which must succeed; returns what it has printed."""
        return self._checked(words, self.attempt(*words))

    def attempt(
        self, *words: object, folder: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node, as a user at a login node does."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        variables = {
            **launching.NEW_VARIABLES, **launching.GIVE_WAY,
            # All nodes have the same few cores, and each takes them for its own.
            "OMPI_MCA_mpi_yield_when_idle": "1", "PRTE_MCA_hwloc_default_binding_policy": "none",
            "MPI": self.mpi, "PYTHONPATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(self._hosts.python).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", **environment,
        }
        setting = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
        line = f"cd {shlex.quote(str(folder))} && exec {setting} {shlex.join(map(str, words))}"
        return launching.finish(self._hosts.execute("n1", line), str(words[0]), COMMAND_SECONDS)

    def _checked(self, words: Sequence[object], result: subprocess.CompletedProcess[str]) -> str:
        if result.returncode:
            raise SlurmError(f"`{shlex.join(map(str, words))}` failed: {result.stderr.strip() or result.stdout}")
        return result.stdout

    def processes(self, node: str) -> list[str]:
        """The command lines of what runs on a node, apart from Slurm's daemons."""
        ours = ("slurmd", "slurmctld", "munged")
        return [line for line in self._hosts.processes(node) if not any(name in line for name in ours)]

    def close(self) -> None:
        """End all daemons and jobs, and remove the nodes with everything on them."""
        self._hosts.close()
        for daemon in self._daemons:
            daemon.communicate(timeout=60)

    def __enter__(self) -> PrivateSlurm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        names = self._hosts.names
        for path in [self.folder, self.folder / "state", *(self.folder / f"tmp.{name}" for name in names)]:
            path.mkdir()
        text = _CONFIGURATION.format(
            folder=self.folder, nodes=",".join(names), gpus=len(_GPUS), credential_seconds=CREDENTIAL_SECONDS
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(
            "AutoDetect=off\n" + "".join(f"NodeName={','.join(names)} Name=gpu File={path}\n" for path in _GPUS)
        )
        # Nothing uses control groups, yet slurmd would look for theirs and not start where there is none.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        # By force, since anybody may write to /tmp, in which its folder is.
        kinds = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        named = [f"--{name}={self.folder / value}" for name, value in kinds.items()]
        self._daemon("n1", "munged", ["munged", "--foreground", "--force", "--num-threads=2", *named])
        self._wait_until((self.folder / "munge.socket").exists, "munged")
        configuration = str(self.folder / "slurm.conf")
        self._daemon("n1", "slurmctld", ["slurmctld", "-D", "-f", configuration])
        self._copy_pmix()
        for name in names:
            self._daemon(name, f"slurmd.{name}", ["slurmd", "-D", "-f", configuration])
        self._wait_until(lambda: self._idle_nodes() == len(names), "the nodes")

    def _daemon(self, node: str, name: str, words: list[str]) -> None:
        bind = ""
        if name.startswith("slurmd."):
            # In this node only.
            copy = self.folder / "pmix"
            bind = f"mount --bind {shlex.quote(str(copy))} {PMIX} && " if copy.exists() else ""
        log = shlex.quote(str(self.folder / f"{name}.log"))
        # A session of its own is what slurmd wants, and the host has given it one.
        self._daemons.append(self._hosts.execute(node, f"{bind}exec {shlex.join(words)} > {log} 2>&1"))

    def _copy_pmix(self) -> None:
        if (PMIX / "libpmix.so.2").exists() and not (PMIX / "libpmix.so").exists():
            copy = self.folder / "pmix"
            shutil.copytree(PMIX, copy, symlinks=True)
            (copy / "libpmix.so").symlink_to("libpmix.so.2")

    def _idle_nodes(self) -> int:
        result = self.attempt("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D")
        return sum(int(line) for line in result.stdout.split() if line.isdecimal())

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + limit(START_SECONDS)
        while not condition():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self._daemons):
                logs = [f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log"))]
                raise SlurmError(f"{what} did not start:\n" + "\n".join(logs))
            time.sleep(0.05)


def copy_tree(folder: Path) -> Path:
    """Make a folder look like the repository, so that what jobs write there does not go into it."""
    for name in ("examples", "slurm", "tests", "pyproject.toml"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder
