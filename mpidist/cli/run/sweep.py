"""The rest of a job on this host: its processes, what its ranks had mapped in /dev/shm, and its copies in memory.

`run` imports this on its own host. On other hosts it is a program of its own, of the standard library alone, which
starts in a few hundredths of a second: `python sweep.py FOLDER`, at the end of the run with the word `end` after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# As in `failures/restart/notes.py`, which this program cannot import.
VARIABLE = "MPIDIST_RUN"
SHARED = Path("/dev/shm")
# As in `checkpoint/memory/place.py`: the names of the directories of copies, and of the folders of runs.
_COPIES, _RUNS = "mpidist-copies-", ".mpidist-run-"
# The variable that names a directory in memory instead of `SHARED`.
_MEMORY_VARIABLE = "MPIDIST_SHARED_MEMORY"
_NAMES = re.compile(r"mpich_shm_[0-9a-f]+_[0-9]+")
# Processes that end by themselves have this time, those that were killed the longer one: a process that waits for a
# disk or a file server ends when that answers.
_GRACE_SECONDS, _END_SECONDS = 0.5, 20.0
_PAUSE_SECONDS = 0.005
# What a host prints when nothing of the job is left on it.
CLEAN = "mpidist-host-is-clean"
# ... and when it does not see the folder of the run.
BLIND = "mpidist-host-sees-no-folder"


def processes_of(folder: Path) -> set[int]:
    """Local. The processes of a start that live on this host, by the environment with which they began.

    Args:
        folder: The folder of the start.
    """
    setting = f"{VARIABLE}={folder}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting in (path / "environ").read_bytes().split(b"\0") and _is_alive(int(path.name)):
                found.add(int(path.name))
    return found - {os.getpid()}


def children_of(process: int) -> set[int]:
    """Local. The processes that a process has started, and those that these have started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    news = {process}
    while news:
        news = {child for child, parent in parents.items() if parent in news} - found
        found |= news
    return found


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end_processes(folder: Path, *, owns_children: bool = False) -> bool:
    """Local. End what is left of a start on this host, and wait until it is gone.

    Args:
        folder: The folder of the start.
        owns_children: Whether all children of this process belong to it, too.

    Returns:
        False if a process does not end.
    """
    begin = time.monotonic()
    while True:
        children = children_of(os.getpid()) if owns_children else set()
        for child in children:
            # A process whose parent has ended became a child of this one.
            with contextlib.suppress(OSError):
                os.waitpid(child, os.WNOHANG)
        left = {one for one in children if _is_alive(one)} | processes_of(folder)
        passed = time.monotonic() - begin
        if not left or passed > _END_SECONDS:
            return not left
        if passed > _GRACE_SECONDS:
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


def names_noted(folder: Path, host: str) -> set[str]:
    """Local. The files in /dev/shm that the ranks of a host have noted.

    Args:
        folder: The folder of the start.
        host: The name of the host.
    """
    found: set[str] = set()
    for path in folder.glob("rank-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            first, *others = [json.loads(line) for line in path.read_text().splitlines()]
            if first["host"] == host:
                found.update(name for line in others for name in line.get("mapped", ()))
    return found


def remove_files(names: Iterable[str], shared: Path = SHARED) -> list[str]:
    """Local. Remove files of MPICH that a dead job had mapped; one that a process still has mapped stays.

    Args:
        names: Their names.
        shared: The folder in which they are.

    Returns:
        The names of the removed files.
    """
    names = {name for name in names if _NAMES.fullmatch(name) and (shared / name).exists()}
    if not names:
        return []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="replace")
            names -= {name for name in names if f"{shared / name}\n" in text}
    removed = []
    for name in sorted(names):
        with contextlib.suppress(OSError):
            if (shared / name).lstat().st_uid == os.getuid():
                (shared / name).unlink()
                removed.append(name)
    return removed


def remove_copies(run: Path) -> None:
    """Local. Remove the copies in the memory of this host that the ranks of a run have made.

    Args:
        run: The folder of the run.
    """
    shutil.rmtree(_memory() / f"{_COPIES}{run.name.removeprefix(_RUNS)}", ignore_errors=True)


def remove_stale_copies() -> list[str]:
    """Local. Remove copies that dead runs of this user have left here. Returns the names of their directories."""
    removed = []
    for path in _memory().glob(f"{_COPIES}*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if path.lstat().st_uid == os.getuid() and _is_of_dead(json.loads((path / "run").read_text())):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path.name)
    return removed


def _is_of_dead(run: dict[str, str]) -> bool:
    """Whether the run that a note describes has ended; where this process cannot know, it has not."""
    if run["namespace"] != os.readlink("/proc/self/ns/pid"):
        return False
    folder = Path(run["folder"])
    begin = f"{VARIABLE}={folder}/".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if begin in (path / "environ").read_bytes() and _is_alive(int(path.name)):
                return False
    if not folder.exists():
        return True
    # On other hosts the lock may not be seen.
    return folder.name.startswith(f"{_RUNS}{socket.gethostname()}-") and is_unlocked(folder / "lock")


def is_unlocked(path: Path) -> bool:
    """Local. Whether no process holds the lock of a file.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _memory() -> Path:
    return Path(os.environ.get(_MEMORY_VARIABLE, "") or SHARED)


def main(folder: Path, *, is_end: bool = False) -> int:
    """Local. Clean this host; prints `CLEAN` and the name of the host when it is done."""
    if not folder.parent.exists():
        sys.stdout.write(f"{BLIND} {socket.gethostname()}\n")
        return 1
    if not end_processes(folder):
        return 1
    remove_files(names_noted(folder, socket.gethostname()))
    remove_stale_copies()
    if is_end:
        remove_copies(folder.parent)
    sys.stdout.write(f"{CLEAN} {socket.gethostname()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), is_end="end" in sys.argv[2:]))
