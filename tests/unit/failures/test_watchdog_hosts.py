"""A rank that waits for ranks of other hosts, whose files are all that it sees of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from mpidist.failures.job_directory import IDLE_SECONDS, FarPeer, OwnFile
from mpidist.failures.peers import Key
from mpidist.recorder.calls import CODES, NEXT
from mpidist.recorder.time_limits import TICK_SECONDS
from tests.helpers.watching import IDENTITY, MakeWorld, World

# What is seen of another host may be old: as many looks must see it after the one that notes the call.
MANY_LOOKS = 1 + 5
# Locks are those of a process: another one holds those of far ranks.
KEEPER = """
import fcntl, os, sys
held = {}
for line in sys.stdin:
    word, path = line.split()
    if word == "lock":
        held[path] = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.lockf(held[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        os.close(held.pop(path))
    print("done", flush=True)
"""


class Keeper:
    """A process that holds locks, until a rank is to die."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, word: str, path: Path) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{word} {path}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.process.communicate(timeout=30)


class Far:
    """A rank of another host: its file, which the test writes."""

    def __init__(self, keeper: Keeper, world: World, folder: Path, order: int) -> None:
        self.key = Key(f"n{order}", 7, "pid:[1]")
        self.path = folder / f"n{order}-7-1"
        self._keeper, self._count = keeper, 0
        self.peer = FarPeer(
            self.key, f"rank {order} of {order + 1}", order, folder, world.ranks[0].key, world.clock
        )
        keeper.tell("lock", self.path)

    def write(self, state: int = 0, *, ended: bool = False, missing: tuple[Key, ...] = (), name: str = "") -> None:
        """Write what its watchdog would: its state, and in which call it waits."""
        details: dict[str, Any] = {}
        if name:
            state = NEXT + CODES[name]
            call = {"name": name, "number": 1, "inner": "", "before": [], "where": "train.py:5"}
            details = {"calls": [call], "missing": missing}
        self._count += 1
        content = {"ended": ended, "states": {str(IDENTITY): state}, "inner": {}, "details": details}
        # Without closing a file of its name, and in one piece.
        self.path.write_text(json.dumps({**content, "count": self._count}))

    def die(self) -> None:
        self._keeper.tell("free", self.path)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


class Job:
    """One rank here, and others on hosts of their own.

    Attributes:
        folder: Of the job.
    """

    def __init__(self, keeper: Keeper, world: World, folder: Path, far: int, members: int | None = None) -> None:
        self.world, self.rank = world, world.ranks[0]
        self.folder = self.rank.watchdog.open_file(folder, sees_all=members is None)
        self.far = [Far(keeper, world, folder, order) for order in range(1, far + 1)]
        self.rank.watchdog.meet([one.peer for one in self.far])
        unseen = [Key(f"m{number}", 7, "pid:[1]") for number in range((members or far + 1) - far - 1)]
        self.keys = [self.rank.key, *(one.key for one in self.far), *unseen]
        del world.calls[0]
        self.calls = self.rank.recorder.open(IDENTITY, self.keys, 0)


class MakeJob(Protocol):
    def __call__(self, far: int = 1, members: int | None = None) -> Job: ...


@pytest.fixture
def make(keeper: Keeper, make_world: MakeWorld, tmp_path: Path) -> MakeJob:
    return lambda far=1, members=None: Job(keeper, make_world(1), tmp_path / "job", far, members)


def test_a_far_rank_in_another_call_ends_the_job_after_many_looks(make: MakeJob) -> None:
    job = make()
    job.far[0].write(name="save")
    job.calls.enter("barrier")
    job.world.run(MANY_LOOKS * TICK_SECONDS - 0.1)
    assert not job.world.is_over
    job.world.run(20)
    assert (job.world.ended_by, job.rank.ticks) == ([0], MANY_LOOKS)
    assert "rank 1 of 2 waits in save, call 1, train.py:5" in job.world.said[0][1]


def test_a_far_rank_that_has_ended_ends_the_job(make: MakeJob) -> None:
    job = make()
    job.far[0].write(ended=True)
    job.calls.enter("barrier")
    job.world.run(20)
    assert (job.world.ended_by, job.rank.ticks) == ([0], MANY_LOOKS)
    assert "rank 1 of 2 has ended" in job.world.said[0][1]


def test_a_far_rank_that_comes_meanwhile_ends_nothing(make: MakeJob) -> None:
    """Its file was old: it had come out of the other call already."""
    job = make()
    job.far[0].write(name="save")
    job.calls.enter("barrier")
    job.world.run((MANY_LOOKS - 2) * TICK_SECONDS)
    job.far[0].write(name="barrier")
    job.world.run(10)
    assert (job.world.ended_by, job.world.said) == ([], [])


def test_a_far_rank_in_no_call_is_waited_for(make: MakeJob) -> None:
    job = make()
    job.far[0].write(0)
    job.calls.enter("barrier")
    job.world.run(40)
    assert job.world.ended_by == []
    assert job.world.first_lines == ["rank 0 of 1 has waited 30 s for 1 of 2 ranks"]
    assert "rank 1 of 2 has not waited in any call for 30 s" in job.world.said[0][1]


def test_two_far_deaths_are_noted_each_once_it_is_old(make: MakeJob) -> None:
    """What it was in when it died it may not have written; a second death comes after the first one."""
    job = make(2)
    for one in job.far:
        one.write(0)
    job.calls.enter("barrier")
    job.world.run(2)
    job.far[0].die()
    job.world.run(1)
    # It has written a moment ago: who lives writes again.
    assert job.rank.dead == []
    job.world.run(5)
    assert set(job.rank.dead) == {job.far[0].key}
    job.far[1].die()
    job.world.run(2)
    assert set(job.rank.dead) == {job.far[0].key, job.far[1].key}


def test_deaths_that_others_tell_of_are_heard_in_a_large_job(make: MakeJob) -> None:
    job = make(1, 80)
    job.far[0].write(0)
    other = job.keys[50]
    job.calls.enter("barrier")
    job.world.run(2)
    assert job.rank.dead == []
    (job.folder / "deaths").write_text(json.dumps([*other, "rank 50 of 80"]) + "\n")
    job.world.run(1)
    assert job.rank.dead == [other]
    with (job.folder / "deaths").open("a") as file:
        file.write(json.dumps([*job.keys[51], "rank 51 of 80"]) + "\n")
    job.world.run(1)
    assert job.rank.dead == [other, job.keys[51]]


def test_a_rank_that_sees_some_says_so_and_counts_those(make: MakeJob) -> None:
    job = make(3, 80)
    job.far[0].write(0)
    for one in job.far[1:]:
        one.write(name="barrier", missing=(job.far[0].key,))
    job.calls.enter("barrier")
    job.world.run(3)
    for _ in range(40):
        for one in job.far[1:]:
            one.write(name="barrier", missing=(job.far[0].key,))
        job.world.run(1)
    assert job.world.first_lines == ["rank 0 of 1 has waited 30 s for at least 1 of 80 ranks"]


def test_ranks_that_are_not_seen_may_be_late(make: MakeJob) -> None:
    job = make(1, 80)
    job.calls.enter("barrier")
    for _ in range(40):
        job.far[0].write(name="barrier")
        job.world.run(1)
    assert job.world.first_lines == ["rank 0 of 1 has waited 30 s though all ranks that it sees have arrived"]
    assert "In a large job a rank sees its own host and the hosts before it" in job.world.said[0][1]


def test_a_rank_that_waits_writes_each_second_and_another_one_seldom(make: MakeJob) -> None:
    job = make()

    def content() -> dict[str, Any]:
        return dict(json.loads(next(job.folder.glob("n0-*")).read_text()))

    job.far[0].write(0)
    job.world.run(IDLE_SECONDS / 2)
    first = content()["count"]
    job.world.run(IDLE_SECONDS / 2 - 2 * TICK_SECONDS)
    assert content()["count"] == first
    job.calls.enter("barrier")
    job.world.run(5)
    assert content()["count"] - first in (4, 5)
    assert content()["states"][str(IDENTITY)] == NEXT + CODES["barrier"]
    assert content()["details"]["missing"] == [list(job.far[0].key)]
    job.calls.leave()
    job.world.run(2 * TICK_SECONDS)
    # At once: the others must not go by what it waited for.
    assert (content()["states"][str(IDENTITY)], content()["details"]) == (NEXT, {})


def test_an_end_is_told_to_other_hosts_at_once(make: MakeJob) -> None:
    job = make()
    job.world.run(IDLE_SECONDS / 2)
    other = FarPeer(job.rank.key, "rank 0", 0, job.folder, job.far[0].key, job.world.clock)
    assert not other.has_ended()
    job.rank.watchdog.note_end()
    job.world.clock.turn(0.6)
    assert other.has_ended()


def test_a_job_directory_that_cannot_be_made_is_no_error(
    make_world: MakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(1)
    (tmp_path / "file").write_text("")
    assert world.ranks[0].watchdog.open_file(tmp_path / "file" / "job", sees_all=True) == tmp_path / "file" / "job"
    assert "other hosts do not see what this rank does" in caplog.text


def test_a_second_group_of_ranks_writes_to_the_first_directory(make: MakeJob, tmp_path: Path) -> None:
    job = make()
    assert job.rank.watchdog.open_file(tmp_path / "other", sees_all=True) == job.folder
    assert not (tmp_path / "other").exists()


def test_a_file_is_written_again_after_just_so_long(make_world: MakeWorld, tmp_path: Path) -> None:
    clock = make_world(1).clock
    own = OwnFile(tmp_path, Key("n1", 7, "pid:[1]"), clock)
    for seconds, after, is_written in ((0.0, 0.0, True), (9.9, 10.0, False), (0.1, 10.0, True), (1.0, 10.0, False)):
        clock.turn(seconds)
        before = next(tmp_path.iterdir()).read_text()
        own.write({"ended": False}, after=after)
        assert (next(tmp_path.iterdir()).read_text() != before) == is_written, seconds
    own.close()
