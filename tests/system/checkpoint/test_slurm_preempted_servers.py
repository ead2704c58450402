"""Jobs of Slurm with parameter servers that are told of their end: they save, are queued again, and go on."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.helpers.preempted_training import COUNTED
from tests.helpers.waiting import until
from tests.slurm.private_slurm import ENDS, JOB_SECONDS, Job, PrivateSlurm, copy_tree

pytestmark = pytest.mark.timeout_seconds(240)

# The first life goes on until it is told of the end; the second one ends by itself.
TRAINING = """
import os, sys
import mpidist
from tests.helpers.waiting import let_pass
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig

dealt = mpidist.cluster_resolver.MPIClusterResolver(num_ps=int(sys.argv[2])) if len(sys.argv) > 2 else None
strategy = mpidist.ParameterServerStrategy(dealt, options=mpidist.ServerOptions(heap_bytes=1 << 22))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
""" + COUNTED + """
handler = PreemptionCheckpointHandler(None, checkpoint, sys.argv[1], TerminationConfig(requeue=True, exit_code=75))
begin = handler.total_run_calls
restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
print("life", restarts, "begins at", begin, flush=True)
while not restarts or handler.total_run_calls < begin + 50:
    if handler.total_run_calls == begin + 30:
        print("trains", flush=True)
    handler.run(coordinator.schedule, step, (handler.total_run_calls, numbers))
    # Not so fast that there are no steps left before the chief has heard of the end.
    let_pass(0.01)
require_exact(handler.total_run_calls)
"""


def require_two_lives(job: Job, number: int, reason: str) -> None:
    """The job was told of its end and saved; the second life began at the step that was saved, and ended well."""
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), job
    assert job.output.count(f"the job is about to end ({reason}): saved checkpoints/ckpt-") == 1, job
    assert f"job {number} is requeued" in job.output, job
    assert "the job ends" not in job.output, job
    begins = [int(count) for count in re.findall(r"life 1 begins at (\d+)", job.output)]
    saved = [int(count) for count in re.findall(r"after (\d+) steps", job.output)]
    assert "life 0 begins at 0" in job.output, job
    assert begins == saved, job
    assert f"exact after {begins[0] + 50}" in job.output, job


def test_a_heterogeneous_job_saves_and_goes_on(slurm: PrivateSlurm, tmp_path: Path) -> None:
    folder = copy_tree(tmp_path)
    (folder / "program.py").write_text(TRAINING)
    number = slurm.submit("slurm/parameter_server.sbatch", "program.py", "checkpoints", folder=folder)
    slurm.wait_for(number, "trains")
    slurm.ask("scancel", "--signal=USR1", number)
    slurm.wait_for(number, "is requeued")
    looks = itertools.count()

    def begins() -> bool:
        if slurm.show(number).state in ("RUNNING", *ENDS):
            return True
        # Such jobs are started by Slurm's backfill alone, which looks only when something has changed: on a cluster
        # where nothing else happens the job would wait for ever.
        slurm.ask("scontrol", "update", f"jobid={number}", f"comment={next(looks)}")
        return False

    until(begins, "the second life begins", seconds=JOB_SECONDS)
    require_two_lives(slurm.wait(number), number, "SIGUSR1")


@pytest.mark.parametrize("reason", ["SIGUSR1", "SIGTERM"])
def test_a_job_of_equal_tasks_saves_and_goes_on(slurm: PrivateSlurm, tmp_path: Path, reason: str) -> None:
    """Where it is signalled, and where Slurm preempts it; all tasks hear of it, and the chief asks for the requeue."""
    folder = copy_tree(tmp_path)
    (folder / "program.py").write_text(TRAINING)
    text = Path(folder / "slurm" / "requeue.sbatch").read_text()
    script = text[text.index("set -euo") :].partition("examples/train.py")[0] + "program.py checkpoints 1"
    options = ["--nodes=2", "--ntasks=4", "--nodelist=n1,n2", "--requeue", "--open-mode=append"]
    number = slurm.submit_command(script, folder=folder, options=options)
    slurm.wait_for(number, "trains")
    if reason == "SIGUSR1":
        slurm.ask("scancel", "--signal=USR1", number)
    else:
        urgent = ["--partition=urgent", "--nodelist=n1,n2", "--exclusive"]
        assert slurm.wait(slurm.submit_command("true", folder=folder, options=urgent)).state == "COMPLETED"
    require_two_lives(slurm.wait(number), number, reason)
