"""Launch lines as texts, and what the environment says about the line of this job."""

from __future__ import annotations

import configparser
import importlib
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpidist.cli.main import main
from mpidist.cluster import launch_line as module
from mpidist.cluster.launch_line import Starter, find_starter, launch_line, survives_deaths
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import LauncherError, UnavailableError
from tests.helpers.markdown import ROOT

OPEN_MPI, MPICH = Starter("Open MPI", "mpirun", False), Starter("MPICH", "/opt/bin/mpirun", False)
COMMAND = ["python", "a b.py", "--x"]


@pytest.fixture(autouse=True)
def _two_cores_and_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "count_cores", lambda: 2)
    monkeypatch.setattr("os.geteuid", lambda: 1000)


@pytest.mark.parametrize(
    ("starter", "ranks", "hosts", "survives", "line"),
    [
        (OPEN_MPI, 2, "", False, "mpirun -n 2"),
        (OPEN_MPI, 3, "", False, "mpirun --oversubscribe -n 3"),
        (OPEN_MPI, 3, "", True, "mpirun --with-ft ulfm --rtos error-nonzero-status=0 --oversubscribe -n 3"),
        (OPEN_MPI, 3, "a,b", True, "mpirun --with-ft ulfm --host a:2,b:1 -n 3"),
        (OPEN_MPI, 1, "a,b", False, "mpirun --host a:1 -n 1"),
        (OPEN_MPI._replace(in_slurm=True), 9, "", True, "mpirun --with-ft ulfm -n 9"),
        (MPICH, 3, "", False, "/opt/bin/mpirun -n 3"),
        (MPICH, 3, "a,b", False, "/opt/bin/mpirun -hosts a:2,b:1 -n 3"),
        (MPICH, 2, "", True,
         "/opt/bin/mpirun -disable-auto-cleanup -genv UCX_TLS '^cma,tcp' -launcher fork "
         "-hosts 127.0.0.1:1,127.0.0.2:1 -n 2"),
        (MPICH, 2, "a,b,c", True, "/opt/bin/mpirun -disable-auto-cleanup -genv UCX_TLS '^cma' -hosts a:1,b:1 -n 2"),
        (MPICH._replace(in_slurm=True), 4, "", True,
         "SLURM_KILL_BAD_EXIT=0 'UCX_TLS=^cma' srun --mpi=pmi2 --export=ALL -n 4"),
        (Starter("Other MPI 3", "mpirun", False), 4, "", False, "mpirun -n 4"),
    ],
)
def test_lines(starter: Starter, ranks: int, hosts: str, survives: bool, line: str) -> None:
    names = hosts.split(",") if hosts else []
    assert launch_line(starter, ranks, COMMAND, names, survives=survives) == f"{line} python 'a b.py' --x"


def test_more_ranks_than_a_network_has_addresses_of_one_byte() -> None:
    assert "127.0.0.255:1,127.0.1.0:1" in launch_line(MPICH, 300, COMMAND, survives=True)


def test_root_is_allowed_to_run_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert launch_line(OPEN_MPI, 2, ["x"]) == "mpirun --allow-run-as-root -n 2 x"


@pytest.mark.parametrize(
    ("starter", "hosts", "text"),
    [
        (MPICH, ["a", "b"], "expected a host for each of 3 ranks, got 2: .* die together"),
        (MPICH, ["a", "b", "a"], "expected a host for each of 3 ranks, got 2"),
        (Starter("Other MPI 3", "mpirun", False), [], "expected Open MPI or MPICH, got 'Other MPI 3'"),
    ],
)
def test_what_cannot_survive_says_why(starter: Starter, hosts: list[str], text: str) -> None:
    with pytest.raises(UnavailableError, match=text):
        launch_line(starter, 3, COMMAND, hosts, survives=True)


def test_no_mpirun_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LauncherError, match="expected mpirun beside /nowhere/python or on the PATH, found none"):
        find_starter()
    result = CliRunner().invoke(main, ["launch-line", "-n", "2"])
    assert result.exit_code == 1
    assert "expected mpirun beside" in result.output


