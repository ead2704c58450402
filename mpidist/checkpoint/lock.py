"""The lock of a checkpoint directory: one job at a time saves there, and a restarted job takes over from itself.

A file names the job that saves, and is touched again and again while that job lives. Who finds the file of a job that
is dead for sure (the same job before a restart, a dead process of this host, nothing touched for a minute) takes it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass

from mpidist.checkpoint.directory import replace_file
from mpidist.errors import CheckpointError

LOCK_FILE = "checkpoint.lock"
BEAT_SECONDS = 10.0
DEAD_SECONDS = 60.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        job: Number of the SLURM job; empty outside SLURM.
        restart: How often that job was restarted.
        host: Where the process runs that writes.
        process: Its number there.
        started: When it was started, in clock ticks since the host was; tells processes of the same number apart.
    """

    job: str
    restart: int
    host: str
    process: int
    started: int

    def __str__(self) -> str:
        job = f"SLURM job {self.job}, restart {self.restart}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}"


def this_process() -> Holder:
    """Local. This process as a holder."""
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    return Holder(
        job=os.environ.get("SLURM_JOB_ID", ""),
        restart=int(restart) if restart.isdecimal() else 0,
        host=socket.gethostname(),
        process=os.getpid(),
        started=_start_of(os.getpid()) or 0,
    )


def is_dead(holder: Holder, me: Holder) -> bool | None:
    """Local. Whether a holder has certainly ended (True) or certainly runs (False); None where only time can tell."""
    if holder.job and holder.job == me.job and holder.restart != me.restart:
        return holder.restart < me.restart
    if holder.host != me.host:
        return None
    return _start_of(holder.process) != holder.started


class DirectoryLock:
    """The right to save checkpoints in a directory; of this process, however many locks of it there are.

    Args:
        directory: It need not exist before `acquire`.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, LOCK_FILE)
        self._holds = False
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Local. Take the lock, or make sure that this process still has it.

        Raises:
            CheckpointError: Another job that lives has it.
            OSError: The directory cannot be written.
        """
        me = this_process()
        begin = self._touched()
        while True:
            holder = _read(self.path)
            if holder == me:
                break
            if holder is None:
                if _create(self.path, me):
                    break
                continue
            if self._holds:
                raise self._busy(holder, "it has taken over from this job meanwhile")
            dead = is_dead(holder, me)
            if dead is None:
                dead = self._has_gone_silent(begin)
            if dead:
                replace_file(self.path, _encode(me))
                break
            if dead is False:
                raise self._busy(holder, "it is alive")
            time.sleep(_POLL_SECONDS)
        if not self._holds:
            self._holds = True
            self._stop = threading.Event()
            atexit.register(self.release)
            threading.Thread(target=self._beat, args=(self._stop, me), daemon=True, name="mpidist-lock").start()

    def release(self) -> None:
        """Local. Give the lock back; harmless when it is not held."""
        if not self._holds:
            return
        self._holds = False
        self._stop.set()
        atexit.unregister(self.release)
        # Unequal after a fork, and when another job has taken over.
        if _read(self.path) == this_process():
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _busy(self, holder: Holder, why: str) -> CheckpointError:
        return CheckpointError(
            f"{os.path.dirname(self.path)!r} is where another job saves its checkpoints: {holder}; {why}. Save to "
            f"another directory, end that job, or delete {self.path!r} if it is certainly gone"
        )

    def _touched(self) -> float:
        try:
            # Opening makes a network file system ask its server.
            with open(self.path, "rb") as file:
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return 0.0

    def _has_gone_silent(self, begin: float) -> bool | None:
        """True: silent for long; False: heard since `begin`; None: wait."""
        touched = self._touched()
        if touched != begin:
            return False
        # The file system's own clock: hosts' clocks differ.
        probe = f"{self.path}.{secrets.token_hex(4)}.tmp"
        with open(probe, "wb") as file:
            now = os.fstat(file.fileno()).st_mtime
        os.unlink(probe)
        return True if now - touched > DEAD_SECONDS else None

    def _beat(self, stop: threading.Event, me: Holder) -> None:
        while not stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                if _read(self.path) == me:
                    os.utime(self.path)


def _encode(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode() + b"\n"


def _create(path: str, me: Holder) -> bool:
    """Make the lock file, whole from the first moment; False if another was quicker."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    with open(temporary, "wb") as file:
        file.write(_encode(me))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def _read(path: str) -> Holder | None:
    try:
        with open(path, "rb") as file:
            return Holder(**json.loads(file.read()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path!r} cannot be understood as a lock ({error}); delete it") from None


def _start_of(process: int) -> int | None:
    """When a process of this host was started; None if it has ended, 0 where the system does not say."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it lives, under another user
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    # See proc(5): the state is field 3, the start is field 22.
    return None if fields[0] == "Z" else int(fields[19])
