"""The lock of a checkpoint directory: one job at a time saves there, and a restarted job takes over from itself.

A file names the job that saves, and that job touches the file every four seconds. Another job takes the lock over only
if the holder is certainly dead: the same job before a restart, a dead process that this one would see if it were alive,
or a holder that has not touched the file for a minute. A wrong guess would let two jobs write and delete the same
checkpoints.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache

from mpidist.checkpoint.directory.state import LOCK_FILE, replace_file, require_writable
from mpidist.errors import CheckpointError

BEAT_SECONDS = 4.0
DEAD_SECONDS = 60.0
_POLL_SECONDS = 0.5


# The number of locks of this process that hold each file; the last one that is released deletes it.
_holding: Counter[tuple[int, str]] = Counter()


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock.

    Attributes:
        job: Number of the SLURM job; empty outside SLURM.
        restart: Number of restarts of that job.
        host: The host on which the process runs.
        process: The process's number on that host.
        started: Its start, in clock ticks since the start of the host. Numbers are reused: this tells apart the holder
            and a later process with the same number. 0 where the system does not say.
        boot: The start of the host, by a name that the kernel gives it: hosts may have the same name. Empty where the
            system does not say.
        namespace: The PID namespace in which the process has its number, a container's for instance. Empty where the
            system does not say.
    """

    job: str
    restart: int
    host: str
    process: int
    started: int
    # Lock files of earlier versions lack them.
    boot: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        job = f"SLURM job {self.job}, restart {self.restart}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}" if self.host else "a process that has not written its name"


# What a lock file without content says: its process is about to write, or was killed before it did.
_UNNAMED = LockOwner("", 0, "", 0, 0)


def this_process() -> LockOwner:
    """Local. Describe this process as a holder."""
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    job, cluster = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_CLUSTER_NAME", "")
    process = os.getpid()
    boot, namespace = _surroundings(process)
    return LockOwner(
        # Several clusters that share a file system have jobs of the same number.
        job=f"{job} of {cluster}" if job and cluster else job,
        restart=int(restart) if restart.isdecimal() else 0,
        host=socket.gethostname(),
        process=process,
        started=_start_of(process) or 0,
        boot=boot,
        namespace=namespace,
    )


def is_dead(holder: LockOwner, me: LockOwner) -> bool | None:
    """Local. Whether a holder has certainly ended (True) or certainly runs (False); None if it is unknown here."""
    if holder.job and holder.job == me.job and holder.restart != me.restart:
        return holder.restart < me.restart
    # The same number is another process where the host, its start or the PID namespace is another one.
    if not (me.boot and me.namespace) or (holder.host, holder.boot, holder.namespace) != (
        me.host, me.boot, me.namespace
    ):
        return None
    start = _start_of(holder.process)
    if start is None:
        return True
    return start != holder.started if start and holder.started else None


