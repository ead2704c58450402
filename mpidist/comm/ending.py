"""The end of a job in which one rank fails: the traceback is printed once and whole, and every rank stops.

With MPI alone the other ranks would wait forever. `MPIDIST_ABORT=0` in the environment switches this off.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import inspect
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mpidist.errors import is_shared

# Where all ranks raise the same error, rank 0 prints it. The others wait so long for rank 0 to end the job, and then do
# it themselves.
GRACE_SECONDS = 5.0
# MPICH's launcher Hydra was seen to drop output written just before an abort: a rank waits so long after its last line.
FORWARD_SECONDS = 0.3
# A mistake in the program often raises on every rank. Rank 0 prints first and ends the job; the other ranks wait one to
# two times this long, in the order of ranks, so that most of them print nothing.
TURN_SECONDS = 1.0
# A rank that has ended and still waits for other ranks after so long prints a line: they may wait for this rank in a
# collective call.
EXPLAIN_SECONDS = 30.0


class _Exit(SystemExit):
    """The SystemExit that our `sys.exit` raises. Unlike SystemExit itself it can have a weak reference."""


class _Ending:
    """The hooks of one process; see `install`."""

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        abort: Callable[[int], None],
        farewell: Any,
        is_finalized: Callable[[], bool],
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.abort = abort
        self.farewell = farewell
        self.is_finalized = is_finalized
        # A forked child inherits the hooks but must not call MPI.
        self.process = os.getpid()
        self.previous_hook = sys.excepthook
        self.code: int | None = None
        self.watched: weakref.ref[_Exit] | None = None

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an uncaught exception and end the job."""
        if os.getpid() != self.process:
            self.previous_hook(kind, error, trace)
            return
        if isinstance(error, KeyboardInterrupt):
            self._end(130, "interrupted" if self.rank == 0 else "")
        if self.rank != 0:
            time.sleep(GRACE_SECONDS if is_shared(error) else TURN_SECONDS * (1 + self.rank / self.size))
        if self.previous_hook is sys.__excepthook__:
            text = "".join(traceback.format_exception(kind, error, trace))
        else:
            self.previous_hook(kind, error, trace)
            text = ""
        self._end(1, f"rank {self.rank} of {self.size} on {self.host} failed, the job ends\n{text}")

    def exit(self, code: object = None) -> None:
        """Replace `sys.exit`, and find out whether the exception ends the program or is caught."""
        if code is None or code == 0:
            raise SystemExit(code)
        # The exception is made in another function. A local variable here would keep it alive: its traceback holds
        # this frame.
        raise self._watched_exit(code)

    def _watched_exit(self, code: object) -> _Exit:
        error = _Exit(code)
        number = code if isinstance(code, int) else 1
        self.watched = weakref.ref(error, functools.partial(self._on_exit_freed, number))
        return error

    def _on_exit_freed(self, code: int, _: object) -> None:
        # CPython frees an uncaught SystemExit after the last frame is gone and before atexit runs. A caught one is
        # freed while the code that caught it still runs: that frame is then the caller of this one.
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            self.code = code

    def at_exit(self) -> None:
        """Leave together with the other ranks, or end the job if this rank leaves with an exit code."""
        if os.getpid() != self.process or self.is_finalized():
            # Where the program has finalized MPI itself, no rank can wait for this one any more.
            return
        if self.code:
            place = f"rank {self.rank} of {self.size} on {self.host}"
            self._end(self.code, f"{place} exited with {self.code}, the job ends")
        leave_together(self.farewell, self.rank, self.size, self.host)

    def _end(self, code: int, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if text:
            # One system call, so that the lines of several ranks do not mix.
            os.write(2, f"mpidist: {text}\n".encode(errors="replace"))
            time.sleep(FORWARD_SECONDS)
        if not self.is_finalized():
            self.abort(code)


def leave_together(farewell: Any, rank: int, size: int, host: str) -> None:
    """Collective. Wait for the other ranks before MPI is finalized, without spinning; a long wait is explained.

    Args:
        farewell: An MPI communicator used for nothing else.
        rank: This process's rank.
        size: Number of ranks.
        host: Name of the host.
    """
    # MPI_Finalize may wait for the other ranks, and MPI libraries spin there: this rank would take a core from them.
    request = farewell.Ibarrier()
    begin = time.monotonic()
    explained = False
    pause = 1e-4
    while not request.Test():
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
        if not explained and time.monotonic() - begin > EXPLAIN_SECONDS:
            explained = True
            os.write(
                2,
                f"mpidist: rank {rank} of {size} on {host} has come to its end and still waits for other ranks. If "
                "they wait for this rank in a collective call, the ranks have made different calls; `py-spy dump` "
                "shows where they are\n".encode(),
            )


_installed: list[_Ending] = []


def install(
    rank: int,
    size: int,
    host: str,
    abort: Callable[[int], None],
    farewell: Any,
    is_finalized: Callable[[], bool],
) -> None:
    """Local. Hook into exceptions and exits of this process. Calls after the first one change nothing.

    Args:
        rank: This process's rank, for the texts.
        size: Number of ranks.
        host: Name of the host.
        abort: Ends all ranks: `MPI.COMM_WORLD.Abort`.
        farewell: An MPI communicator used for nothing else.
        is_finalized: Returns whether the program has finalized MPI itself.
    """
    if _installed or os.environ.get("MPIDIST_ABORT") == "0":
        return
    ending = _Ending(rank, size, host, abort, farewell, is_finalized)
    _installed.append(ending)
    sys.excepthook = ending.on_exception
    # `raise SystemExit(1)` does not pass through these: such a rank waits for the others in `at_exit`, and explains it.
    sys.exit = ending.exit  # type: ignore[assignment]  # typeshed: NoReturn; ours always raises
    for name in ("exit", "quit"):
        setattr(builtins, name, ending.exit)
    atexit.register(ending.at_exit)
