"""Known mistakes in a job script, each with the line that fixes it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from mpidist.cli.slurm.script import MPIRUN, SRUN, Command, JobScript, base_name, is_program, read_job_script


class LintFinding(NamedTuple):
    """One trap in a script.

    Attributes:
        line: Its line, from 1.
        text: The problem, and the fix.
    """

    line: int
    text: str


def lint(text: str) -> list[LintFinding]:
    """Local. The known traps in a script for `sbatch`, in the order of its lines; the script is not run.

    Args:
        text: The script.
    """
    script = read_job_script(text)
    return sorted({*_refusals(text), *(finding for rule in _RULES for finding in rule(script))})


def _refusals(text: str) -> Iterator[LintFinding]:
    """The reasons for which sbatch itself refuses a script."""
    if not text.startswith("#!"):
        mark = ", without the mark (BOM) in front of it that some editors write" if text.startswith("\ufeff") else ""
        yield LintFinding(
            1, f"sbatch refuses a script without an interpreter. Write as its first line{mark}: #!/bin/bash"
        )
    if "\r\n" in text:
        yield LintFinding(
            text.count("\n", 0, text.index("\r\n")) + 1,
            "sbatch refuses Windows line endings (\\r\\n). Remove them: sed -i 's/\\r$//' SCRIPT",
        )
    if "\0" in text:
        yield LintFinding(text.count("\n", 0, text.index("\0")) + 1, "sbatch refuses a script with the character NUL")


def _ignored_options(script: JobScript) -> Iterator[LintFinding]:
    for line in script.late_options:
        yield LintFinding(line, "Slurm ignores #SBATCH below the first command: move the line up, above all commands")
    for line in script.misplaced_options:
        yield LintFinding(
            line,
            "Slurm takes this for a comment: #SBATCH has capital letters, and begins its line. If it is to be a "
            "comment, write ##SBATCH",
        )


def _mpi(script: JobScript) -> Iterator[LintFinding]:
    for command in _sruns(script):
        kind = command.options.get("mpi")
        if kind is None:
            kind = script.environment.get("SLURM_MPI_TYPE")
        if kind is None and not command.has_unknown_options:
            yield LintFinding(
                command.line,
                "srun without --mpi: where the site's default is another library's, each task is a program of one "
                "rank, or MPI aborts. Write srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH",
            )
        elif kind in ("none", "openmpi"):
            how = "--mpi" if "mpi" in command.options else "SLURM_MPI_TYPE"
            yield LintFinding(
                command.line,
                f"{how}={kind} starts each task as a program of one rank. Write --mpi=pmix for Open MPI, --mpi=pmi2 "
                "for MPICH",
            )


def _bad_exit(script: JobScript) -> Iterator[LintFinding]:
    for command in _sruns(script):
        is_said = "kill-on-bad-exit" in command.options or "SLURM_KILL_BAD_EXIT" in script.environment
        if not is_said and not command.has_unknown_options:
            yield LintFinding(
                command.line,
                "srun lets the other ranks wait for one that has died, and with MPICH they hang. Write srun "
                "--kill-on-bad-exit=1; for parameter servers, which survive this, export SLURM_KILL_BAD_EXIT=0",
            )


def _components(script: JobScript) -> Iterator[LintFinding]:
    groups, components = {"het-group", "pack-group"}, script.components
    for command in _sruns(script):
        # `srun A : B` starts A in the first component, and B in the second.
        started = 1 + command.words.count(":")
        if started < components and not groups & set(command.options) and not command.has_unknown_options:
            which = "one" if started == 1 else str(started)
            yield LintFinding(
                command.line,
                f"the job has {components} components, and srun starts the first {which} only. Write srun "
                f"--het-group=0-{components - 1}",
            )


def _cores(script: JobScript) -> Iterator[LintFinding]:
    option = script.find("cpus-per-task")
    if option is None or option.value == "1" or "SRUN_CPUS_PER_TASK" in script.environment:
        return
    for command in filter(attrgetter("is_srun"), script.commands):
        if "cpus-per-task" not in command.options and not command.has_unknown_options:
            yield LintFinding(
                command.line,
                f"since Slurm 22.05 srun does not take --cpus-per-task={option.value} from the job, and each task gets "
                "one core. Write above it: export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
            )


_GPUS = re.compile(r"(?:gres/|gres:)?gpu(?::[^,]*?)??(?::([0-9]+))?")


def _gpus(script: JobScript) -> Iterator[LintFinding]:
    lines = [option.line for option in script.options if option.name == "gpus-per-task" and not _has_one_task(script)]
    lines += [command.line for command in _sruns(script) if "gpus-per-task" in command.options]
    for line in lines:
        yield LintFinding(
            line,
            "--gpus-per-task hides a task's GPUs from the node's other tasks: NCCL and CUDA-aware MPI then copy over "
            "the host, or fail. Write --gpus-per-node=N --ntasks-per-node=N",
        )
    is_exclusive = script.find("exclusive") is not None
    for command in _sruns(script):
        if command.options.get("gpu-bind") == "none" and not is_exclusive:
            yield LintFinding(
                command.line,
                "--gpu-bind=none leaves CUDA_VISIBLE_DEVICES unset: on a node that the job shares, ranks may take the "
                "GPUs of other jobs. Leave it out, each task sees all GPUs of the job on its node without it; or write "
                "#SBATCH --exclusive",
            )
    for component in range(script.components):
        tasks, gpus = script.count("ntasks-per-node", component), _gpus_of_node(script, component)
        if tasks is not None and gpus and tasks > gpus:
            line = next(
                option.line for option in script.options
                if (option.name, option.component) == ("ntasks-per-node", component)
            )
            yield LintFinding(
                line,
                f"{tasks} task(s) on a node with {gpus} GPU(s): one rank is one replica, on a GPU of its own. Write "
                f"--ntasks-per-node={gpus}",
            )


def _gpus_of_node(script: JobScript, component: int) -> int | None:
    """The number of GPUs of a node, by `--gpus-per-node` or `--gres`; None where neither gives it."""
    for option in reversed(script.options):
        if option.component != component:
            continue
        if option.name == "gpus-per-node":
            number = option.value.rpartition(":")[2]
            return int(number) if number.isdecimal() else None
        found = [_GPUS.fullmatch(one) for one in option.value.split(",")] if option.name == "gres" else []
        if any(found):
            return sum(int(match[1] or 1) for match in found if match is not None)
    return None


def _requeue(script: JobScript) -> Iterator[LintFinding]:
    option = script.find("requeue")
    asks = [one.line for one in script.commands if re.search(r"\bscontrol\s+requeue\b", " ".join(one.words))]
    mode = script.find("open-mode")
    if (option is not None or asks) and (mode is None or mode.value[:1].lower() != "a"):
        yield LintFinding(
            asks[0] if option is None else option.line,
            "the log is overwritten when the job is requeued. Write: #SBATCH --open-mode=append",
        )


def _signals(script: JobScript) -> Iterator[LintFinding]:
    option = script.find("signal")
    # Without commands the script could not be read.
    if option is None or not script.commands:
        return
    starts = [command for command in script.commands if command.is_srun or command.is_mpirun]
    is_shells = re.match(r"[RH]*B[RH]*:", option.value) is not None
    sent = _signal_name(option.value.rpartition(":")[2].partition("@")[0])
    if not is_shells:
        for command in starts:
            if command.is_mpirun:
                yield LintFinding(
                    option.line,
                    "Slurm sends the signal to mpirun's daemons, and Open MPI's daemons terminate on it, with all "
                    f"ranks. Write #SBATCH --signal=B:{option.value}, and trap it in the script",
                )
        return
    # A function of the site may set it, as in `on_signal save USR1`.
    is_trapped = any(_signal_name(word) == sent for command in script.commands for word in command.words[1:])
    if not is_trapped:
        yield LintFinding(
            option.line,
            f"only the script's shell gets the signal, and has no trap for it. Write above the program: trap 'scontrol "
            f"requeue $SLURM_JOB_ID' {sent}",
        )
    for command in starts:
        if is_trapped and not command.runs_behind:
            yield LintFinding(
                command.line,
                "the shell runs its trap when this command has ended, which is too late. End the line with &, and "
                "write below it: wait $!",
            )


def _signal_name(text: str) -> str:
    """A signal as `trap` and Slurm may write it: USR1, SIGUSR1, usr1 or 10."""
    with contextlib.suppress(ValueError):
        text = signal.Signals(int(text)).name
    return text.upper().removeprefix("SIG")


def _no_launcher(script: JobScript) -> Iterator[LintFinding]:
    counts = [script.count(name) or 1 for name in ("nodes", "ntasks", "ntasks-per-node")]
    # A line of Python may prepare what another one starts on all tasks, or start it by itself.
    if max(counts) == 1 or any(command.names((*SRUN, *MPIRUN)) or command.is_run for command in script.commands):
        return
    for command in script.commands:
        if command.is_python:
            yield LintFinding(
                command.line,
                "the job has several tasks, and this line starts one process on its first node. Write srun --mpi=pmix "
                "(Open MPI) or srun --mpi=pmi2 (MPICH) in front of it",
            )


_CONTAINERS = ("apptainer", "singularity", "docker", "podman")
# The options of Apptainer with which each rank has a /dev/shm, or processes, of its own; with --ipc it has neither.
_SEPARATE = ("--contain", "--pid", "-c", "-p")
# Those with which it has none of its launcher's variables.
_CLEAN = ("--cleanenv", "--containall", "-e", "-C")


def _containers(script: JobScript) -> Iterator[LintFinding]:
    gpus = any(option.name.startswith(("gpus", "gres")) for option in script.options)
    for command in script.commands:
        name, words = _container(command)
        if not name:
            continue
        if any(base_name(word) in (*SRUN, *MPIRUN) for word in words):
            yield LintFinding(
                command.line,
                f"the launcher inside the container starts all ranks in it, on one node. Write it in front of {name}: "
                "srun --mpi=pmix apptainer exec IMAGE python train.py",
            )
            continue
        if name in ("docker", "podman"):
            missing = [one for one in ("--ipc=host", "--pid=host", "--network=host") if one not in words]
            if missing:
                yield LintFinding(
                    command.line,
                    f"ranks in containers of their own share no memory and no network: MPI does not start, or is "
                    f"slow. Write {name} run {' '.join(missing)}",
                )
            continue
        separate = [word for word in words if word in _SEPARATE]
        clean = [word for word in words if word in _CLEAN]
        if separate and not {"MPIR_CVAR_NOLOCAL", "OMPI_MCA_btl"} & script.environment.keys():
            yield LintFinding(
                command.line,
                f"{separate[0]} keeps the ranks of a node apart: MPICH then fails at its start, or hangs there, "
                "and Open MPI may end with a segmentation fault. Leave it out, or write above the line: export "
                "MPIR_CVAR_NOLOCAL=1 UCX_TLS=^shm OMPI_MCA_btl=self,tcp",
            )
        if clean:
            yield LintFinding(
                command.line,
                f"{clean[0]} removes the launcher's variables: each task is a program of one rank. Leave it out, and "
                "unset single variables: --env NAME=",
            )
        if gpus and not {"--nv", "--rocm", "--nvccli"} & set(words):
            yield LintFinding(command.line, f"the container sees no GPU. Write {name} exec --nv")


def _container(command: Command) -> tuple[str, Sequence[str]]:
    """The program that starts a container for Python here, empty if there is none, and the words up to Python."""
    words = command.words
    begin = next((at for at, word in enumerate(words) if base_name(word) in _CONTAINERS), None)
    if begin is None or not command.is_python or not {"exec", "run", "shell"} & set(words):
        return "", ()
    end = next((at for at, word in enumerate(words) if at > begin and is_program(word)), len(words))
    return base_name(words[begin]), words[begin + 1 : end]


def _sruns(script: JobScript) -> list[Command]:
    """The lines by which several ranks start."""
    sruns = [
        command for command in script.commands
        if command.is_srun and (command.options.get("ntasks") != "1" or ":" in command.words)
    ]
    # Unless sbatch itself gets options, which replace those in the script.
    numbers = {"nodes", "ntasks", "ntasks-per-node"}
    return [one for one in sruns if numbers & set(one.options)] if _has_one_task(script) else sruns


def _has_one_task(script: JobScript) -> bool:
    """Whether the script says that the job has one task."""
    nodes, tasks, per_node = (script.count(name) for name in ("nodes", "ntasks", "ntasks-per-node"))
    is_one = tasks == 1 or (nodes == per_node == 1 and tasks is None)
    return script.components == 1 and is_one and (nodes or 1) == (per_node or 1) == 1


_RULES: tuple[Callable[[JobScript], Iterator[LintFinding]], ...] = (
    _ignored_options, _mpi, _bad_exit, _components, _cores, _gpus, _requeue, _signals, _no_launcher, _containers,
)
