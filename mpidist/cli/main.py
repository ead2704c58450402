"""The console script `mpidist`, and its commands."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from mpidist import launch
from mpidist.cli.doctor import look
from mpidist.cli.doctor_ranks import look_at_ranks
from mpidist.cli.lint import lint
from mpidist.cli.sbatch import Job, Site, read_site, write_script
from mpidist.cluster.launch_line import find_starter, launch_line
from mpidist.comm.communicator import open_communicator
from mpidist.comm.ending import agree_on_exit
from mpidist.errors import MpidistError
from mpidist.strategy.joined import work


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mpidist")
def main() -> None:
    """The programming model of tf.distribute on MPI."""


@main.command("launch-line", context_settings={"allow_interspersed_args": False})
@click.option("-n", "ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("--fault-tolerant", is_flag=True, help="Other ranks live on after the death of one.")
@click.option("--hosts", default="", metavar="A,B,...", help="Hosts to run on; default: this one, or Slurm's.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def print_launch_line(ranks: int, fault_tolerant: bool, hosts: str, command: tuple[str, ...]) -> None:
    """Print the line that starts COMMAND (default: python train.py) with this machine's MPI."""
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    try:
        line = launch_line(find_starter(), ranks, command or ("python", "train.py"), names, survives=fault_tolerant)
    except MpidistError as error:
        raise click.ClickException(str(error)) from None
    click.echo(line)


@main.command("lint")
@click.argument("scripts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def print_findings(scripts: tuple[Path, ...]) -> None:
    """Find the known traps in job SCRIPTS for sbatch, each with what to write instead; the exit code is then 1."""
    found = [(script, finding) for script in scripts for finding in lint(script.read_text(errors="replace"))]
    for script, finding in found:
        click.echo(f"{script}:{finding.line}: {finding.text}")
    if found:
        raise click.exceptions.Exit(1)


@main.command("sbatch", context_settings={"allow_interspersed_args": False})
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1))
@click.option("--ntasks-per-node", type=click.IntRange(1), help="Ranks on each node; default: one per GPU, else 1.")
@click.option("--gpus-per-node", default=0, show_default=True, type=click.IntRange(0))
@click.option("--cpus-per-task", default=1, show_default=True, type=click.IntRange(1))
@click.option("--time", default="01:00:00", show_default=True, help="The job's limit, in a form of Slurm's.")
@click.option("--job-name", default="", help="Default: the program's name.")
@click.option("--requeue", is_flag=True, help="The job may be queued again, and gets SIGUSR1 before its end.")
@click.option("--site", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A site's needs, as TOML.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def print_script(  # noqa: PLR0913  # the options of a job
    nodes: int,
    ntasks_per_node: int | None,
    gpus_per_node: int,
    cpus_per_task: int,
    time: str,
    job_name: str,
    requeue: bool,
    site: Path | None,
    program: tuple[str, ...],
) -> None:
    """Print a job script for sbatch that runs PROGRAM, "train.py --epochs 5", on all ranks.

    The site's file has `mpi = "pmix"`, `setup = ["module load openmpi"]`, and tables `[sbatch]`, with options as
    `partition = "gpu"`, and `[environment]`.
    """
    job = Job(program, nodes, ntasks_per_node, gpus_per_node, cpus_per_task, time, job_name, requeue)
    try:
        chosen = Site() if site is None else read_site(site)
        click.echo(write_script(job, chosen, "" if chosen.mpi else find_starter().library), nl=False)
    except (MpidistError, ValueError) as error:
        raise click.ClickException(str(error)) from None


@main.command("worker")
@click.option("--join", "directory", required=True, metavar="DIRECTORY", help="The `join_directory` of the job.")
def join_job(directory: str) -> None:
    """Join a running job of parameter servers as a worker, in the place of one that is lost.

    The job's program has ParameterServerStrategy(join_directory=DIRECTORY). The exit code is that of its chief, 0 where
    that has come to its end, and 1 where the job refuses this worker, or is gone.
    """
    try:
        code = work(directory)
    except (MpidistError, OSError) as error:
        raise click.ClickException(str(error)) from None
    sys.exit(code)


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="For programs, and for tickets.")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Measure sums and messages.")
@click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(min=0), help="... for so long.")
def print_diagnosis(as_json: bool, measure: bool, seconds: float) -> None:
    """Look at this machine, and under mpirun or srun at the ranks; say what is wrong, and the line that mends it.

    The exit code is 1 where something is wrong.
    """
    try:
        communicator = open_communicator() if launch.world_size() > 1 else None
    except MpidistError as error:
        raise click.ClickException(str(error)) from None
    is_first = communicator is None or communicator.rank == 0
    findings = look() if is_first else []
    if communicator is not None:
        findings += look_at_ranks(communicator, measures=measure, seconds=seconds)
        findings = communicator.broadcast_object(findings)
    if is_first:
        page = json.dumps({"findings": [asdict(one) for one in findings]}, indent=1)
        click.echo(page if as_json else "\n".join(map(str, findings)))
    if any(one.state == "wrong" for one in findings):
        agree_on_exit()
        sys.exit(1)
