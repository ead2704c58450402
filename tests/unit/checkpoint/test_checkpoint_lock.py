"""The lock of a checkpoint directory: containers, hosts of one name, and file systems without hard links."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory import lock as lock_module
from mpidist.checkpoint.directory.lock import DirectoryLock, LockOwner, is_dead, require_savable, this_process
from mpidist.checkpoint.directory.state import LOCK_FILE, read_state
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import make_arena
from tests.hosts.virtual_hosts import unshare

ROOT = Path(__file__).resolve().parents[3]
ARENA = make_arena(SoloCommunicator())
# The numbers by which file systems say that they have no hard links.
NO_LINKS = [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EMLINK]

HOLD = """
import sys
from mpidist.checkpoint.directory import lock
lock.BEAT_SECONDS = 0.05
held = lock.DirectoryLock(sys.argv[1])
try:
    held.acquire()
    print("held", flush=True)
except Exception as error:
    print(error, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)


def manager(folder: Path, max_to_keep: int = 5) -> CheckpointManager:
    return CheckpointManager(Checkpoint(v=create_variable(ARENA, np.zeros(3))), folder, max_to_keep)


def write_holder(folder: Path, holder: LockOwner) -> None:
    (folder / LOCK_FILE).write_text(json.dumps(asdict(holder)))


def turn_back(path: Path) -> None:
    old = time.time() - lock_module.DEAD_SECONDS - 5
    os.utime(path, (old, old))


def parent() -> LockOwner:
    """Another living process of this host."""
    start = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    return replace(this_process(), process=os.getppid(), started=start)


def test_a_number_says_nothing_of_a_process_of_another_host_or_container() -> None:
    me = this_process()
    assert me.boot
    assert me.namespace.startswith("pid:[")
    assert is_dead(me, me) is False
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    gone = replace(me, process=ended.pid)
    assert is_dead(gone, me) is True
    others: list[dict[str, Any]] = [
        {"boot": "other"}, {"namespace": "pid:[1]"}, {"host": "other"}, {"boot": ""}, {"namespace": ""},
    ]
    for other in others:
        # The same host name, and a number that this process sees, or does not.
        assert is_dead(replace(me, **other), me) is None
        assert is_dead(replace(gone, **other), me) is None
    unknown = replace(me, boot="", namespace="")
    assert is_dead(replace(gone, boot="", namespace=""), unknown) is None


def test_a_process_of_which_the_system_shows_nothing_may_be_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide the processes of other users."""
    me = this_process()
    assert is_dead(replace(me, started=0), me) is None
    monkeypatch.setattr(lock_module, "_start_of", lambda _: 0)
    assert is_dead(me, me) is None


def test_a_process_table_of_another_namespace_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have the /proc of its host, where its numbers are those of others."""
    readlink = os.readlink
    # A process finds out once.
    monkeypatch.setattr(lock_module, "_surroundings", lock_module._surroundings.__wrapped__)
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else readlink(path))
    me = this_process()
    assert (me.boot, me.namespace) == ("", "")
    assert is_dead(me, me) is None


def test_jobs_of_one_number_of_two_clusters_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "blue")
    me = this_process()
    other = replace(me, job="7 of red", restart=0, host="other")
    assert is_dead(other, me) is None
    assert is_dead(replace(other, job=me.job), me) is True


@functools.cache
def why_no_namespaces() -> str | None:
    result = subprocess.run(
        [*unshare(network=False), "true"], capture_output=True, text=True, check=False, timeout=60
    ) if os.path.exists("/proc/self/ns/pid") else None
    return None if result is not None and result.returncode == 0 else "needs the right to make PID namespaces"


