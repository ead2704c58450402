"""Joiners that hang, are interrupted, come two at a time, or come and go all the time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.joining import Job, refusal
from tests.helpers.launching import finish
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout_seconds(150)


def held(process: int) -> list[int]:
    """The numbers of descriptors and of threads that a process holds."""
    return [len(os.listdir(f"/proc/{process}/{what}")) for what in ("fd", "task")]


def test_a_joiner_that_is_given_up_leaves_when_it_wakes_and_another_has_its_place(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.ask("lose(1)")
        stopped = job.join()
        job.ask("wait_for(lambda: living() == 2)")
        job.ask(f"value = coordinator.schedule(add, ({stopped.pid}, signal.SIGSTOP), worker=1)")
        job.ask(f"wait_for(lambda: living() and is_stopped({stopped.pid}))")
        # As long as it is the only one that runs a function: on a busy machine others would run too long, too.
        job.ask(
            "from mpidist.parameter_server.queue.deadlines import Deadlines\n"
            "closures = coordinator._queue\n"
            "closures._deadlines = Deadlines(0.5)\n"
            "for rank in closures.workers: closures._time(rank)"
        )
        job.ask("wait_for(lambda: living() == 1)\nclosures._deadlines = None")
        assert job.ask("value.fetch()[0]") != stopped.pid
        another = job.join()
        job.ask("wait_for(lambda: living() == 2)")
        assert job.ask("coordinator.schedule(add, worker=1).fetch()") == [another.pid, 1]
        os.kill(stopped.pid, signal.SIGCONT)
        assert "the coordinator has declared worker 1 lost" in (said := refusal(stopped)), said
        assert "lost (`closure_timeout` exceeded" in said, said
        assert job.ask("coordinator.schedule(add, worker=1).fetch()") == [another.pid, 2]
        assert job.ask("totals()") == [3, 3, 3.0]
        job.finish()


def test_a_joiner_that_stops_while_it_joins_loses_its_place(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.ask("lose(1)")
        # It has a rank, and has told nobody yet that it joins.
        stopped = job.join(
            "import os, signal; from mpidist.strategy.parameter_server.joined_worker import JoinedWindow; "
            "meet = JoinedWindow.meet; "
            "JoinedWindow.meet = lambda self: (os.kill(os.getpid(), signal.SIGSTOP), meet(self))[1]"
        )
        job.ask(f"wait_for(lambda: living() and is_stopped({stopped.pid}))")
        # Its time is over.
        job.ask("strategy.invitation._given.update(dict.fromkeys(strategy.invitation._given, 0.0))\nliving()")
        assert "worker 1 (rank 5) did not arrive; its place is free again" in job.read_until("did not arrive")
        another = job.join()
        job.ask("wait_for(lambda: living() == 2)")
        assert job.ask("coordinator.schedule(add, worker=1).fetch()") == [another.pid, 0]
        os.kill(stopped.pid, signal.SIGCONT)
        assert "worker lost: it took too long" in (said := finish(stopped, "the joiner", 30).stderr), said
        assert job.ask("coordinator.fetch([coordinator.schedule(add, worker=1)])[0]") == [another.pid, 1]
        assert job.ask("totals()") == [2, 2, 2.0]
        job.finish()


def test_joiners_that_race_and_joiners_that_are_interrupted(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.ask("lose(1)")
        both = [job.join(), job.join()]
        job.ask("wait_for(lambda: living() == 2)")
        pid = job.ask("coordinator.schedule(os.getpid, worker=1).fetch()")
        (winner,) = [one for one in both if one.pid == pid]
        (other,) = [one for one in both if one.pid != pid]
        assert "no place is free" in refusal(other)
        # In a function, whose work another worker does: an interrupt of the joiner is none of the program.
        dying = f"coordinator.schedule(add, ({winner.pid}, signal.SIGINT), worker=1)"
        assert job.ask(f"{dying}.fetch()[0]") != winner.pid
        ended = finish(winner, "the joiner", 30)
        assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "")
        assert ended.stderr == "mpidist: this worker leaves the job at SIGINT; other workers take over\n"
        winner = job.join()
        job.ask("wait_for(lambda: living() == 2)")
        # Between two functions.
        winner.terminate()
        ended = finish(winner, "the joiner", 30)
        assert (ended.returncode, ended.stderr.count("at SIGTERM")) == (-signal.SIGTERM, 1), ended
        job.ask("wait_for(lambda: living() == 1)")
        # While a checkpoint is saved.
        job.ask("saved = mpidist.Checkpoint(sums=sums, count=count)")
        job.begin(
            "seen = set()\n"
            "while len(seen) < 2:\n"
            "    values = [coordinator.schedule(add) for _ in range(4)]\n"
            "    saved.save(folder / 'ckpt')\n"
            "    seen |= {value.fetch()[0] for value in values}\n"
        )
        winner = job.join()
        job.end()
        assert job.ask(f"{winner.pid} in seen")
        count, steps, total = job.ask("totals()")
        assert count == steps == total
        # Of one moment.
        job.ask("saved.restore(mpidist.latest_checkpoint(folder)).assert_consumed()")
        saved, _, *sums = job.ask("totals()")
        assert sums == [saved]
        job.finish()


def test_joining_and_leaving_leaks_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.ask("lose(1)")
        processes = job.ask("[strategy.roles.group.processes[rank].number for rank in (0, *strategy.roles.servers)]")
        at_first: list[list[int]] = []
        times = amount(4, 100)
        for _ in range(times):
            joiner = job.join()
            job.ask("wait_for(lambda: living() == 2)")
            job.ask("coordinator.fetch([coordinator.schedule(add, worker=worker) for worker in (0, 1)])")
            joiner.kill()
            joiner.communicate()
            job.ask("wait_for(lambda: living() == 1)")
            at_first = at_first or list(map(held, processes))
        assert job.ask("totals()") == [2 * times, 2 * times, 2.0 * times]
        # A server hears of a death a moment later. One that keeps something of each joiner has two more, or many.
        until(
            lambda: all(
                now <= first + 1
                for process, before in zip(processes, at_first, strict=True)
                for now, first in zip(held(process), before, strict=True)
            ),
            "the servers hold no more than at first", job=job.process,
        )
        job.finish()
