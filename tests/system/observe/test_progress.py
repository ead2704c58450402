"""Progress under mpirun: a bar where a person watches, lines where a file is written."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.helpers.launching import find_mpirun, launch_environment, mpirun_command, run_program

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
from mpidist.observe import Progress
with Progress(3, description="counting") as progress:
    progress.write("begin")
    for _ in range(3):
        progress.update(loss=0.5)
"""


def on_a_terminal(command: list[str]) -> str:
    """What a command shows on a terminal of 100 columns."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environment = {**launch_environment(), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # how Linux says that the last writer has closed the terminal
            break
        if not data:
            break
        shown += data
    os.close(controller)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone = [sys.executable, str(program)]
    for command in (alone, [*mpirun_command(3, find_mpirun()), *alone]):
        shown = on_a_terminal(command)
        assert "\rcounting:   0%" in shown
        assert shown.count("begin") == 1
        assert "counting: 3/3" not in shown


def test_lines_in_a_file(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for ranks in (1, 3):
        result = run_program(ranks, program)
        assert result.returncode == 0
        output = (result.stdout + result.stderr).replace("\r\n", "\n")
        assert output == "begin\ncounting: 3/3 loss=0.5\n"
