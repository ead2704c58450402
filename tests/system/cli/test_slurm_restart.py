"""`mpidist sbatch --restart`: a job of Slurm whose ranks die starts again on its nodes, to the same end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpidist.cli.main import main
from tests.slurm.private_slurm import PrivateSlurm
from tests.system.cli.test_restart import STEPS, Row, write

pytestmark = pytest.mark.timeout_seconds(180)


def test_a_job_of_slurm_starts_again_on_its_nodes(slurm: PrivateSlurm, tmp_path: Path) -> None:
    results = []
    plans: dict[str, list[Row]] = {
        "alone": [], "killed": [([2, 3], "save", "kill", 0.01), (1, "step", "kill", 0.0)]
    }
    for name, plan in plans.items():
        folder = tmp_path / name
        folder.mkdir()
        program = write(folder, plan)
        words = ["--nodes", "2", "--ntasks-per-node", "2", "--restart", "--time", "10"]
        site = folder / "site.toml"
        site.write_text(f'mpi = "{slurm.mpi}"\nsetup = ["export PATH={Path(sys.executable).parent}:$PATH"]\n')
        made = CliRunner().invoke(main, ["sbatch", *words, "--site", str(site), str(program), str(folder), str(STEPS)])
        assert made.exit_code == 0, made.output
        (folder / "job.sbatch").write_text(made.output)
        job = slurm.wait(slurm.submit("job.sbatch", folder=folder))
        assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 0), f"{made.output}\n{job.output}"
        assert len(re.findall("mpidist: restart . of at most 10: ", job.output)) == len(plan), job.output
        assert not [*folder.glob(".mpidist-*")]
        results.append((folder / "result").read_text())
    assert results[0] == results[1]


REQUEUED = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpidist
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
folder, last = Path(sys.argv[1]), int(sys.argv[2])
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
with strategy.scope():
    steps = mpidist.Variable(np.int64(0), aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
manager = mpidist.CheckpointManager(
    mpidist.Checkpoint(steps=steps), folder / "checkpoints", 2, step_counter=steps, checkpoint_interval=1000, memory=2
)
handler = PreemptionCheckpointHandler(None, manager, termination_config=TerminationConfig(requeue=True))
lives = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["MPIDIST_RUN"].rpartition("/")[2]
print(f"rank {rank} of life {lives} begins at {int(steps.numpy())}", flush=True)
while int(steps.numpy()) < last:
    handler.run(lambda: strategy.run(lambda: steps.assign_add(1)))
    manager.save()
    if int(steps.numpy()) == 10 and lives == ("0", "0") and rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if lives[0] == "0" and int(steps.numpy()) >= 20:
        last = 1 << 40  # until it is told to end
        time.sleep(0.05)  # simulates work: Slurm ends the job in one of these steps
        if int(steps.numpy()) == 20:
            print("is far", flush=True)
print(f"rank {rank} ended", flush=True)
"""


@pytest.mark.long
def test_a_job_that_starts_again_is_requeued_too(slurm: PrivateSlurm, tmp_path: Path) -> None:
    """A rank dies, and the job continues on its nodes from a copy in memory; then Slurm ends it, and it is requeued."""
    program = tmp_path / "train.py"
    program.write_text(REQUEUED)
    words = ["--nodes", "2", "--ntasks-per-node", "2", "--restart", "--requeue", "--time", "10"]
    site = tmp_path / "site.toml"
    site.write_text(f'mpi = "{slurm.mpi}"\nsetup = ["export PATH={Path(sys.executable).parent}:$PATH"]\n')
    made = CliRunner().invoke(main, ["sbatch", *words, "--site", str(site), str(program), str(tmp_path), "40"])
    assert made.exit_code == 0, made.output
    (tmp_path / "job.sbatch").write_text(made.output)
    number = slurm.submit("job.sbatch", folder=tmp_path)
    slurm.wait_for(number, "is far")
    slurm.ask("scancel", "--signal=USR1", number)
    job = slurm.wait(number)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), job
    assert re.search("restart 1 of at most 10: .*continues from the copy in memory in ", job.output), job.output
    assert f"job {number} is requeued" in job.output, job.output
    begins = {int(one) for one in re.findall(r"rank 0 of life \('1', '0'\) begins at (\d+)", job.output)}
    assert len(begins) == 1, job.output
    assert min(begins) >= 20, job.output
    assert job.output.count("ended") == 4, job.output