class DirectoryLock:
    """The right of this process to save checkpoints in a directory; several locks of one process share it.

    Args:
        directory: The directory; `acquire` makes it where it is missing.
        name: The name of the lock file.
    """

    def __init__(self, directory: str, name: str = LOCK_FILE) -> None:
        self.path = os.path.join(directory, name)
        # The process, since a child after a fork has nothing; and the file, whose path may be relative.
        self._held: tuple[int, str] | None = None
        self._stop = threading.Event()

    def acquire(self) -> bool:
        """Local. Take the lock, or make sure that this process still has it.

        It waits for up to a minute where the holder is on another host, or in another container, and may be dead.

        Returns:
            Whether this object did not have it before.

        Raises:
            CheckpointError: Another living job has it.
            OSError: The directory cannot be written.
        """
        place = os.getpid(), os.path.realpath(self.path)
        if self._held != place:
            self.release()
        me = this_process()
        begin: float | None = None
        while True:
            holder = _read(self.path)
            if holder == me:
                break
            if holder is None:
                if _create(self.path, me):
                    break
                # Another process was quicker: look which one.
                continue
            if self._held is not None:
                # This process was late to renew the lock, and another job took it for dead. Taking the lock back would
                # have both jobs save by turns.
                raise self._busy(holder, "it has taken over from this job in the meantime")
            begin = self._touched() if begin is None else begin
            dead = self._is_dead(holder, me, begin)
            if dead and self._take_over(holder, me):
                break
            if dead is False:
                raise self._busy(holder, "it is alive")
            time.sleep(_POLL_SECONDS)
        is_new = self._held is None
        if is_new:
            self._held = place
            _holding[place] += 1
            self._stop = threading.Event()
            atexit.register(self.release)
            threading.Thread(target=_beat, args=(place[1], self._stop, me), daemon=True, name="mpidist-lock").start()
        return is_new

    def release(self) -> None:
        """Local. Release the lock; does nothing where it is not held."""
        if self._held is None:
            return
        held, self._held = self._held, None
        self._stop.set()
        atexit.unregister(self.release)
        _holding[held] -= 1
        if _holding[held] > 0:
            return
        del _holding[held]
        # After a fork, or when another job has taken over, the file names another holder: then it stays.
        if _read(held[1]) == this_process():
            with contextlib.suppress(OSError):
                os.unlink(held[1])

    def _take_over(self, holder: LockOwner, me: LockOwner) -> bool:
        """Replace a dead holder; False where another process has done so, or is about to."""
        # One process at a time, by a lock of the lock: two that have both found the holder dead would both replace it.
        claim = DirectoryLock(*os.path.split(f"{self.path}.claim"))
        try:
            claim.acquire()
        except CheckpointError:
            return False
        try:
            if _read(self.path) != holder:
                return False
            # By a rename: a reader, such as a third job, reads the old holder or the new one.
            replace_file(self.path, _encode(me))
            return True
        finally:
            claim.release()

    def _busy(self, holder: LockOwner, why: str) -> CheckpointError:
        return CheckpointError(
            f"another job saves its checkpoints to {os.path.dirname(self.path)!r}: {holder}; {why}. Save to another "
            f"directory, end that job, or delete {self.path!r} if the job is certainly gone"
        )

    def _touched(self) -> float:
        try:
            # `stat` alone may answer from the cache of a network file system; opening makes it ask the server.
            with open(self.path, "rb") as file:
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return 0.0

    def _is_dead(self, holder: LockOwner, me: LockOwner, begin: float) -> bool | None:
        """As `is_dead`, or whether it was silent for a minute (True), or touched the file since `begin` (False)."""
        dead = is_dead(holder, me)
        if dead is not None:
            return dead
        touched = self._touched()
        if touched != begin:
            return False
        # A new file has its time from the file system, as the lock has: the clocks of the hosts differ.
        probe = f"{self.path}.{os.urandom(4).hex()}.tmp"
        with open(probe, "wb") as file:
            now = os.fstat(file.fileno()).st_mtime
        # The holder deletes files that seem to be left by killed jobs.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)
        return True if now - touched > DEAD_SECONDS else None


def require_savable(directory: str) -> None:
    """Local. Make a directory where it is missing, take its lock, and give it back; nothing of that stays.

    Raises:
        CheckpointError: Another living job saves there.
        OSError: No checkpoint can be saved there.
    """
    require_writable(directory)
    lock = DirectoryLock(directory)
    lock.acquire()
    lock.release()


def _beat(path: str, stop: threading.Event, me: LockOwner) -> None:
    while not stop.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            if _read(path) == me:
                os.utime(path)


def _encode(holder: LockOwner) -> bytes:
    return json.dumps(asdict(holder)).encode() + b"\n"


def _create(path: str, me: LockOwner) -> bool:
    """Make the lock file; False if another process was quicker.

    The file is written under another name and then linked: `link` fails if the name exists, on network file systems
    too, and no process ever reads a half-written lock.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(_encode(me))
        try:
            os.link(temporary, path)
        # A quicker process holds the lock by now, and takes the temporary file for that of a killed job.
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError:
            # Object stores, exFAT and CIFS have no links, and each reports it by another number.
            return _create_without_link(path, me)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return True


def _create_without_link(path: str, me: LockOwner) -> bool:
    """Make the lock file by its name; False if another process was quicker.

    For a moment the file is empty: `_read` calls its holder unnamed.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        try:
            os.write(descriptor, _encode(me))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # An object store may detect only now that another process has made the file, which is then kept.
        if error.errno == errno.ESTALE:
            return False
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    # A file system that only seems to create exclusively has the content of the last one.
    return _read(path) == me


def _read(path: str) -> LockOwner | None:
    try:
        with open(path, "rb") as file:
            text = file.read()
        if not text:
            return _UNNAMED
        holder = LockOwner(**json.loads(text))
        if list(map(type, vars(holder).values())) != [str, int, str, int, int, str, str]:
            raise TypeError(f"got {holder!r}")
        return holder
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path!r} is not a valid lock file ({error}). Delete it") from None


@cache
def _surroundings(process: int) -> tuple[str, str]:
    """The start of this host, and the PID namespace of this process, by the kernel's names; empty where unknown.

    They stay as they are; a child after a fork has another number, by which it finds out again.
    """
    try:
        # Where /proc is that of another PID namespace, what it says of a number is about another process.
        if os.readlink("/proc/self") != str(process):
            return "", ""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):
        return "", ""


def _start_of(process: int) -> int | None:
    """The start of a process of this PID namespace; None if it has ended, 0 where the system does not say."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it is alive and belongs to another user
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    # See proc(5): the state is field 3, the start is field 22.
    return None if fields[0] == "Z" else int(fields[19])
