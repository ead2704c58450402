"""Run a program with CuPy on host memory: `python tests/gpu/host_runtime/__main__.py train.py --device gpu`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# Started as a file: the folder above tests is where it and mpidist stand.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.gpu.host_runtime import install


def _fail(unraisable: sys.UnraisableHookArgs) -> None:
    """End the program: a replaced function has failed, and CuPy may not know it."""
    sys.__unraisablehook__(unraisable)
    sys.stderr.flush()
    os._exit(70)


sys.unraisablehook = _fail
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
install()
runpy.run_path(sys.argv[0], run_name="__main__")
