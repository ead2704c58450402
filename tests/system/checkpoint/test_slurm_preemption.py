"""Jobs of Slurm that are signalled, preempted, cancelled or at the end of their time: what is saved, and what goes on.

A job that goes on ends where an undisturbed one does, bit for bit: both have two ranks, on two nodes.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.amounts import amount
from tests.helpers.waiting import let_pass, until
from tests.slurm.private_slurm import PrivateSlurm, copy_tree
from tests.slurm.training import Array, losses, write_data

pytestmark = pytest.mark.timeout_seconds(240)

# So many that a job is disturbed long before its end.
EPOCHS = 50


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is learnt; an epoch has 20 steps."""
    return write_data(tmp_path_factory.mktemp("data") / "data.npz", 1280)


@pytest.fixture(scope="module")
def undisturbed(slurm: PrivateSlurm, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Array:
    """The losses of a job that nobody disturbs."""
    folder = copy_tree(tmp_path_factory.mktemp("undisturbed"))
    arguments = ("--data", data, "--epochs", EPOCHS, "--checkpoint-dir", "checkpoints")
    job = slurm.wait(slurm.submit("slurm/requeue.sbatch", *arguments, folder=folder))
    assert (job.state, job.restarts) == ("COMPLETED", 0), job
    return losses(folder / "checkpoints")


def test_jobs_that_are_ended_from_outside_save_and_go_on(
    slurm: PrivateSlurm, data: Path, undisturbed: Array, tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    arguments = ("--data", data, "--epochs", EPOCHS)

    def submit(script: str, *options: object) -> int:
        return slurm.submit(f"slurm/{script}.sbatch", *arguments, folder=folder, options=options)

    # At once, since most of their time they start, or wait.
    signalled, behind_trap = submit("requeue", "--nodelist=n1,n2"), submit("mpirun", "--nodelist=n1,n2")
    preempted, cancelled = submit("requeue", "--nodelist=n3,n4"), submit("requeue", "--nodelist=n1,n2")
    slurm.wait_for(signalled, "epoch 5:")
    slurm.ask("scancel", "--signal=USR1", signalled)
    slurm.wait_for(behind_trap, "epoch 5:")
    slurm.ask("scancel", "--signal=USR1", "--batch", behind_trap)
    slurm.wait_for(cancelled, "epoch 5:")
    slurm.ask("scancel", cancelled)
    slurm.wait_for(preempted, "epoch 5:")
    urgent = ["--partition=urgent", "--nodelist=n3,n4", "--exclusive"]
    other = slurm.submit_command("true", folder=folder, options=urgent)

    for job, reason in ((signalled, "SIGUSR1"), (behind_trap, "SIGUSR1"), (preempted, "SIGTERM")):
        seen = slurm.wait(job)
        assert (seen.state, seen.code, seen.restarts) == ("COMPLETED", 0, 1), seen
        assert f"the job is about to end ({reason}): saved checkpoints-{job}/ckpt-" in seen.output, seen
        assert f"job {job} is requeued" in seen.output, seen
        assert seen.output.count("resumed after epoch") == 1, seen
        np.testing.assert_array_equal(losses(folder / f"checkpoints-{job}"), undisturbed)
    assert slurm.wait(other).state == "COMPLETED"
    # A person who cancels a job wants its end.
    seen = slurm.wait(cancelled)
    assert (seen.state, seen.restarts) == ("CANCELLED", 0), seen
    assert f"not requeued: job {cancelled} was cancelled" in seen.output, seen
    saved = losses(folder / f"checkpoints-{cancelled}")
    np.testing.assert_array_equal(saved, undisturbed[: len(saved)])
    assert 0 < len(saved) < len(undisturbed)


GUARDED = """
import sys
import mpidist
from tests.helpers.waiting import let_pass
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    steps = mpidist.Variable(0, dtype="int64", aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
config = TerminationConfig(requeue=True, max_requeues=1, save_seconds=18.0, save_factor=3.0, exit_code=9)
handler = PreemptionCheckpointHandler(None, mpidist.Checkpoint(steps=steps), sys.argv[1], config)
print("begins at", int(steps), flush=True)
while True:
    handler.run(lambda: strategy.run(lambda: steps.assign_add(1)))
    let_pass(0.05)
"""


def test_before_its_time_is_up_a_job_saves_and_is_queued_again(slurm: PrivateSlurm, tmp_path: Path) -> None:
    """A limit of a minute, of which 54 seconds are kept for saving."""
    folder = copy_tree(tmp_path)
    (folder / "program.py").write_text(GUARDED)
    text = Path(folder / "slurm" / "requeue.sbatch").read_text()
    script = text[text.index("set -euo") :].partition("examples/train.py")[0] + "program.py checkpoints"
    options = ["--nodes=2", "--ntasks=2", "--time=1", "--requeue", "--open-mode=append"]
    job = slurm.wait(slurm.submit_command(script, folder=folder, options=options))
    assert (job.state, job.code, job.restarts) == ("FAILED", 9, 1), job
    assert job.output.count("the job is about to end (the time is up): saved checkpoints/ckpt-") == 2, job
    assert "not requeued: it was requeued 1 time(s), and `max_requeues` is 1" in job.output, job
    begins = sorted({int(line.split()[-1]) for line in job.output.splitlines() if "begins at" in line})
    # The second time it went on from what was saved.
    assert begins[0] == 0, job
    assert len(begins) == 2, job


@pytest.mark.long
def test_a_job_that_slurm_ends_at_its_limit_is_queued_again(slurm: PrivateSlurm, tmp_path: Path) -> None:
    """Its program expected to have more time, and saves when Slurm sends SIGTERM."""
    folder = copy_tree(tmp_path)
    late = "save_seconds=18.0, save_factor=3.0"
    assert late in GUARDED
    (folder / "program.py").write_text(GUARDED.replace(late, "time_limit=3600.0"))
    script = f"srun --mpi={slurm.mpi} --kill-on-bad-exit=1 python program.py checkpoints"
    options = ["--nodes=2", "--ntasks=2", "--time=1", "--requeue", "--open-mode=append"]
    number = slurm.submit_command(script, folder=folder, options=options)
    job = slurm.wait_for(number, "is requeued", timeout_seconds=180)
    slurm.wait_for(number, "begins at [1-9]")
    slurm.ask("scancel", number)
    assert "the job is about to end (SIGTERM): saved checkpoints/ckpt-1.h5" in job.output, job
    assert "DUE TO TIME LIMIT" in job.output, job
    assert slurm.wait(number).restarts == 1


@pytest.mark.parametrize("seed", range(amount(1, 50)))
@pytest.mark.parametrize("script", ["requeue", "mpirun"])
def test_a_signal_at_any_moment(
    slurm: PrivateSlurm, data: Path, undisturbed: Array, tmp_path: Path, script: str, seed: int
) -> None:
    """The job ends by itself, and whatever has come of it, the next one goes on to the same bits."""
    folder = copy_tree(tmp_path)
    arguments = ("--data", data, "--epochs", EPOCHS, "--checkpoint-dir", "checkpoints")
    number = slurm.submit(f"slurm/{script}.sbatch", *arguments, folder=folder)
    until(lambda: slurm.show(number).state != "PENDING", "the job begins")
    let_pass(random.Random(f"{script} {seed}").uniform(0, 6))
    slurm.attempt("scancel", "--signal=USR1", *(["--batch"] if script == "mpirun" else []), number)
    job = slurm.wait(number)
    # Before the program listens, a signal ends it.
    if job.state != "COMPLETED":
        assert job.restarts == 0, job
        job = slurm.wait(slurm.submit(f"slurm/{script}.sbatch", *arguments, folder=folder))
    assert (job.state, job.code) == ("COMPLETED", 0), job
    np.testing.assert_array_equal(losses(folder / "checkpoints"), undisturbed)