OPEN_MPI_RANK = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA_RANK = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SRUN_RANK = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({**OPEN_MPI_RANK, "OMPI_COMM_WORLD_SIZE": "1"}, True),
        (OPEN_MPI_RANK, False),
        ({**OPEN_MPI_RANK, "OMPI_MCA_mpi_ft_enable": "0"}, False),
        ({**OPEN_MPI_RANK, "OMPI_MCA_mpi_ft_enable": "1"}, True),
        # Several ranks behind one proxy; and a proxy on a host where `mpirun` is not.
        ({**HYDRA_RANK, "MPI_LOCALNRANKS": "3"}, False),
        (HYDRA_RANK, None),
        (SRUN_RANK, None),
        ({**SRUN_RANK, "SLURM_KILL_BAD_EXIT": "0"}, True),
        ({**SRUN_RANK, "SLURM_KILL_BAD_EXIT": "1"}, False),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, None),
    ],
)
def test_the_environment_says_whether_deaths_are_survived(
    environment: dict[str, str], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpidist.launch.launcher_processes", list)
    assert survives_deaths(environment) is expected


@pytest.mark.parametrize(
    ("device", "value", "on_one_host", "on_hosts"),
    [
        ("ch4:ucx ofi", None, True, True),
        ("ch4:ucx ofi", "", True, True),
        ("ch4:ucx ofi", "^cma", True, False),
        ("ch4:ucx ofi", "^tcp", True, True),
        ("ch4:ucx ofi", "^tcp,cma", False, False),
        ("ch4:ucx ofi", "tcp,posix,self", True, False),
        ("ch4:ucx ofi", "posix,self", False, False),
        ("ch4:ucx ofi", "tcp,sm", True, True),
        ("ch4:ofi", None, False, False),
        # Open MPI's.
        ("", None, False, False),
    ],
)
def test_ranks_that_may_end_with_others_are_known(
    device: str, value: str | None, on_one_host: bool, on_hosts: bool
) -> None:
    environment = {} if value is None else {"UCX_TLS": value}
    assert module.ends_with_others(device, True, environment) is on_one_host
    assert module.ends_with_others(device, False, environment) is on_hosts


def test_a_slurm_job_of_one_node_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    line = launch_line(MPICH._replace(in_slurm=True), 2, ["./a"], survives=True)
    assert line == "SLURM_KILL_BAD_EXIT=0 'UCX_TLS=^cma,tcp' srun --mpi=pmi2 --export=ALL -n 2 ./a"


def test_a_process_alone_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    assert module.warn_of_deaths(SoloCommunicator())
    assert not caplog.records


def test_the_console_script_prints_a_line() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    name, place = parser["options.entry_points"]["console_scripts"].strip().split(" = ")
    path, function = place.split(":")
    assert (name, getattr(importlib.import_module(path), function)) == ("mpidist", main)
    result = CliRunner().invoke(main, ["launch-line", "-n", "2", "python", "train.py", "--flag", "-n", "7"])
    assert result.exit_code == 0, result.output
    assert shlex.split(result.output)[-7:] == ["-n", "2", "python", "train.py", "--flag", "-n", "7"]
    result = CliRunner().invoke(main, ["launch-line", "-n", "2"])
    assert shlex.split(result.output)[-4:] == ["-n", "2", "python", "train.py"]


@pytest.mark.parametrize(
    ("hosts", "dealt"), [("n[1-3,07]", "n1:1,n2:1,n3:1,n07:1"), (" a, b ", "a:2,b:2"), ("a b,a", "a:2,b:1,a:1")]
)
def test_hosts_are_named_as_slurm_names_them(monkeypatch: pytest.MonkeyPatch, hosts: str, dealt: str) -> None:
    monkeypatch.setattr("mpidist.cli.main.find_starter", lambda: OPEN_MPI)
    result = CliRunner().invoke(main, ["launch-line", "-n", "4", "--hosts", hosts])
    assert result.output == f"mpirun --host {dealt} -n 4 python train.py\n"


@pytest.mark.parametrize(
    ("hosts", "text"), [("n[1-3", "malformed host list 'n[1-3'"), ("a:4,b:4", "expected names of hosts, got 'a:4'")]
)
def test_hosts_that_are_none(hosts: str, text: str) -> None:
    result = CliRunner().invoke(main, ["launch-line", "-n", "4", "--hosts", hosts])
    assert (result.exit_code, "Invalid value for '--hosts'" in result.output) == (2, True)
    assert text in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [[], ["-n", "0"], ["-n", "two"]])
def test_a_number_of_ranks_is_needed(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["launch-line", *arguments])
    assert result.exit_code == 2
    assert "'-n'" in result.output


def test_a_file_of_python_needs_no_python_in_front() -> None:
    lines = [CliRunner().invoke(main, ["launch-line", "-n", "2", *words]).stdout for words in (
        ["train.py", "--epochs", "5"], ["python", "train.py", "--epochs", "5"], ["train.py --epochs 5"],
    )]
    assert lines[0].endswith(" python train.py --epochs 5\n"), lines
    assert len(set(lines)) == 1, lines
    assert CliRunner().invoke(main, ["launch-line", "-n", "2", "./run"]).stdout.endswith(" ./run\n")


@pytest.mark.parametrize(("command", "words", "named"), [
    (["launch-line", "-n", "2"], ["train.py", "--fault-tolerant"], "--fault-tolerant"),
    (["launch-line", "-n", "2"], ["train.py", "--hosts=a"], "--hosts=a"),
    (["sbatch"], ["train.py", "--nodes", "4", "--time=2:00"], "--nodes, --time=2:00"),
    (["sbatch"], ["train.py --nodes 4"], "--nodes"),
    (["sbatch"], ["train.py", "--epochs", "4"], ""),
])
def test_an_option_behind_the_program_is_the_programs_with_a_warning(
    command: list[str], words: list[str], named: str, tmp_path: Path
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('mpi = "pmix"\n')
    result = CliRunner().invoke(main, [*command, *(["--site", str(site)] if command == ["sbatch"] else []), *words])
    assert result.exit_code == 0, result.output
    assert "train.py --" in result.stdout.splitlines()[-1], "the program gets it"
    expected = f"Warning: {named} is after the program's name and goes to the program" if named else ""
    assert result.stderr.startswith(expected)
    assert bool(result.stderr) == bool(named)


@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_the_list_of_commands_is_whole(width: str) -> None:
    text = CliRunner().invoke(main, ["--help"], env={"COLUMNS": width}).output.partition("Commands:")[2]
    assert "..." not in text
    assert set(main.commands) == {"checkpoint", "doctor", "launch-line", "lint", "run", "sbatch", "trace", "worker"}
    for command in main.commands.values():
        assert command.short_help
        assert command.short_help in " ".join(text.split())
