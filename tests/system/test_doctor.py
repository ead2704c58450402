"""`mpidist doctor` under the launcher: one page of the first rank's, and the exit code of all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.virtual_hosts import VirtualHosts
from tests.launching import run_program

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
    assert found["ranks"]["text"].startswith("2 on 1 node(s) of 2 to 2")
    assert "backend" in found["collective"]["text"], found
    assert found["threads in MPI"]["state"] == "ok"
    # Both of Open MPI's and of MPICH's lines say how ranks live on.
    assert "if it is started by" in found["death of a rank"]["text"]


def test_hosts_have_a_table_of_times(virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path) -> None:
    hosts, program = virtual_hosts(2), tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = read_page(hosts.run([1, 1], program, "doctor", "--json", "--seconds", 2, timeout_seconds=100).stdout)
    assert found["ranks"]["text"] == "2 on 2 node(s) of 1 to 1, 2 host(s)"
    assert found["sum of 8 B"]["data"]["mpi_us"] > 0
    assert found["between hosts"]["data"]["hosts"] == ["n1", "n2"]
    assert found["between hosts"]["text"].startswith("n1 - n2: ")
