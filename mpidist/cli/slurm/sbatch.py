"""Job scripts for `sbatch`: a script without the known traps, from a few options and what a site needs."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpidist.cli.texts import read_text
from mpidist.errors import UnavailableError

# Slurm's forms: minutes, hours:minutes:seconds, days-hours, and what is between.
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}", re.ASCII)
# The kinds of `srun --mpi`, by library.
MPI_KINDS = {"Open MPI": "pmix", "MPICH": "pmi2"}
_KIND = re.compile(r"\w[\w.-]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# The long name of an option of sbatch.
_OPTION = re.compile(r"[a-z][a-z0-9-]+")
# What the command's own options say, each with one of these.
_OF_COMMAND = {name: name for name in (
    "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time",
)} | {"ntasks": "ntasks-per-node"}
# Slurm reads a script by its lines, and refuses one with "\r\n".
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Site:
    """The needs of every job of a site, from a TOML file.

    Attributes:
        mpi: The kind for `srun --mpi`; None: that of the MPI at hand.
        setup: Lines of the script in front of the program, as `module load openmpi`.
        sbatch: Options of sbatch without their dashes, as `{"partition": "gpu"}`; True is an option without a value.
        environment: Variables to export.
    """

    mpi: str | None = None
    setup: tuple[str, ...] = ()
    sbatch: dict[str, str | int | bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        program: The words of the program: "train.py" and its options.
        nodes: Number of nodes.
        tasks_per_node: Number of ranks on each; None: one for each GPU, else 1.
        gpus_per_node: Number of GPUs on each.
        cpus_per_task: Number of cores of a rank.
        time: The limit, in a form of Slurm's.
        name: The name of the job.
        requeue: Whether the job may be requeued, and gets SIGUSR1 before its end.
        restart: Whether it starts again on its nodes when a rank dies or a node is lost.
    """

    program: tuple[str, ...]
    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    time: str = "01:00:00"
    name: str = ""
    requeue: bool = False
    restart: bool = False


def read_program(words: Sequence[str]) -> tuple[str, ...]:
    """Local. The words of a program, which may come as one text: "train.py --epochs 5".

    Args:
        words: The words of the command line.

    Raises:
        ValueError: There is no program, or an option in its place.
    """
    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.isfile(words[0]):
        try:
            words = shlex.split(words[0])
        except ValueError as error:
            raise ValueError(f"expected a program and its options, got {words[0]!r}: {error}") from None
    if not words or not words[0].strip():
        raise ValueError(f"expected a program, such as train.py --epochs 5, got {shlex.join(words) or 'nothing'}")
    if words[0].startswith("-"):
        raise ValueError(
            f"expected a program, such as train.py --epochs 5, got the option {words[0]!r}. If it is "
            f"one of Python's, write python in front of it: {shlex.join(['python', *words])}"
        )
    return tuple(words)


def started(words: Sequence[str], python: str = "python") -> list[str]:
    """Local. The words that start a program: a file of Python's gets `python` in front.

    Args:
        words: The words of the program, as `read_program` returns them.
        python: The interpreter.
    """
    return [*([python] if words[0].endswith(".py") else []), *words]


def read_site(path: Path) -> Site:
    """Local. Read a site's file.

    Args:
        path: The TOML file.

    Raises:
        ValueError: It cannot be read, is no TOML, or has another key or a value that cannot be in a script.
    """
    # Part of Python from 3.11 on.
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        given = toml.loads(read_text(path))
    except toml.TOMLDecodeError as error:
        raise ValueError(f"{path}: expected TOML, got: {error}") from None
    expected = {"mpi": str, "setup": list, "sbatch": dict, "environment": dict}
    for key, value in given.items():
        if key not in expected:
            raise ValueError(f"{path}: expected the keys {', '.join(expected)}, got {key!r}")
        if not isinstance(value, expected[key]):
            raise ValueError(f"{path}: `{key}` must be of type {expected[key].__name__}, got {value!r}")
    for problem in _problems(given):
        raise ValueError(f"{path}: {problem}")
    return Site(
        given.get("mpi"), tuple(given.get("setup", [])), given.get("sbatch", {}), given.get("environment", {})
    )


def _problems(given: dict[str, Any]) -> Iterator[str]:
    if not _KIND.fullmatch(given.get("mpi", "pmix")):
        yield f"`mpi` must be a kind that `srun --mpi=list` prints, such as \"pmix\", got {given['mpi']!r}"
    yield from _option_problems(given.get("sbatch", {}))
    for name, value in given.get("environment", {}).items():
        if not isinstance(value, str) or not _NAME.fullmatch(name):
            yield f"`environment` must hold strings by variable, such as NAME = \"value\", got {name!r}: {value!r}"
        elif _CONTROL.search(value):
            yield f"`environment` must hold values of one line, without control characters, got {name!r}: {value!r}"
    for line in given.get("setup", []):
        if not isinstance(line, str) or _CONTROL.search(line):
            yield f"`setup` must hold single lines of the script, without control characters, got {line!r}"


