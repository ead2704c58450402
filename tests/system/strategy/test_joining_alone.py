"""All workers are lost while others may join: the job waits, says so, and goes on with the first that comes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.joining import Job
from tests.helpers.launching import finish

pytestmark = pytest.mark.timeout_seconds(120)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"synchronous": True}, marks=pytest.mark.long)], ids=["asynchronous", "synchronous"]
)
def test_a_job_without_workers_waits_for_one_and_goes_on(tmp_path: Path, options: dict[str, Any]) -> None:
    with Job(tmp_path, 2, **options) as job:
        job.ask("os.environ.update(MPIDIST_WARN_SECONDS='0.5')")
        pids = job.ask("coordinator.fetch([coordinator.schedule(os.getpid, worker=worker) for worker in (0, 1)])")
        # Both end in their function, one after another for Hydra's sake. What they had, and what waits, is for others.
        job.begin(
            f"values = [coordinator.schedule(add, ({pids[0]},), worker=0)]\n"
            "wait_for(lambda: living() == 1)\n"
            f"values += [coordinator.schedule(add, ({pids[1]},), worker=1)]\n"
            "values += [coordinator.schedule(add) for _ in range(8)]\n"
            "coordinator.join()"
        )
        line = f"mpidist worker --join {job.directory}"
        said = job.read_until(r"has waited \d+ s for a worker that joins\n.*mpidist worker --join")
        assert said.count(f"all workers are lost: the job waits until others join, by `{line}`") == 1, said
        joiner = job.join()
        job.end()
        done = [pid for pid, _ in job.ask("coordinator.fetch(values)")]
        # The second one may have done what the first one had begun.
        assert done[1:] == [joiner.pid] * 9, done
        count, steps, *total = job.ask("totals()")
        assert (count, total) == (10, [float(steps)])
        # Once more, while the program is not in the coordinator.
        joiner.kill()
        job.ask("wait_for(lambda: living() == 0)")
        job.join()
        job.ask("coordinator.schedule(add).fetch()")
        assert job.ask("totals()") == [11, steps + 1, steps + 1.0]
        job.finish()


def test_a_limit_of_time_ends_a_job_that_waits_for_workers(tmp_path: Path) -> None:
    with Job(tmp_path, 1) as job:
        job.ask("lose(0)")
        # Not before: the start may take longer.
        job.ask("os.environ.update(MPIDIST_TIMEOUT='1')")
        job.begin("coordinator.schedule(add).fetch()")
        result = finish(job.process, "the job", 30)
        text = result.stderr
        assert re.search(r"has waited \d+ s for a worker that joins, the limit is 1 s, the job ends", text), text
        assert f"mpidist worker --join {job.directory}" in text, text
