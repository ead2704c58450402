"""`mpidist doctor` under the launcher: one page of the first rank's, and the exit code of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_program

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = """
import sys
from mpidist.cli.main import main
sys.argv[0] = "mpidist"
main()
"""


def test_ranks_are_looked_at_together(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_program(2, program, "doctor", "--json", "--no-measure", timeout_seconds=100)
    # One page, of rank 0.
    page = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    found = {one["subject"]: one for one in page["findings"]}
    assert result.returncode == int(any(one["state"] == "wrong" for one in found.values())), result.stderr
    assert found["ranks"]["text"].startswith("2 on 1 node(s) of 2 to 2")
    assert "backend" in found["collective"]["text"], found
    assert found["threads in MPI"]["state"] == "ok"
    # Both of Open MPI's and of MPICH's lines say how ranks live on.
    assert "if it is started by" in found["death of a rank"]["text"]
