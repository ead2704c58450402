"""How a program has ended, as its exit functions see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import launch_environment
from tests.helpers.markdown import ROOT

PROGRAM = """
import atexit, sys
sys.path.insert(0, ROOT)

def main():
    # Not before the program runs.
    from mpidist.failures.exit_code import was_left
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
        env=launch_environment(), capture_output=True, text=True, check=False,
    )
    assert result.stdout == f"{was_left}\n", result.stdout + result.stderr


CODES = """
import atexit, os, sys, threading
sys.path.insert(0, ROOT)

class Own(SystemExit):
    pass

def main():
    from mpidist.failures.exit_code import code, watch_code
    watch_code()
    watch_code()
    atexit.register(lambda: print(code()))
    try:
        raise SystemExit(5)
    except SystemExit as error:
        assert error.code == 5
        error.code = 6
        assert error.code == 6
    thread = threading.Thread(target=sys.exit, args=(4,))
    thread.start()
    thread.join()
    assert code() == 0

main()
"""


@pytest.mark.parametrize("end", [
    "", "sys.exit()", "sys.exit(3)", "sys.exit('text')", "sys.exit(-1)", "raise SystemExit", "raise SystemExit(0)",
    "raise SystemExit(7)", "raise SystemExit('text')", "raise SystemExit(True)", "raise SystemExit(256)",
    "raise Own(9)", "raise SystemExit(1, 2)", "exit(8)", "raise ValueError", "raise KeyboardInterrupt",
    "try:\n    sys.exit(3)\nfinally:\n    raise SystemExit(0)", "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
])
def test_the_code_is_the_one_that_the_parent_sees(tmp_path: Path, end: str) -> None:
    (tmp_path / "program.py").write_text(CODES.replace("ROOT", repr(str(ROOT))) + end)
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=launch_environment(), capture_output=True, text=True,
        check=False,
    )
    # The interpreter ends itself by the signal after an interrupt.
    code = 130 if result.returncode == -2 else result.returncode
    assert result.stdout == f"{code}\n", result.stdout + result.stderr


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "sys.exit(4)", "raise ValueError"])
def test_a_process_that_is_all_of_a_job_says_its_code(tmp_path: Path, end: str) -> None:
    (tmp_path / "program.py").write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import mpidist
strategy = mpidist.ParameterServerStrategy(options=mpidist.ServerOptions(heap_bytes=1 << 20))
with strategy.scope():
    count = mpidist.Variable(0)
mpidist.Checkpoint(count=count).save("run/c")
{end}
""")
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=launch_environment(), capture_output=True, text=True,
        check=False,
    )
    assert (tmp_path / "run/exit-code").read_text() == f"{result.returncode}\n", result.stderr
