"""The job directory: what ranks on different hosts see of each other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.failures.job_directory import (
    IDLE_SECONDS,
    MOST_SEEN,
    DeathNotes,
    FarPeer,
    OwnFile,
    folder_of,
    ranks_to_see,
    wanted,
)
from mpidist.failures.peers import STALE_SECONDS, Key
from mpidist.failures.watchdog import Watchdog
from mpidist.recorder.rank_page import PAGE_BYTES, Page
from mpidist.recorder.recorder import Recorder
from mpidist.recorder.time_limits import TICK_SECONDS
from tests.helpers.watching import TurnedClock

KEY = Key("n1", 7, "pid:[1]")
ME = Key("n2", 7, "pid:[1]")
# A file is not read again before.
LOOK_SECONDS = 0.51
HOLDER = """
import sys, threading
from pathlib import Path
from mpidist.failures.job_directory import OwnFile
from mpidist.failures.peers import Key
file = OwnFile(Path(sys.argv[1]), Key("n1", 7, "pid:[1]"))
file.write({"states": {"5": 12}, "details": {"calls": []}, "ended": len(sys.argv) > 2})
print("ready", flush=True)
threading.Event().wait()
"""


def start_holder(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    # A lock is that of a process: a second one is needed to see it.
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


@pytest.mark.parametrize("counts", [[1] * 40, [32, 33], [16, 16, 16, 16], [1] * 65, [1, 64], [64, 64]], ids=str)
def test_in_a_small_job_all_ranks_of_other_hosts_are_seen(counts: list[int]) -> None:
    places = [host for host, count in enumerate(counts) for _ in range(count)]
    for rank, place in enumerate(places):
        assert ranks_to_see(places, rank) == [other for other, at in enumerate(places) if at != place]


@pytest.mark.parametrize(
    "counts", [[64] * 31, [1] * 500, [1] * 66, [65, 65], [2, 64, 1, 64, 3, 100], [1, 1000], [7] * 20],
    ids=lambda counts: f"{len(counts)} hosts, {sum(counts)}",
)
@pytest.mark.parametrize("step", [1, 7])
def test_in_a_large_job_each_rank_sees_few_and_is_seen(counts: list[int], step: int) -> None:
    """Also where ranks are dealt out host by host in turns (`step` changes their order)."""
    places = [host for host, count in enumerate(counts) for _ in range(count)]
    places = [place for begin in range(step) for place in places[begin::step]]
    seen_by: dict[int, set[int]] = {rank: set() for rank in range(len(places))}
    for rank, place in enumerate(places):
        seen = ranks_to_see(places, rank)
        assert len(set(seen)) == len(seen)
        assert place not in {places[other] for other in seen}
        # At most one host's share beyond those.
        assert len(seen) <= max(4, 3 + -(-max(counts) // counts[place]))
        for other in seen:
            seen_by[other].add(place)
    assert len(places) > MOST_SEEN
    assert all(seen_by.values())


def test_a_rank_sees_its_counterpart_on_the_host_before() -> None:
    places = [host for host in range(10) for _ in range(8)]
    assert ranks_to_see(places, 27) == [19, 11, 3, 75]
    assert ranks_to_see(places, 3) == [75, 67, 59, 51]


def test_deaths_are_told_once_to_each_rank_but_not_to_the_dead(tmp_path: Path) -> None:
    writer, reader, dead = (DeathNotes(tmp_path, key) for key in (Key("n3", 7, "pid:[1]"), ME, KEY))
    assert reader.news() == []
    writer.add(KEY, "rank 1 of 9")
    assert reader.news() == [(KEY, "rank 1 of 9")]
    assert reader.news() == []
    assert dead.news() == []
    with (tmp_path / "deaths").open("ab") as file:
        file.write(b'no line of ours\n["n1", 8')
        file.flush()
        assert reader.news() == []
        file.write(b', "pid:[1]", "rank 2 of 9"]\n')
    assert reader.news() == [(Key("n1", 8, "pid:[1]"), "rank 2 of 9")]
    DeathNotes(tmp_path / "nowhere", ME).add(KEY, "rank 1 of 9")


def test_a_file_tells_states_and_the_death(tmp_path: Path) -> None:
    clock = TurnedClock()
    peer = FarPeer(KEY, "rank 1", 1, tmp_path, ME, clock)
    assert peer.tell() == "rank 1 has no file here yet"
    assert not peer.has_died()
    process = start_holder(tmp_path)
    # It looks twice a second.
    assert peer.state(5) is None
    clock.turn(LOOK_SECONDS)
    assert peer.state(5) == 12
    assert peer.state(6) is None
    assert peer.details() == {"calls": []}
    assert not peer.has_died()
    end(process)
    assert peer.has_died()
    assert peer.tell() == "rank 1 has died"


def test_a_file_that_is_not_written_any_more_says_so(tmp_path: Path) -> None:
    """A rank that waits for nobody writes seldom; one that is stopped, never."""
    clock = TurnedClock()
    peer = FarPeer(KEY, "rank 1", 1, tmp_path, ME, clock)
    process = start_holder(tmp_path)
    assert peer.details() == {"calls": []}
    clock.turn(3.9)
    assert peer.is_fresh()
    clock.turn(0.1)
    assert (peer.is_fresh(), peer.details()) == (False, {})
    clock.turn(2)
    assert peer.tell() == "rank 1 has not waited in any call for 6 s"
    mine = OwnFile(tmp_path, ME)
    mine.write({})
    written = (tmp_path / "n1-7-1").stat().st_mtime
    # As long as an idle rank may take, and no longer.
    os.utime(tmp_path / "n2-7-1", (written, written + IDLE_SECONDS + STALE_SECONDS))
    assert peer.tell() == "rank 1 has not waited in any call for 6 s"
    os.utime(tmp_path / "n2-7-1", (written, written + IDLE_SECONDS + 5))
    assert re.match(r"rank 1 has not updated its file for 15 s: it may be stopped", peer.tell())
    mine.close()
    end(process)
    assert peer.tell() == "rank 1 has died"


def test_who_has_ended_is_not_dead(tmp_path: Path) -> None:
    peer = FarPeer(KEY, "rank 1", 1, tmp_path, ME)
    end(start_holder(tmp_path, "ended"))
    assert peer.has_ended()
    assert not peer.has_died()
    assert peer.tell() == "rank 1 has ended"


def test_half_a_text_is_none(tmp_path: Path) -> None:
    clock = TurnedClock()
    own = OwnFile(tmp_path, KEY)
    own.write({"states": {"5": 12}})
    peer = FarPeer(KEY, "rank 1", 1, tmp_path, ME, clock)
    assert peer.state(5) == 12
    path = next(tmp_path.iterdir())
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    clock.turn(LOOK_SECONDS)
    assert peer.state(5) == 12
    path.write_text(whole.replace("12", "13"))
    clock.turn(LOOK_SECONDS)
    assert peer.state(5) == 13
    own.close()


def test_a_file_is_written_once_in_a_while(tmp_path: Path) -> None:
    own = OwnFile(tmp_path / "job", KEY)
    own.write({"ended": False})
    own.write({"ended": True}, after=10)
    peer = FarPeer(KEY, "rank 1", 1, tmp_path / "job", ME)
    assert not peer.has_ended()
    own.close()
    assert not (tmp_path / "job").exists()


def test_a_file_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    process = start_holder(tmp_path)
    with pytest.raises(OSError, match="temporarily unavailable"):
        OwnFile(tmp_path, KEY)
    # It is the other's file.
    assert len(list(tmp_path.iterdir())) == 1
    end(process)


def test_the_directory_is_that_of_the_variable_or_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPIDIST_JOB_DIR", "SLURM_JOB_ID", "SLURM_SUBMIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert wanted() == ""
    monkeypatch.setenv("SLURM_SUBMIT_DIR", "/submit")
    assert wanted() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert wanted() == "/submit"
    monkeypatch.setenv("MPIDIST_JOB_DIR", "/jobs")
    assert wanted() == "/jobs"
    assert folder_of("/jobs", "5-ab") == Path("/jobs/.mpidist-5-ab")
    assert os.sep not in folder_of("/jobs", "5-ab").name


def test_a_rank_that_waits_notes_a_death_whose_call_was_never_written(tmp_path: Path) -> None:
    """A rank writes once in ten seconds while it does not wait: its file may tell of no call on the communicator."""
    page, recorder = Page(memoryview(bytearray(PAGE_BYTES))), Recorder()
    recorder.show(page.places)
    process = start_holder(tmp_path)
    dead: list[Key] = []
    clock = TurnedClock()
    watchdog, mine = Watchdog(clock, recorder), Key("n0", os.getpid(), "pid:[1]")
    watchdog.look_after(mine, "rank 0 of 2", 0, page)
    watchdog.meet([FarPeer(KEY, "rank 1", 1, tmp_path, ME, clock)])
    watchdog.end_by(lambda: None, bool, lambda key, _: dead.append(key))
    calls = recorder.open(77, [mine, KEY], 0)
    calls.enter("all_reduce")
    for _ in range(20):
        clock.turn(TICK_SECONDS)
        watchdog.tick(page)
    assert not dead
    end(process)
    watchdog.tick(page)
    assert set(dead) == {KEY}


def test_a_rank_speaks_only_where_the_word_of_a_dead_one_has_not_ended_the_job(tmp_path: Path) -> None:
    """Who speaks ends all ranks, and itself among the first: others see a death, and are about to end, too."""
    clock = TurnedClock()
    watchdog, peer = Watchdog(clock), FarPeer(KEY, "rank 0", 0, tmp_path, ME, clock)
    is_over = False
    watchdog.end_by(lambda: None, lambda: is_over, lambda *_: None)
    watchdog._order = 1
    process = start_holder(tmp_path)
    assert not peer.may_speak()
    assert watchdog._take_turn([peer], ends=False)
    end(process)
    assert peer.may_speak()
    assert not watchdog._take_turn([peer], ends=False)
    assert watchdog._take_turn([peer], ends=True)
    is_over = True
    assert not watchdog._take_turn([peer], ends=True)


def test_who_has_come_to_its_end_does_not_speak(tmp_path: Path) -> None:
    peer = FarPeer(KEY, "rank 0", 0, tmp_path, ME)
    end(start_holder(tmp_path, "ended"))
    assert not peer.may_speak()
