"""The training example and the benchmark on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpidist.cluster.devices import visible_gpus
from tests.launching import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout_seconds(300)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def on_gpus(request: pytest.FixtureRequest) -> list[Path]:
    """What stands before a program that uses GPUs: nothing where there are some."""
    is_simulated = request.config.getoption("--host-gpus")
    return [ROOT / "tests" / "gpu" / "host_runtime" / "__main__.py"] if is_simulated else []


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "one-device"), (1, "mirrored"), (2, "multi-worker")])
def test_losses_of_the_example_are_those_of_the_cpu(
    ranks: int, strategy: str, tmp_path: Path, on_gpus: list[Path]
) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    if ranks > max(len(visible_gpus()), 1):
        pytest.skip("needs two GPUs")
    epochs = 1 if on_gpus else 4
    for device in ("cpu", "gpu"):
        result = run_program(
            ranks, *(on_gpus if device == "gpu" else []), ROOT / "examples" / "train.py", "--device", device,
            "--strategy", strategy, "--epochs", epochs, "--losses", tmp_path / device, timeout_seconds=120,
        )
        assert result.returncode == 0, result.stderr + result.stdout
    losses, expected = np.loadtxt(tmp_path / "gpu"), np.loadtxt(tmp_path / "cpu")
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


def test_a_step_with_mpidist_does_what_plain_cupy_does(tmp_path: Path, on_gpus: list[Path]) -> None:
    # On the host they take long at any size.
    sizes = ("--width", 24, "--rows", 16, "--to-bytes", 1 << 12) if on_gpus else (
        "--width", 256, "--rows", 64, "--to-bytes", 1 << 20
    )
    pytest.importorskip("cupy", reason="needs CuPy")
    path = tmp_path / "gpu.json"
    result = run_program(
        1, *on_gpus, ROOT / "benchmarks" / "gpu.py", "--rounds", 3, *sizes, "--json", path, timeout_seconds=200,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    # A rate of 0.001: less than a step apart, whatever rounding does to gradients near zero.
    assert json.loads(path.read_text())["step"]["largest_difference"] < 1e-3
