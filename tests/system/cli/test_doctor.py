"""`mpidist doctor` under the launcher: one page of the first rank's, and the exit code of all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import (
    find_mpirun,
    finish,
    is_open_mpi,
    mpirun_command,
    read_until,
    run_program,
    start_command,
    start_program,
)
from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = """
import sys
from mpidist.cli.main import main
sys.argv[0] = "mpidist"
main()
"""


def read_page(text: str) -> dict[str, dict[str, Any]]:
    """The findings by their subjects."""
    page = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return {one["subject"]: one for one in page["findings"]}


def test_ranks_are_looked_at_together(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_program(2, program, "doctor", "--json", "--no-measure", timeout_seconds=100)
    # One page, of rank 0.
    found = read_page(result.stdout)
    assert result.returncode == int(any(one["state"] == "wrong" for one in found.values())), result.stderr
    assert found["ranks"]["text"].startswith("2 on 1 node(s), 2 on each, 1 host(s)")
    assert "backend" in found["collective"]["text"], found
    # NODE, which takes larger arrays, needs no chunks.
    assert "in chunks" not in found["collective"]["text"], found
    assert found["threads in MPI"]["state"] == "ok"
    # Both of Open MPI's and of MPICH's lines say how ranks live on.
    assert "if launched by" in found["death of a rank"]["text"]


def test_a_rank_that_cannot_start_mpi_has_its_page(tmp_path: Path) -> None:
    """As a rank whose launcher is of another library, or gone: what is known without MPI is shown, and the reason."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # Descriptor 99 is not open.
    result = run_program(
        1, program, "doctor", "--json", timeout_seconds=100,
        PMI_RANK="0", PMI_SIZE="2", PMI_FD="99", MPI_LOCALRANKID="0",
    )
    found = read_page(result.stdout)
    assert result.returncode == 1
    assert "PMI_FD=99 is closed" in found["ranks"]["text"]
    assert found["ranks"]["fix"]
    assert "launcher" in found
    assert result.stderr == ""


SMALL = "mount -t tmpfs -o size=1M tmpfs /dev/shm && exec \"$@\""
UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]


def test_a_rank_whose_own_variables_are_wrong_says_so(tmp_path: Path) -> None:
    """Rank 0 waits in MPI's start for it, and not for ever."""
    program = tmp_path / "program.py"
    ranks = 'os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]'
    program.write_text(
        f'import os\nos.environ["MPIDIST_TIMEOUT"] = "soon" if ({ranks}) == "1" else "20"\n{PROGRAM}'
    )
    result = run_program(2, program, "doctor", "--no-measure", timeout_seconds=100)
    assert result.returncode == 1
    said = result.stdout + result.stderr
    assert "rank 1 on " in said, said
    assert "MPIDIST_TIMEOUT must be a number of seconds, got 'soon'" in said, said


def test_node_memory_that_is_too_small_for_mpi(tmp_path: Path) -> None:
    """MPICH would end the ranks by a bus error, without a word; Open MPI starts."""
    if subprocess.run([*UNSHARE, "sh", "-c", SMALL, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system in memory")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [*mpirun_command(2, find_mpirun()), sys.executable, str(program), "doctor", "--json", "--seconds", "1"]
    result = finish(start_command([*UNSHARE, "sh", "-c", SMALL, "sh", *command]), "the doctor", 100)
    found = read_page(result.stdout)
    assert result.returncode != 0
    assert found["node memory"]["state"] == "wrong"
    assert "--shm-size" in found["node memory"]["fix"]
    if is_open_mpi(find_mpirun()):
        assert found["sum of 8 B"]["state"] == "ok"
    else:
        assert found["ranks"]["text"].startswith("MPI is not started: /dev/shm has 1 MB")


# Its table has no end, and tells when it begins.
INTERRUPTED = """
import sys
from mpidist.cli.doctor import times as doctor_times
from mpidist.cli.main import main
doctor_times._MOST_LOOKS = 1 << 40
measure = doctor_times._Table._measure

def told(*arguments):
    print("begins", file=sys.stderr, flush=True)
    return measure(*arguments)

doctor_times._Table._measure = told
sys.argv[0] = "mpidist"
main()
"""


def test_an_interrupt_ends_the_table(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    process = start_program(2, program, "doctor", "--seconds", 1000)
    text = read_until(process, "begins")
    # Of a terminal: all processes of the group get it.
    os.killpg(process.pid, signal.SIGINT)
    result = finish(process, program.name, 60)
    assert result.returncode != 0, text + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert "threads in MPI" in result.stdout


def test_hosts_have_a_table_of_times(virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path) -> None:
    hosts, program = virtual_hosts(2), tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = read_page(hosts.run([1, 1], program, "doctor", "--json", "--seconds", 2, timeout_seconds=100).stdout)
    assert found["ranks"]["text"] == "2 on 2 node(s), 1 on each, 2 host(s)"
    assert found["sum of 8 B"]["data"]["mpi_us"] > 0
