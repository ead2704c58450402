"""The benchmark of GPUs, small and on simulated ones: it runs, and its two training steps compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpidist.cluster.devices import visible_gpus
from tests.launching import run_program
from tests.simulated_cuda import COMPILER

pytestmark = pytest.mark.timeout_seconds(240)

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "gpu.py"


@pytest.mark.skipif(COMPILER is None, reason="fused kernels need a C++ compiler here")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_with_mpidist_does_what_plain_cupy_does(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    result = run_program(
        ranks, ROOT / "tests" / "simulated_cuda.py", BENCHMARK, "--rounds", 3, "--rows", 16, "--width", 24,
        "--to-bytes", 1 << 16, "--json", path, timeout_seconds=120,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(path.read_text())
    step = found["step"]
    # Four steps of a rate of 0.001 each.
    assert step["largest_difference"] < 2e-6
    times = step["times"]
    assert step["ratio"] == pytest.approx(times["mpidist"]["median"] / times["plain CuPy"]["median"])
    assert set(found["all_reduce"]) == {"4096", "65536"}
    assert {"copy in the GPU", "copy to the host and back", "staged"} <= set(found["all_reduce"]["4096"])
    assert found["adam"]["parameters"] == 1 << 14
    assert set(found["adam"]["times"]) == {"one kernel", "function by function"}


@pytest.mark.skipif(bool(visible_gpus()), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = run_program(1, BENCHMARK, timeout_seconds=60)
    assert result.returncode == 1
    assert "nothing to measure: no GPU is visible" in result.stdout
