"""Without KERAS_BACKEND, and without TensorFlow, which Keras then takes, the error names the variable."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(
    find_spec("keras") is None or find_spec("tensorflow") is not None, reason="Keras must be there, TensorFlow not"
)
def test_a_backend_that_is_not_installed(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    # Keras reads its settings there.
    environment["KERAS_HOME"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", "import mpidist.keras"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: mpidist.keras: Keras is set to a backend that is not installed"), last
    assert "no module 'tensorflow'" in last
    assert "Set KERAS_BACKEND=torch (or jax)" in last
