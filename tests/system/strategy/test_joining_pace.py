"""Workers join a job whose updates keep pace: rounds with backup workers, and a bound on staleness."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.joining import Job

pytestmark = pytest.mark.timeout_seconds(120)

# Those that count, in their order.
UPDATES = "[[one.closure, one.worker, one.read, one.before, one.is_late] for one in RECORDER.updates]"


def updates_since(job: Job, known: int) -> list[list[int]]:
    """The updates that count, but for the first ones."""
    found: list[list[int]] = job.ask(UPDATES)
    return found[known:]


def sizes(updates: list[list[int]]) -> list[int]:
    """The number of updates of each round, in the order of the rounds."""
    return [many for _, many in sorted(Counter(before for *_, before, is_late in updates if not is_late).items())]


def test_who_joins_takes_part_in_rounds(tmp_path: Path) -> None:
    with Job(tmp_path, 3, synchronous=True, backup_workers=1) as job:
        job.ask("[lose(worker) for worker in (1, 2)]")
        job.ask("[coordinator.schedule(add) for _ in range(3)]")
        job.ask("coordinator.join()")
        alone = updates_since(job, 0)
        assert sizes(alone) == [1, 1, 1]
        first = job.join()
        job.ask("wait_for(lambda: living() == 2)")
        job.ask("[coordinator.schedule(add) for _ in range(8)]")
        job.ask("coordinator.join()")
        two = updates_since(job, 3)
        assert sizes(two) == [2, 2, 2, 2]
        assert len({worker for _, worker, *_ in two}) == 2
        job.join()
        job.ask("wait_for(lambda: living() == 3)")
        # It ends when its update waits in a round.
        job.ask(f"values = [coordinator.schedule(add, ({first.pid},)) for _ in range(12)]")
        job.ask("coordinator.join()")
        three = updates_since(job, 11)
        rounds = sizes(three)
        assert rounds[:-1] == [2] * (len(rounds) - 1)
        everything = [*alone, *two, *three]
        assert len({closure for closure, *_ in everything}) == len(everything) == 23
        # Each gradient is one, and so is each mean.
        steps = len(sizes(everything))
        assert job.ask("totals()") == [23, steps, float(steps)]
        assert job.ask("coordinator.late_updates") == sum(one[-1] for one in everything)
        assert all(read == before for *_, read, before, is_late in everything if not is_late)
        job.finish()


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_joins_keeps_the_bound_on_staleness(tmp_path: Path, staleness: int) -> None:
    with Job(tmp_path, 2, staleness=staleness) as job:
        job.ask("lose(1)")
        joiner = job.join()
        job.ask("wait_for(lambda: living() == 2)")
        values = job.ask("coordinator.fetch([coordinator.schedule(add) for _ in range(20)])")
        # It stops when it has pushed: others count as far as they may.
        job.ask(f"values = [coordinator.schedule(add, ({joiner.pid}, signal.SIGSTOP), worker=1)]")
        job.ask(f"wait_for(lambda: is_stopped({joiner.pid}))")
        job.ask("values += [coordinator.schedule(add) for _ in range(10)]")
        job.ask(f"wait_for(lambda: coordinator.done() or int(count) == {20 + staleness})")
        job.ask(f"os.kill({joiner.pid}, signal.SIGCONT)")
        values += job.ask("coordinator.fetch(values)")
        updates = updates_since(job, 0)
        assert job.ask("totals()") == [31, 31, 31.0]
        assert [before for *_, before, _ in updates] == list(range(31))
        by_closure = sorted(updates)
        for (_, read), (_, _, least, before, _) in zip(values, by_closure, strict=True):
            assert least <= read <= before <= read + staleness
        stopped = by_closure[20]
        assert stopped[3] - values[20][1] == staleness, (stopped, values[20])
        assert joiner.pid in {pid for pid, _ in values[:20]}
        job.finish()
