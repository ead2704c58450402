"""The training example on GPUs, simulated in every rank: strategies, collectives, batches, metrics, fused kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpidist.cluster.devices import visible_gpus
from tests.launching import run_program
from tests.simulated_cuda import COMPILER

pytestmark = pytest.mark.timeout_seconds(240)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train.py"
SIMULATED = ROOT / "tests" / "simulated_cuda.py"


@pytest.mark.skipif(COMPILER is None, reason="fused kernels need a C++ compiler here")
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "one-device"), (2, "mirrored"), (3, "multi-worker")]
)
def test_losses_are_those_of_the_cpu(ranks: int, strategy: str, tmp_path: Path) -> None:
    options = ("--epochs", 4, "--strategy", strategy)
    on_cpu = run_program(ranks, EXAMPLE, *options, "--losses", tmp_path / "cpu", timeout_seconds=100)
    assert on_cpu.returncode == 0, on_cpu.stderr + on_cpu.stdout
    folder = tmp_path / "checkpoints"
    on_gpu = run_program(
        ranks, SIMULATED, EXAMPLE, "--device", "gpu", *options, "--losses", tmp_path / "gpu",
        "--checkpoint-dir", folder, timeout_seconds=100,
    )
    assert on_gpu.returncode == 0, on_gpu.stderr + on_gpu.stdout
    losses, expected = np.loadtxt(tmp_path / "gpu"), np.loadtxt(tmp_path / "cpu")
    assert losses.shape == (4 * 23,)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert on_gpu.stdout.split("test accuracy")[-1] == on_cpu.stdout.split("test accuracy")[-1]
    # Its checkpoint is one of arrays, wherever they lay.
    resumed = run_program(1, EXAMPLE, "--epochs", 4, "--checkpoint-dir", folder, timeout_seconds=100)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "resumed after epoch 4" in resumed.stderr + resumed.stdout


@pytest.mark.skipif(bool(visible_gpus()), reason="this machine has a GPU")
@pytest.mark.parametrize("strategy", ["multi-worker", "mirrored", "one-device"])
def test_without_a_gpu_the_error_is_one_line_with_the_way_out(strategy: str) -> None:
    result = run_program(2, EXAMPLE, "--device", "gpu", "--strategy", strategy, timeout_seconds=60)
    output = result.stderr + result.stdout
    assert result.returncode == 1, output
    assert output.count("Error: ") == output.count("asks for a GPU, and no GPU is visible") == 1
    assert output.count("--device cpu") == 1
    assert "Traceback" not in output


def test_the_default_strategy_has_no_gpu() -> None:
    result = run_program(1, EXAMPLE, "--device", "gpu", "--strategy", "default", timeout_seconds=60)
    assert result.returncode == 2
    assert "--strategy default computes on the CPU" in result.stderr
