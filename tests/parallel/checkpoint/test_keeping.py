"""Rules and metrics of a manager are those of all ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import ArenaStrategy

pytestmark = pytest.mark.mpi


def test_all_ranks_keep_the_same_checkpoints(communicator: Communicator, mpi_tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=create_variable(ArenaStrategy(communicator).arena, np.zeros(5)))
    last = communicator.rank == communicator.size - 1
    several = communicator.size > 1
    with CheckpointManager(checkpoint, mpi_tmp_path / "run", 2 + (last and several)) as other:
        if several:
            with pytest.raises(MismatchError, match="`max_to_keep` and the other rules"):
                other.save()
    with CheckpointManager(checkpoint, mpi_tmp_path / "run", 1, keep_best="loss") as manager:
        for loss in (math.nan, 0.5, 0.7, 0.6):
            manager.save(metrics={"loss": loss})
        if several:
            with pytest.raises(MismatchError, match="`metrics` of a checkpoint"):
                manager.save(metrics={"loss": float(last)})
        with pytest.raises(TypeError, match="must be a number"):
            manager.save(metrics={"loss": "0.1" if last else 0.1})
        names = [os.path.basename(path) for path in manager.checkpoints]
        assert communicator.all_gather_object((names, manager.best_checkpoint)) == communicator.size * [
            (["ckpt-2.h5", "ckpt-4.h5"], str(mpi_tmp_path / "run" / "ckpt-2.h5"))
        ]
        if communicator.rank == 0:
            assert sorted(name for name in os.listdir(mpi_tmp_path / "run") if name.endswith(".h5")) == names
            os.rename(mpi_tmp_path / "run", mpi_tmp_path / "away")
        with pytest.raises(FileNotFoundError, match="is gone"):
            manager.save()
        if communicator.rank == 0:
            os.rename(mpi_tmp_path / "away", mpi_tmp_path / "run")
        assert str(manager.save()).endswith("ckpt-5.h5")
