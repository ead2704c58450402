"""The training example and the benchmark on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.launching import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout_seconds(300)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("strategy", ["one-device", "mirrored", "multi-worker"])
def test_losses_of_the_example_are_those_of_the_cpu(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    for device in ("cpu", "gpu"):
        result = run_program(
            1, ROOT / "examples" / "train.py", "--device", device, "--strategy", strategy, "--epochs", 4,
            "--losses", tmp_path / device, timeout_seconds=120,
        )
        assert result.returncode == 0, result.stderr + result.stdout
    losses, expected = np.loadtxt(tmp_path / "gpu"), np.loadtxt(tmp_path / "cpu")
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


def test_a_step_with_mpidist_does_what_plain_cupy_does(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    path = tmp_path / "gpu.json"
    result = run_program(
        1, ROOT / "benchmarks" / "gpu.py", "--rounds", 3, "--width", 256, "--rows", 64, "--to-bytes", 1 << 20,
        "--json", path, timeout_seconds=200,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    # A rate of 0.001: less than a step apart, whatever rounding does to gradients near zero.
    assert json.loads(path.read_text())["step"]["largest_difference"] < 1e-3
