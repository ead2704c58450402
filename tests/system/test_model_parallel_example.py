"""The example of a split model: the loss curve of any number of logical devices, and a run that goes on with others."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.digits import write_digits
from tests.helpers.launching import run_program
from tests.helpers.markdown import ROOT

# Four ranks on two busy cores take their time.
pytestmark = pytest.mark.timeout_seconds(240)

EXAMPLE = ROOT / "examples" / "model_parallel.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of which the example learns its digits."""
    return write_digits(tmp_path_factory.mktemp("digits") / "digits.npz")


def train(ranks: int, data: Path, *options: object) -> str:
    """The output of the example, which must end well."""
    result = run_program(ranks, EXAMPLE, "--data", data, *options, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout + result.stderr


def test_two_by_two_has_the_loss_curve_of_one_by_four(data: Path, tmp_path: Path) -> None:
    outputs = [
        train(4, data, "--devices", devices, "--epochs", 2, "--losses", tmp_path / str(devices), *plot)
        for devices, plot in ((2, ("--plot", tmp_path / "a.png")), (1, ()))
    ]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    split, alone = np.loadtxt(tmp_path / "2"), np.loadtxt(tmp_path / "1")
    assert split.shape == (2 * 23,)
    np.testing.assert_allclose(split, alone, rtol=1e-12)
    for output in outputs:
        assert float(re.findall("test accuracy ([0-9.]+)", output)[-1]) > 0.93


def test_a_run_goes_on_with_another_number_of_devices(data: Path, tmp_path: Path) -> None:
    train(2, data, "--devices", 1, "--epochs", 2, "--losses", tmp_path / "whole")
    folder = tmp_path / "checkpoints"
    train(2, data, "--devices", 2, "--epochs", 1, "--checkpoint-dir", folder, "--losses", tmp_path / "first")
    train(1, data, "--devices", 1, "--epochs", 2, "--checkpoint-dir", folder, "--losses", tmp_path / "second")
    joined = np.concatenate([np.loadtxt(tmp_path / "first"), np.loadtxt(tmp_path / "second")])
    np.testing.assert_allclose(joined, np.loadtxt(tmp_path / "whole"), rtol=1e-12)


def test_ranks_that_do_not_fit_are_told_how_many_would() -> None:
    result = run_program(2, EXAMPLE, "--devices", 4, timeout_seconds=100)
    assert result.returncode != 0
    assert "1 replicas of 4 logical devices take 4 ranks, got 2" in result.stderr
    assert "mpirun -n 4" in result.stderr
