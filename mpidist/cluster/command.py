"""The `mpirun` line that errors and warnings print as the way out."""

from __future__ import annotations

import sys
from pathlib import Path


def mpirun_line(ranks: int) -> str:
    """Local. The command that starts this program on a number of ranks: `mpirun -n 4 python train.py`."""
    script = sys.argv[0] if sys.argv else ""
    name = script if script.endswith(".py") and not Path(script).is_absolute() else Path(script).name
    return f"mpirun -n {ranks} python {name if name.endswith('.py') else 'script.py'}"