def _option_problems(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if not isinstance(value, (str, int, bool)) or name.startswith("-"):
            yield f"`sbatch` must hold options without dashes, such as partition = \"gpu\", got {name!r}: {value!r}"
        if not _OPTION.fullmatch(name):
            yield f"`sbatch` must hold long names of options, as cpus-per-task, not c or cpus_per_task, got {name!r}"
        if name in _OF_COMMAND:
            yield f"`sbatch` must not hold options that the command has, got {name!r}: write --{_OF_COMMAND[name]}"
        if isinstance(value, str) and _CONTROL.search(value):
            yield f"`sbatch` must hold values of one line, without control characters, got {name!r}: {value!r}"


def write_script(job: Job, site: Site, library: str) -> str:
    """Local. The script for `sbatch`.

    Args:
        job: The job; its options go before the site's.
        site: The name of the site.
        library: The MPI library at hand, "Open MPI" or "MPICH", where the site names no kind.

    Raises:
        ValueError: A time that is none, a control character, or more ranks than GPUs.
        UnavailableError: It is not known how srun starts this library.
    """
    if not _TIME.fullmatch(job.time):
        raise ValueError(f"`time` must have a form such as 4:00:00, 2-12:00:00 or 90 (minutes), got {job.time!r}")
    for what, text in (("`job_name`", job.name), *(("a word of the program", word) for word in job.program)):
        if _CONTROL.search(text):
            raise ValueError(f"{what} must be one line without control characters, got {text!r}. Take them out")
    kind = site.mpi or MPI_KINDS.get(library)
    if kind is None:
        raise UnavailableError(
            f"mpidist does not know which kind of `srun --mpi` starts {library!r}. Name the kind in the file of "
            "--site: mpi = \"pmix\", or another one that `srun --mpi=list` prints"
        )
    tasks = job.tasks_per_node or max(1, job.gpus_per_node)
    if job.gpus_per_node and tasks > job.gpus_per_node:
        raise ValueError(
            f"`ntasks_per_node` must be at most the number of GPUs on a node, {job.gpus_per_node}, got {tasks}: one "
            "rank is one replica, on a GPU of its own"
        )
    options: dict[str, Any] = {
        **site.sbatch, "job-name": job.name or _name(job.program), "nodes": job.nodes,
        "ntasks-per-node": tasks, "cpus-per-task": job.cpus_per_task, "time": job.time,
    }
    if job.gpus_per_node:
        options["gpus-per-node"] = job.gpus_per_node
    options.setdefault("output", "%x-%j.out")
    options["open-mode"] = "append"
    options |= {"requeue": True, "signal": "USR1@120"} if job.requeue else {}
    # The other nodes stay when one is lost.
    options |= {"no-kill": True} if job.restart else {}
    lines = ["#!/bin/bash", *(_directive(name, value) for name, value in options.items() if value is not False)]
    # A site's files may use variables that are not set, and commands that fail, as those that /etc/bashrc reads.
    lines += [*site.setup, "set -euo pipefail", ""]
    environment = {**({"MPIDIST_DEVICE": "gpu"} if job.gpus_per_node else {}), **site.environment}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += ["# srun takes the number of cores of a task from here only.",
              "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]
    if job.requeue and kind == "pmi2":
        lines += [
            "# MPICH's shared memory outlives a killed step, and is found again by a step of the same number.",
            'for _ in $(seq "${SLURM_RESTART_COUNT:-0}"); do srun --ntasks=1 --nodes=1 --mpi=none true; done',
        ]
    if job.requeue:
        lines.append("# The program saves, and requeues the job: PreemptionCheckpointHandler, `requeue=True`.")
    lines.append(shlex.join(_srun(kind, job)))
    return "\n".join(lines) + "\n"


def _name(program: Sequence[str]) -> str:
    """The name of a program, of "python -m train" that of its module."""
    named = [word for word in program[1:] if not word.startswith("-")] if program[0].startswith("python") else []
    return Path(named[0] if named else program[0]).name.removesuffix(".py") or "job"


def _srun(kind: str, job: Job) -> Sequence[str]:
    if job.restart:
        # It starts srun.
        return ["mpidist", "run", f"--mpi={kind}", "--", *started(job.program)]
    return ["srun", f"--mpi={kind}", "--kill-on-bad-exit=1", *started(job.program)]


def _directive(name: str, value: str | int | bool) -> str:
    if value is True:
        return f"#SBATCH --{name}"
    # Slurm reads quotes as a shell does, but a backslash escapes within single quotes, too.
    text = str(value).replace("\\", "\\\\")
    return f"#SBATCH --{name}={shlex.quote(text)}"
