"""Run a command beside busy loops: what passes so does not depend on the time that it is given.

    python tests/busy.py N COMMAND...
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence

LOOP = "while True: pass"


def main(arguments: Sequence[str]) -> int:
    """Start N loops, run the command, end the loops. Returns its exit code."""
    if len(arguments) < 2 or not arguments[0].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        for _ in range(int(arguments[0])):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", LOOP]))
            stack.callback(loop.kill)
        return subprocess.run(arguments[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
