"""The training example and the benchmark on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpidist.cluster.devices.names import visible_gpus
from tests.helpers.launching import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout_seconds(300)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train.py"
BENCHMARK = ROOT / "benchmarks" / "gpu.py"
EPOCHS = 4


@pytest.fixture
def on_gpus(request: pytest.FixtureRequest) -> list[Path]:
    """What stands before a program that uses GPUs: nothing where there are some."""
    is_simulated = request.config.getoption("--host-gpus")
    return [ROOT / "tests" / "gpu" / "host_runtime" / "__main__.py"] if is_simulated else []


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "one-device"), (1, "mirrored"), (2, "mirrored"), (2, "multi-worker"), (3, "multi-worker"),
        (2, "central-storage"),
    ],
)
def test_losses_of_the_example_are_those_of_the_cpu(
    ranks: int, strategy: str, tmp_path: Path, on_gpus: list[Path]
) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    if ranks > max(len(visible_gpus()), 1):
        pytest.skip(f"needs {ranks} GPUs")
    options = ("--epochs", EPOCHS, "--strategy", strategy)
    on_cpu = run_program(ranks, EXAMPLE, *options, "--losses", tmp_path / "cpu", timeout_seconds=120)
    assert on_cpu.returncode == 0, on_cpu.stderr + on_cpu.stdout
    folder = tmp_path / "checkpoints"
    on_gpu = run_program(
        ranks, *on_gpus, EXAMPLE, "--device", "gpu", *options, "--losses", tmp_path / "gpu", "--checkpoint-dir", folder,
        timeout_seconds=120,
    )
    assert on_gpu.returncode == 0, on_gpu.stderr + on_gpu.stdout
    losses, expected = np.loadtxt(tmp_path / "gpu"), np.loadtxt(tmp_path / "cpu")
    assert losses.shape == (EPOCHS * 23,)
    np.testing.assert_allclose(losses, expected, rtol=2e-5 if on_gpus else 1e-3)
    if on_gpus:
        assert on_gpu.stdout.split("test accuracy")[-1] == on_cpu.stdout.split("test accuracy")[-1]
    # Its checkpoint is one of arrays, wherever they lay.
    resumed = run_program(1, EXAMPLE, "--epochs", EPOCHS, "--checkpoint-dir", folder, timeout_seconds=100)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert f"resumed after epoch {EPOCHS}" in resumed.stderr + resumed.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_with_mpidist_does_what_plain_cupy_does(ranks: int, tmp_path: Path, on_gpus: list[Path]) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    if ranks > max(len(visible_gpus()), 1):
        pytest.skip(f"needs {ranks} GPUs")
    # On the host they take long at any size.
    rows, width, sizes = (16, 24, [1 << 12, 1 << 16]) if on_gpus else (64, 256, [1 << 12, 1 << 16, 1 << 20])
    path = tmp_path / "gpu.json"
    result = run_program(
        ranks, *on_gpus, BENCHMARK, "--rounds", 3, "--rows", rows, "--width", width, "--to-bytes", sizes[-1],
        "--json", path, timeout_seconds=200,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(path.read_text())
    step = found["step"]
    # Four steps of a rate of 0.001 each. On GPUs less than a step apart, whatever rounding does to gradients near zero.
    assert step["largest_difference"] < (2e-6 if on_gpus else 1e-3)
    times = step["times"]
    assert step["ratio"] == pytest.approx(times["mpidist"]["median"] / times["plain CuPy"]["median"])
    assert set(found["all_reduce"]) == set(map(str, sizes))
    assert {"copy in the GPU", "copy to the host and back", "staged"} <= set(found["all_reduce"]["4096"])
    assert found["adam"]["parameters"] == sizes[-1] // 4
    assert set(found["adam"]["times"]) == {"one kernel", "function by function"}
