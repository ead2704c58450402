"""Code that runs in a child process, since it might end this one, or must not run in that of a rank."""

from __future__ import annotations

import os
import subprocess
import sys

from mpidist.comm.gpu.cuda_awareness import child_environment

_SECONDS = 60.0


class NoAnswerError(Exception):
    """The child process has no answer; the text is the last line that it wrote, or how it ended.

    Attributes:
        printed: Its output until then.
    """

    def __init__(self, why: str, printed: str = "") -> None:
        super().__init__(why)
        self.printed = printed


def ask(program: str, seconds: float = _SECONDS) -> str:
    """Local. Run a Python program in a process of its own.

    Args:
        program: Its text.
        seconds: The time limit, after which it is killed.

    Returns:
        What it printed.

    Raises:
        NoAnswerError: It could not start, failed, or took longer.
    """
    try:
        # Not in this process's environment: a child of a rank must not take itself for one, and a rank's connection to
        # its launcher cannot be used twice.
        asked = subprocess.run(
            [sys.executable, "-c", program], env=child_environment(os.environ), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"it did not end within {seconds:g} s") from None
    except OSError as error:
        raise NoAnswerError(str(error)) from None
    if asked.returncode:
        lines = asked.stderr.strip().splitlines()
        why = lines[-1] if lines else f"it ended with code {asked.returncode}"
        raise NoAnswerError(why, asked.stdout)
    return asked.stdout
