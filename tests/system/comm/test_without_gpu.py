"""What programs that ask for a GPU say where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.cluster.devices.names import visible_gpus
from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(240)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "train.py"
BENCHMARK = ROOT / "benchmarks" / "gpu.py"
no_gpu = pytest.mark.skipif(bool(visible_gpus()), reason="this machine has a GPU")


@no_gpu
@pytest.mark.parametrize("strategy", ["multi-worker", "mirrored", "one-device"])
def test_without_a_gpu_the_error_is_one_line_with_the_way_out(strategy: str) -> None:
    result = run_program(2, EXAMPLE, "--device", "gpu", "--strategy", strategy, timeout_seconds=60)
    output = result.stderr + result.stdout
    assert result.returncode == 1, output
    assert output.count("Error: ") == output.count("asks for a GPU, but no GPU is visible") == 1
    assert output.count("--device cpu") == 1
    assert "Traceback" not in output


def test_the_default_strategy_has_no_gpu() -> None:
    result = run_program(1, EXAMPLE, "--device", "gpu", "--strategy", "default", timeout_seconds=60)
    assert result.returncode == 2
    assert "--strategy default computes on the CPU" in result.stderr


@no_gpu
def test_the_benchmark_has_nothing_to_measure() -> None:
    result = run_program(1, BENCHMARK, timeout_seconds=60)
    assert result.returncode == 1
    assert "nothing to measure: no GPU is visible" in result.stdout
