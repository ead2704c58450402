"""How a program has ended, as its exit functions see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import launch_environment
from tests.markdown import ROOT

PROGRAM = """
import atexit, sys
sys.path.insert(0, ROOT)

def main():
    # Not before the program runs.
    from mpidist.comm.program_end import was_left
    assert not was_left()
    atexit.register(lambda: print(was_left()))
    raise SystemExit(3)

"""


@pytest.mark.parametrize(
    ("end", "was_left"),
    [
        ("main()", True),
        ("try:\n    main()\nexcept SystemExit as error:\n    sys.exit(error.code)", True),
        ("try:\n    main()\nfinally:\n    [][0]", True),
        ("try:\n    main()\nexcept SystemExit:\n    pass", False),
        ("try:\n    main()\nexcept SystemExit:\n    print(end='')", False),
    ],
    ids=["SystemExit", "exit", "another error", "caught", "a last call"],
)
@pytest.mark.parametrize("is_module", [False, True], ids=["a file", "a module"])
def test_an_exception_has_left_it_or_not(tmp_path: Path, end: str, was_left: bool, is_module: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("ROOT", repr(str(ROOT))) + end)
    result = subprocess.run(
        [sys.executable, *(["-m", "program"] if is_module else ["program.py"])], cwd=tmp_path,
        env=launch_environment(), capture_output=True, text=True, timeout=60, check=False,
    )
    assert result.stdout == f"{was_left}\n", result.stdout + result.stderr
