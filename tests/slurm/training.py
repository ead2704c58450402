"""What jobs of tests train: the example on a small file, and its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

import mpidist
from tests.helpers.launching import run_program
from tests.hosts.virtual_hosts import ROOT

Array = npt.NDArray[Any]


def write_data(path: Path, examples: int) -> Path:
    """Write a file of small images: a class is the brightest of four quarters."""
    random = np.random.default_rng(1)
    tests = 80
    images = random.uniform(0, 0.5, (examples + tests, 8, 8)).astype(np.float32)
    labels = random.integers(0, 4, examples + tests)
    for image, label in zip(images, labels, strict=True):
        image[label // 2 * 4 : label // 2 * 4 + 4, label % 2 * 4 : label % 2 * 4 + 4] += 0.5
    np.savez(path, x_train=images[tests:], y_train=labels[tests:], x_test=images[:tests], y_test=labels[:tests])
    return path


def train_without_slurm(ranks: int, folder: Path, data: Path, epochs: int) -> Array:
    """The losses of a run that nobody disturbs."""
    example = ROOT / "examples" / "train.py"
    result = run_program(ranks, example, "--data", data, "--epochs", epochs, "--checkpoint-dir", folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return losses(folder)


def losses(folder: Path) -> Array:
    """The loss of each step, from the last checkpoint."""
    path = mpidist.latest_checkpoint(folder)
    assert path is not None
    with h5py.File(path) as file:
        callbacks = file["trainer/callbacks"]
        (name,) = (name for name in callbacks if name.startswith("Losses"))
        return np.asarray(callbacks[f"{name}/values"])
