"""The rank's side of `mpidist run`: it signs at its start, and leaves a word as its last act.

It is loaded by `import mpidist` where `run` has started the job, and nowhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from mpidist import launch
from mpidist.errors import CollectiveTimeoutError, DeadRankError, LauncherError
from mpidist.failures.exit_code import INTERRUPTED as INTERRUPTED_CODE
from mpidist.failures.exit_code import OBSERVERS, code, is_code_expected, watch_code
from mpidist.failures.restart import notes
from mpidist.failures.restart.notes import VARIABLE, Word, add_line, note, write_word

_SHARED = Path("/dev/shm")


class RestartedRank:
    """This process as a rank of a job that `mpidist run` has started.

    Args:
        folder: The folder of this start.
        rank: The rank, according to the launcher.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._file = folder / f"rank-{rank}"
        self._process = os.getpid()
        self._code = 0
        self._error: BaseException | None = None
        self._has_ended = False
        self._dead: set[str] = set()
        self._is_open = False

    def sign(self) -> bool:
        """Local. Sign; False where a parent of this process has signed for the rank.

        Raises:
            OSError: The folder is not here, or has no room.
        """
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        size = launch.world_size()
        content = {
            "rank": self._rank, "size": size, "process": self._process, "host": socket.gethostname(),
            "namespace": namespace, "time": time.time(),
        }
        try:
            descriptor = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, json.dumps(content).encode() + b"\n")
        finally:
            os.close(descriptor)
        return True

    def on_opened(self) -> None:
        """Local. Note what MPI has mapped in /dev/shm: MPICH leaves it there when the job is killed."""
        add_line(self._file, {"mapped": sorted(mapped_by("self"))})
        if self._rank == 0 and not self._is_open:
            note("opened")
        self._is_open = True

    def on_dead(self, names: Iterable[str]) -> None:
        """Local. Note deaths that this rank has seen: `run` sees those of its own host only.

        Args:
            names: The names of the dead.
        """
        for name in sorted({*names} - self._dead):
            self._dead.add(name)
            note("died", name=name)

    def before_end(self) -> None:
        """Local. Note how the program ends, before mpidist's own end forgets it."""
        if os.getpid() == self._process:
            self._code, self._error = code(), getattr(sys, "last_value", None)

    def on_end(self, code: int, error: BaseException | None, text: str, *, ends_job: bool, hangs: bool) -> None:
        """Local. Leave a word before this process ends.

        Args:
            code: The exit code.
            error: The exception that ends the program, if any.
            text: The printed text of it.
            ends_job: Whether all ranks end, since this one does.
            hangs: Whether the reason is that ranks wait without end: `run` treats that as a death.
        """
        if os.getpid() != self._process or self._has_ended:
            return
        self._has_ended = True
        if hangs:
            note("hung", rank=self._rank)
            return
        if ends_job or self._rank == 0:
            # A rank that others have left behind does not know better: the job has died, or hangs.
            if _is_of_others(error):
                return
            is_interrupted = code == INTERRUPTED_CODE or isinstance(error, KeyboardInterrupt)
            kind = notes.FINISHED if code == 0 else notes.INTERRUPTED if is_interrupted else notes.FAILED
            if ends_job and code == 0:
                kind = notes.FAILED
            self._leave_word(kind, code, text)
        add_line(self._file, {"left": code})

    def after_end(self) -> None:
        """Local. Leave a word after the end of MPI: the last act of a rank that ends with the others."""
        if os.getpid() != self._process or self._has_ended:
            return
        if self._code and not is_code_expected():
            # MPI was not started, or mpidist does not look after the end.
            text = "" if self._error is None else "".join(traceback.format_exception_only(self._error))
            self.on_end(self._code, self._error, text.strip(), ends_job=True, hangs=False)
            return
        self._has_ended = True
        if self._dead:
            # It is ended after a death, in the middle of a call, by a thread that runs the exit functions.
            return
        if self._rank == 0:
            # All ranks have agreed on another code: the job was preempted.
            self._leave_word(notes.PREEMPTED if self._code else notes.FINISHED, self._code, "")
        add_line(self._file, {"left": self._code})

    def _leave_word(self, kind: str, code: int, text: str) -> None:
        with contextlib.suppress(OSError):
            write_word(self._folder, Word(kind, code, self._rank, text, time.time()))


def _is_of_others(error: BaseException | None) -> bool:
    """Whether an error says that others were lost, or do not answer; MPI's own errors may.

    A rank whose launcher dies before MPI has started is alone for Open MPI, which is an error of launchers.
    """
    is_of_mpi = type(error).__module__.startswith("mpi4py")
    is_alone = isinstance(error, LauncherError) and launch.has_lost_launcher()
    return is_of_mpi or is_alone or isinstance(error, (CollectiveTimeoutError, DeadRankError))


def mapped_by(process: int | str) -> set[str]:
    """Local. The names of MPICH's files in /dev/shm that a process has mapped.

    Args:
        process: The number of the process, or "self".
    """
    begin = f"{_SHARED}/mpich_shm_"
    try:
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {Path(line.split()[-1]).name for line in lines if begin in line and not line.endswith("(deleted)")}


def begin() -> None:
    """Local. Sign as a rank, and prepare the word. `import mpidist` calls this before it registers its own end.

    Raises:
        LauncherError: The folder that `mpidist run` has made is not on this host.
    """
    place, folder = launch.read(), Path(os.environ[VARIABLE])
    if place is None or launch.is_multiprocessing_child():
        return
    own = RestartedRank(folder, place.rank)
    try:
        if not own.sign():
            return
    except OSError as error:
        raise LauncherError(
            f"`mpidist run` expects files in {str(folder)!r}, and a rank on {socket.gethostname()} cannot write there: "
            f"{error.strerror or error}. Set MPIDIST_JOB_DIR to a directory that all hosts share, with some free space"
        ) from None
    watch_code()
    # The functions run in reverse order: this one after mpidist's own, which ends MPI.
    atexit.register(own.after_end)
    OBSERVERS.append(own)
    _own.append(own)


_own: list[RestartedRank] = []


def watch_end() -> None:
    """Local. Note the exit code at the end; `import mpidist` calls this after it has registered its own end."""
    for own in _own:
        atexit.register(own.before_end)
