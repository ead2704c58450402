"""A rank that ends the job while threads of all ranks still write: the checkpoint is completed before."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpidist
from tests.helpers.launching import run_program

PROGRAM = """
import sys
import numpy as np
import mpidist
from mpidist.checkpoint.background import copying
from mpidist.checkpoint.background.save import BackgroundSave
from tests.helpers import marks

folder, how, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
strategy = mpidist.MultiWorkerMirroredStrategy()
rank, write, wait = strategy.communicator.rank, copying.write_pieces, BackgroundSave.await_name

def write_at_last(*arguments):
    # The disk of the other rank is slow until the one that fails waits for it.
    marks.read(folder + "/waits")
    write(*arguments)

def tell_and_wait(save):
    marks.put(folder + "/waits")
    wait(save)

if rank == victim:
    BackgroundSave.await_name = tell_and_wait
else:
    copying.write_pieces = write_at_last
with strategy.scope():
    variable = mpidist.Variable(np.full(900_000, 3.0))
manager = mpidist.CheckpointManager(mpidist.Checkpoint(v=variable), folder + "/run", 2, background=True)
manager.save()
if rank == victim:
    if how == "exits":
        sys.exit(5)
    raise KeyError("the program's own")
strategy.reduce("SUM", 1.0, axis=None)
"""


@pytest.mark.timeout_seconds(120)
@pytest.mark.parametrize(("how", "victim"), [("raises", 0), ("raises", 1), ("exits", 1)])
def test_a_rank_that_ends_the_job_waits_for_the_checkpoint(tmp_path: Path, how: str, victim: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_program(2, program, tmp_path, how, victim)
    text = result.stdout + result.stderr
    assert result.returncode == (5 if how == "exits" else 1), text
    assert ("KeyError: \"the program's own\"" in text) == (how == "raises"), text
    path = str(tmp_path / "run" / "ckpt-1.h5")
    assert mpidist.latest_checkpoint(tmp_path / "run") == path, text
    assert mpidist.checkpoint.verify(path) > 0
    assert (mpidist.load_variable(path, "v") == 3.0).all()
