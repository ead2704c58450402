"""The console script `mpidist`, and its commands."""

from __future__ import annotations

from pathlib import Path

import click

from mpidist.cli.lint import lint
from mpidist.cluster.launch_line import find_starter, launch_line
from mpidist.errors import MpidistError


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
