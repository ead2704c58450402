"""A test as a program that `mpidist run` has started: its folders, and what its environment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.failures.restart.notes import VARIABLE


def enter_start(patch: pytest.MonkeyPatch, folder: Path, memory: str, number: int) -> Path:
    """Local. Set the environment of a start of a run.

    Args:
        patch: What takes it back after the test.
        folder: The folder of the run.
        memory: The name of the directory in it that is the node's memory.
        number: The number of the start.

    Returns:
        The folder of the start, which `mpidist run` makes.
    """
    run = folder / ".mpidist-run-here-0123456789ab"
    run.mkdir(exist_ok=True)
    (folder / memory).mkdir(exist_ok=True)
    patch.setenv("MPIDIST_SHARED_MEMORY", str(folder / memory))
    patch.setenv(VARIABLE, str(run / str(number)))
    return run / str(number)
