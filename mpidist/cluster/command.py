"""The command that starts this program, as errors and warnings print it as the way out."""

from __future__ import annotations

import sys
from pathlib import Path


def program() -> list[str]:
    """Local. The words that start this program alone: `python train.py`."""
    script = sys.argv[0] if sys.argv else ""
    name = script if script.endswith(".py") and not Path(script).is_absolute() else Path(script).name
    return ["python", name if name.endswith(".py") else "script.py"]


def mpirun_line(ranks: int) -> str:
    """Local. The command that starts this program on a number of ranks: `mpirun -n 4 python train.py`."""
    return " ".join(["mpirun", "-n", str(ranks), *program()])
