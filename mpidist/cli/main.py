"""The console script `mpidist`, and its commands."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mpidist import launch
from mpidist.cli.checkpoints.commands import checkpoint
from mpidist.cli.doctor.finding import Finding, Report
from mpidist.cli.doctor.machine import find_obstacle, look
from mpidist.cli.slurm.lint import lint
from mpidist.cli.slurm.sbatch import Job, Site, read_program, read_site, started, write_script
from mpidist.cli.texts import AS_JSON, list_commands, read_text, text_of, write
from mpidist.cli.trace.commands import print_trace
from mpidist.cluster.launch_line import find_starter, launch_line
from mpidist.cluster.slurm.host_list import expand
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import LauncherError, MpidistError
from mpidist.failures.ending import agree_on_exit
from mpidist.recorder.time_limits import LIMIT_VARIABLE

# The time in which the first rank shows its page where MPI cannot start: some seconds where packages load slowly.
_FIRST_SECONDS = 15.0
# The default time that ranks wait for each other, long since packages may load slowly.
_LONGEST_SECONDS = 120


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, invoke_without_command=True,
)
@click.version_option(package_name="mpidist")
def main() -> None:
    """The programming model of tf.distribute on MPI.

    `mpidist COMMAND --help` says more of each command.
    """
    list_commands()


main.add_command(checkpoint)
main.add_command(print_trace)


@main.command(
    "launch-line", short_help="Print the line that starts a program with this machine's MPI.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("-n", "ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("--fault-tolerant", is_flag=True, help="Other ranks survive the death of one.")
@click.option("--hosts", default="", metavar="A,N[1-3],...", help="Hosts to run on; default: this one, or Slurm's.")
@AS_JSON
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def print_launch_line(
    ranks: int, fault_tolerant: bool, hosts: str, as_json: bool, program: tuple[str, ...]
) -> None:
    """Print the line that starts PROGRAM (default: train.py) with this machine's MPI."""
    names = _hosts(hosts)
    try:
        words = started(read_program(program or ("train.py",)))
        starter = find_starter()
        line = launch_line(starter, ranks, words, names, survives=fault_tolerant)
    except (MpidistError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    _warn_of_own_options(words)
    found = {"line": line, "words": shlex.split(line), "library": starter.library, "ranks": ranks}
    write(json.dumps(found, indent=1) + "\n" if as_json else f"{line}\n")


def _warn_of_own_options(words: Sequence[str]) -> None:
    """Warn of options of `mpidist` after the program's name: the program gets them."""
    context = click.get_current_context()
    own = {name for option in context.command.params for name in option.opts if name.startswith("--")}
    found = [word for word in words if word.partition("=")[0] in own]
    if found:
        click.echo(
            f"Warning: {', '.join(found)} is after the program's name and goes to the program. Options of "
            f"`{context.command_path}` go before it", err=True,
        )


def _hosts(text: str) -> list[str]:
    try:
        names = expand(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--hosts'") from None
    numbered = next((name for name in names if ":" in name), None)
    if numbered is not None:
        raise click.BadParameter(
            f"expected names of hosts, got {numbered!r}. Leave the number of ranks out: they are distributed over the "
            "hosts",
            param_hint="'--hosts'",
        )
    return names


@main.command(
    "run", short_help="Run a program on all ranks, and start it again after a death.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("-n", "ranks", type=click.IntRange(min=1), help="Number of ranks; default: one per core, or Slurm's.")
@click.option("--hosts", default="", metavar="A,N[1-3],...", help="Hosts to run on; default: this one, or Slurm's.")
@click.option("--ntasks-per-node", type=click.IntRange(1), help="Ranks on each host; further hosts are spare.")
@click.option("--max-restarts", default=10, show_default=True, type=click.IntRange(0), help="Restarts in all.")
@click.option("--restart-errors", is_flag=True, help="Restart after an exception of the program, too.")
@click.option("--min-ranks", type=click.IntRange(1), help="Ranks with which it may continue after the loss of a host.")
@click.option("--mpi", "kind", default="", metavar="KIND", help="Kind for srun --mpi; default: by the MPI at hand.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run_program(  # noqa: PLR0913  # the options of a job
    ranks: int | None,
    hosts: str,
    ntasks_per_node: int | None,
    max_restarts: int,
    restart_errors: bool,
    min_ranks: int | None,
    kind: str,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM, as in `mpidist run -n 8 train.py`, on all ranks, and start it again when a rank dies.

    The program restores its last checkpoint. The exit code is the program's; 42 where it was preempted, or where too
    few hosts are left; 1 where it dies again and again.
    """
    # By name: other commands do without it.
    run: Any = importlib.import_module("mpidist.cli.run.command")
    try:
        # Also where its environment is not activated, so that PATH has another interpreter or none.
        words = started(read_program(program), sys.executable)
        _warn_of_own_options(words)
        crew = run.gather(_hosts(hosts), ranks, ntasks_per_node, kind)
        code = run.run(crew, words, max_restarts, restart_errors, min_ranks)
    except (MpidistError, OSError, ValueError) as error:
        raise click.ClickException(text_of(error)) from None
    sys.exit(code)


@main.command("lint", short_help="Find the known traps in job scripts for sbatch.")
@click.argument("scripts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@AS_JSON
def print_findings(scripts: tuple[Path, ...], as_json: bool) -> None:
    """Find the known traps in job SCRIPTS for sbatch, each with what to write instead.

    The exit code is 1 where there is one.
    """
    try:
        found = [(script, finding) for script in scripts for finding in lint(read_text(script, "replace"))]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        write(json.dumps([{"script": str(script), **finding._asdict()} for script, finding in found], indent=1) + "\n")
    else:
        write("".join(f"{script}:{finding.line}: {finding.text}\n" for script, finding in found))
    if found:
        raise click.exceptions.Exit(1)


@main.command(
    "sbatch", short_help="Print a job script for sbatch that runs a program on all ranks.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1), help="Number of nodes.")
@click.option("--ntasks-per-node", type=click.IntRange(1), help="Ranks on each node; default: one per GPU, else 1.")
@click.option("--gpus-per-node", default=0, show_default=True, type=click.IntRange(0), help="GPUs of each node.")
@click.option("--cpus-per-task", default=1, show_default=True, type=click.IntRange(1), help="Cores of each rank.")
@click.option("--time", default="01:00:00", show_default=True, help="The job's limit, in a form of Slurm's.")
@click.option("--job-name", default="", help="Name of the job; default: the program's name.")
@click.option("--requeue", is_flag=True, help="Slurm may requeue the job, and sends SIGUSR1 before its end.")
@click.option("--restart", is_flag=True, help="Start again within the job when a rank dies or a node is lost.")
@click.option("--site", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Site settings, as TOML.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def print_script(  # noqa: PLR0913  # the options of a job
    nodes: int,
    ntasks_per_node: int | None,
    gpus_per_node: int,
    cpus_per_task: int,
    time: str,
    job_name: str,
    requeue: bool,
    restart: bool,
    site: Path | None,
    program: tuple[str, ...],
) -> None:
    """Print a job script for sbatch that runs PROGRAM, as in `mpidist sbatch train.py --epochs 5`, on all ranks.

    The file of --site has `mpi = "pmix"`, `setup = ["module load openmpi"]`, and the tables `[sbatch]`, with options
    such as `partition = "gpu"`, and `[environment]`.
    """
    try:
        words = read_program(program)
        job = Job(words, nodes, ntasks_per_node, gpus_per_node, cpus_per_task, time, job_name, requeue, restart)
        chosen = Site() if site is None else read_site(site)
        text = write_script(job, chosen, "" if chosen.mpi else _library())
    except (MpidistError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    _warn_of_own_options(words)
    write(text)


def _library() -> str:
    """The MPI library at hand; on a node where people log in there may be none."""
    try:
        return find_starter().library
    except LauncherError as error:
        raise LauncherError(f"{error}; or name srun's kind in the file of --site: mpi = \"pmix\"") from None


@main.command("worker", short_help="Replace a lost worker of a job of parameter servers.")
@click.option("--join", "directory", required=True, metavar="DIRECTORY", help="The `join_directory` of the job.")
def join_job(directory: str) -> None:
    """Join a running job of parameter servers as a worker, in the place of one that is lost.

    The job's program has ParameterServerStrategy(join_directory=DIRECTORY). The exit code is that of its chief, or 1
    where the job has ended before, refuses or loses this worker, or where the chief or a server dies.
    """
    try:
        # By name: it loads NumPy.
        code = importlib.import_module("mpidist.strategy.parameter_server.joined_worker").work(directory)
    except (MpidistError, OSError) as error:
        raise click.ClickException(text_of(error)) from None
    sys.exit(code)


@main.command("doctor", short_help="Say what is wrong with this machine or the ranks, and the fix.")
@AS_JSON
@click.option("--measure/--no-measure", default=True, show_default=True, help="Measure sums over the ranks.")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(min=0), help="Time limit for that.")
@click.option("--clean", is_flag=True, help="Remove files that killed jobs of MPICH have left in /dev/shm.")
def print_diagnosis(as_json: bool, measure: bool, seconds: float, clean: bool) -> None:
    """Look at this machine, and under mpirun or srun at the ranks; say what is wrong, and the line that fixes it.

    The exit code is 1 where something is wrong.
    """
    place, is_first = launch.read(), launch.is_first_rank()
    page = Report(as_json=as_json, is_shown=is_first)
    # Before MPI starts, which may end this process where something is wrong: on the first rank of each host.
    own = look(clean=clean) if is_first or (place is not None and place.node_rank == 0) else []
    page.add(own if is_first else [])
    if launch.world_size() > 1:
        _add_ranks(page, own, seconds if measure else None)
    if not page.end():
        agree_on_exit()
        sys.exit(1)


def _add_ranks(page: Report, own: list[Finding], seconds: float | None) -> None:
    """Collective. Look at the ranks, unless MPI cannot start on this one."""
    obstacle = find_obstacle()
    if obstacle is not None:
        page.add([Finding("ranks", "wrong", f"MPI is not started: {obstacle.text}", obstacle.fix)])
        place = launch.read()
        if place is not None and place.rank:
            # One rank of each other host reports it, and all wait for the first rank: when one ends, launchers end all.
            line = f"rank {place.rank} on {socket.gethostname()}: {obstacle}"
            is_first_here = place.node_rank in (0, None)
            if is_first_here:
                click.echo(line, err=True)
            time.sleep(_FIRST_SECONDS)
            # The job has not ended: other ranks may have other variables, and wait for this one.
            if obstacle.subject == "settings" and not is_first_here:
                click.echo(line, err=True)
        return
    # A doctor never waits without end, as MPI does for a rank that does not start.
    os.environ.setdefault(LIMIT_VARIABLE, str(_LONGEST_SECONDS))
    try:
        communicator = open_communicator()
    except MpidistError as error:
        fix = "start it by the mpirun that belongs to mpi4py's MPI library (see `launcher` and `MPI library`)"
        page.add([Finding("ranks", "wrong", str(error), fix)])
        return
    # By name: they load NumPy, which may be what is broken.
    ranks = importlib.import_module("mpidist.cli.doctor.ranks")
    for findings in ranks.look_at_ranks(communicator, own, seconds):
        page.add(findings)
    page.findings = communicator.broadcast_object(page.findings)