@pytest.fixture
def start() -> Iterator[Callable[[Path, bool], subprocess.Popen[str]]]:
    """Starts a process that takes the lock of a folder, in a PID namespace of its own or not."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, contained: bool) -> subprocess.Popen[str]:
        command = [*(unshare(network=False) if contained else []), sys.executable, "-c", HOLD, str(folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline() if process.stdout is not None else ""


@pytest.mark.parametrize("holder_contained", [True, False])
def test_processes_of_containers_see_each_other_by_the_touch(
    tmp_path: Path, start: Callable[[Path, bool], subprocess.Popen[str]], holder_contained: bool
) -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    holder = start(tmp_path, holder_contained)
    assert first_line(holder) == "held\n"
    # In a container numbers begin at 1: two holders have the same number, and each sees a process of that number.
    assert "it is alive" in first_line(start(tmp_path, True))
    if holder_contained:
        with pytest.raises(CheckpointError, match="it is alive"):
            DirectoryLock(str(tmp_path)).acquire()
    holder.kill()
    # A container's process dies with the one that started it: the end of its input would let it give the lock back.
    assert holder.stdout is not None
    assert holder.stdout.read() == ""
    # As after a minute.
    turn_back(tmp_path / LOCK_FILE)
    assert first_line(start(tmp_path, True)) == "held\n"


def test_a_lock_file_of_an_earlier_version_is_judged_by_its_touch(tmp_path: Path) -> None:
    content = asdict(this_process())
    del content["boot"], content["namespace"]
    (tmp_path / LOCK_FILE).write_text(json.dumps(content))
    turn_back(tmp_path / LOCK_FILE)
    with manager(tmp_path) as saving:
        assert saving.save() is not None


def test_a_manager_writes_over_nothing_that_came_while_it_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job saves once more, deletes, and ends while this one waits for the lock."""
    other = manager(tmp_path, max_to_keep=1)
    other.save()
    other.close()
    waiting = manager(tmp_path)
    write_holder(tmp_path, replace(this_process(), host="elsewhere"))

    def nap(_: float) -> None:
        (tmp_path / LOCK_FILE).unlink()
        assert other.save() == str(tmp_path / "ckpt-2.h5")
        other.close()

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", nap)
        with pytest.raises(CheckpointError, match=r"another job saved .* while this one waited"):
            waiting.save()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", LOCK_FILE, "ckpt-2.h5"]
    assert waiting.save() == str(tmp_path / "ckpt-3.h5")
    waiting.close()
    state = read_state(str(tmp_path))
    assert state is not None
    assert [entry.name for entry in state.entries] == ["ckpt-2.h5", "ckpt-3.h5"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-2.h5", "ckpt-3.h5"]


@pytest.fixture
def no_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    number: int = getattr(request, "param", errno.EPERM)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize("no_links", NO_LINKS, indirect=True, ids=errno.errorcode.get)
def test_without_hard_links_one_job_saves_at_a_time(tmp_path: Path) -> None:
    with manager(tmp_path) as saving:
        assert saving.save() == str(tmp_path / "ckpt-1.h5")
        assert json.loads((tmp_path / LOCK_FILE).read_text()) == asdict(this_process())
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.h5"]
    write_holder(tmp_path, parent())
    with pytest.raises(CheckpointError, match="it is alive"):
        saving.save()
    with pytest.raises(CheckpointError, match="it is alive"):
        require_savable(str(tmp_path))
    # One that is dead is replaced, also there.
    write_holder(tmp_path, replace(parent(), started=parent().started + 1))
    require_savable(str(tmp_path))
    with saving:
        assert saving.save() == str(tmp_path / "ckpt-2.h5")
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.h5", "ckpt-2.h5"]


@pytest.mark.usefixtures("no_links")
def test_of_two_that_create_the_lock_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.open

    def be_late(path: str, *arguments: int) -> int:
        write_holder(tmp_path, parent())
        return create(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", be_late)
        with pytest.raises(CheckpointError, match="it is alive"):
            DirectoryLock(str(tmp_path)).acquire()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == asdict(parent())
    assert os.listdir(tmp_path) == [LOCK_FILE]


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize("says", [True, False])
def test_a_file_system_that_only_seems_to_create_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    """An object store may find out when the content is sent, or never: then that of the last writer counts."""
    def sync(_: int) -> None:
        write_holder(tmp_path, parent())
        if says:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        with pytest.raises(CheckpointError, match="it is alive"):
            DirectoryLock(str(tmp_path)).acquire()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == asdict(parent())


@pytest.mark.usefixtures("no_links")
def test_a_lock_that_cannot_be_written_to_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        DirectoryLock(str(tmp_path)).acquire()
    assert os.listdir(tmp_path) == []


def test_an_empty_lock_is_that_of_a_process_that_is_about_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK_FILE).touch()
    mine = DirectoryLock(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: write_holder(tmp_path, parent()))
        with pytest.raises(CheckpointError, match=rf"process {os.getppid()} on .* it is alive"):
            mine.acquire()
    # Or it was killed before that.
    (tmp_path / LOCK_FILE).write_text("")
    turn_back(tmp_path / LOCK_FILE)
    mine.acquire()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == asdict(this_process())
    mine.release()
    assert os.listdir(tmp_path) == []


def test_the_check_of_a_directory_takes_its_lock_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    require_savable(str(folder))
    assert os.listdir(folder) == []
    with manager(folder) as saving:
        saving.save()
        require_savable(str(folder))
        assert (folder / LOCK_FILE).exists()
    assert not (folder / LOCK_FILE).exists()
