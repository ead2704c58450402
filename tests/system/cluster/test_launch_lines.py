"""Launch lines, really launched: with the fault-tolerant one the others live on after a death, and know that before."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpidist.cli.main import main
from tests.helpers.launching import find_mpirun, finish, is_open_mpi, start_command
from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = """
import os, signal, sys
from mpidist.cluster.launch_line import survives_deaths, warn_of_deaths
from mpidist.comm.group.opening import open_communicator
from mpidist.failures.ending import tolerate_deaths
from tests.helpers import marks
from tests.helpers.waiting import let_pass

ranks = open_communicator()
tolerate_deaths()
os.write(1, f"rank {ranks.rank}: {survives_deaths()}, together {warn_of_deaths(ranks)}\\n".encode())
ranks.barrier()
folder, is_to_survive = sys.argv[1:]
if ranks.rank == 1:
    marks.hold(folder + "/1")
    # The others are out of the barrier.
    marks.read(folder + "/0")
    marks.read(folder + "/2")
    os.kill(os.getpid(), signal.SIGKILL)
marks.put(f"{folder}/{ranks.rank}")
if is_to_survive == "False":
    # Nothing but the launcher ends it.
    marks.stay()
marks.until_released(folder + "/1")
# In which a launcher would have ended it.
let_pass(4)
os.write(1, f"rank {ranks.rank} lives\\n".encode())
"""


def run(folder: Path, line: str, is_to_survive: bool) -> str:
    """What the program prints."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    words = [*shlex.split(line), sys.executable, str(program), str(folder), str(is_to_survive)]
    result = finish(start_command(words), program.name, 60)
    return result.stdout + result.stderr


def launch_line(*options: str) -> str:
    """What `mpidist launch-line` prints for three ranks, without their program."""
    printed = CliRunner().invoke(main, ["launch-line", *options, "-n", "3", "PROGRAM"])
    assert printed.exit_code == 0, printed.output
    assert printed.output.endswith(" PROGRAM\n"), printed.output
    return printed.output.removesuffix(" PROGRAM\n")


@pytest.mark.parametrize("before", ["", "-genv UCX_TLS ^cma"])
def test_a_line_with_which_ranks_end_with_others_is_warned_of(tmp_path: Path, before: str) -> None:
    line = launch_line("--fault-tolerant")
    # As such lines were before.
    text = run(tmp_path, line.replace("-genv UCX_TLS '^cma,tcp'", before), is_to_survive=True)
    warnings = re.findall(r"the death of a rank in the middle of a message may .* launch it by: .*", text)
    # Open MPI has no such line.
    assert len(warnings) == ("UCX_TLS" in line), text
    assert all("-genv UCX_TLS '^cma,tcp'" in one for one in warnings)


@pytest.mark.parametrize("survives", [True, False])
def test_the_line_keeps_its_word(tmp_path: Path, survives: bool) -> None:
    text = run(tmp_path, launch_line(*(["--fault-tolerant"] if survives else [])), survives)
    assert sorted(re.findall(r"rank (\d): (True|False|None), together (True|False)", text)) == [
        (str(rank), str(survives), str(survives)) for rank in range(3)
    ], text
    assert sorted(re.findall(r"rank (\d) lives", text)) == (["0", "2"] if survives else []), text
    warnings = re.findall(r"ranks 0-2 ends the whole job; to let the other ranks survive, launch .*: .*", text)
    assert len(warnings) == (0 if survives else 1), text
    if warnings:
        # The line that is printed is that of the command, but for the program's name.
        line = CliRunner().invoke(main, ["launch-line", "--fault-tolerant", "-n", "3", "python", "program.py"])
        assert warnings[0].split("launch it by: ")[1].split()[1:] == line.output.split()[1:]


@pytest.mark.parametrize("survives", [True, False])
def test_ranks_on_several_hosts_know_it_together(
    tmp_path: Path, survives: bool, virtual_hosts: Callable[[int], VirtualHosts]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.partition("ranks.barrier()")[0])
    hosts = virtual_hosts(2)
    hosts.survivors_live = survives
    result = hosts.run((1, 1), program)
    text = result.stdout + result.stderr
    # With MPICH only the rank on the launcher's host sees how it was started.
    assert re.findall(r"rank 0: (True|False|None), together (True|False)", text) == [(str(survives),) * 2], text
    alone = "None" if not is_open_mpi(find_mpirun()) else str(survives)
    assert re.findall(r"rank 1: (True|False|None), together (True|False)", text) == [(alone, str(survives))], text
    lines = re.findall("the whole job; .* survive, launch it by: .*-hosts? n1:1,n2:1 -n 2 python", text)
    assert len(lines) == (0 if survives else 1), text
