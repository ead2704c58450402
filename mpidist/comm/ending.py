"""The end of a job: one rank fails, some rank dies, or all ranks leave together.

- A rank fails: its traceback is printed once and whole, and every rank stops. With MPI alone the others would wait for
  ever.
- A rank dies, and the launcher lets the others live: they end with an error that names it. Nothing collective is done
  any more, MPI is not finalized, and the program's exit functions run before the process ends.
- All ranks come to their end: they wait for each other, and mpi4py finalizes MPI.

`MPIDIST_ABORT=0` in the environment of any rank switches all of this off, for all of them.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import inspect
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from mpidist.comm.deaths import WATCH, describe
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
# After a death the program's own thread has so long to find out and to raise an error, where it can be caught. Then a
# thread of ours ends the process: the program's thread may be in a call of MPI that never returns.
DISCOVERY_SECONDS = 3.0
# An error that was raised for a death may be handled for so long.
HANDLING_SECONDS = 60.0
# Exit functions may take so long after a death.
EXIT_SECONDS = 4.0


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
        is_finalized: Callable[[], bool],
    ) -> None:
        self.place = f"rank {rank} of {size} on {host}"
        self.rank = rank
        self.size = size
        self.abort = abort
        self.is_finalized = is_finalized
        # A forked child inherits the hooks but must not call MPI.
        self.process = os.getpid()
        self.previous_hook = sys.excepthook
        self.code: int | None = None
        self.watched: weakref.ref[_Exit] | None = None
        self.tolerates_deaths = False
        # After a death: the program's own thread ends the process, or a thread of ours does.
        self.ends_itself = False
        self.survivor_ends = False

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an uncaught exception and end the job; after a death, end this process alone."""
        if os.getpid() != self.process:
            self.previous_hook(kind, error, trace)
            return
        if WATCH.learn(error) or self.tolerates_deaths:
            self.ends_itself = True
            if WATCH.dead:
                # A rank that has failed and printed why ends before the launcher ends the others: they stay silent.
                time.sleep(TURN_SECONDS)
            text = self._traceback(kind, error, trace)
            why = f"cannot go on: {describe(WATCH.dead.values())}" if WATCH.dead else "failed, and ends alone"
            self._print(f"{self.place} {why}\n{text}")
            # `at_exit` ends the process, after the program's exit functions.
            self.code = 1
            end_later(HANDLING_SECONDS)
            return
        if isinstance(error, KeyboardInterrupt):
            self._end(130, "interrupted" if self.rank == 0 else "")
        if self.rank != 0:
            time.sleep(GRACE_SECONDS if is_shared(error) else TURN_SECONDS * (1 + self.rank / self.size))
        self._end(1, f"{self.place} failed, the job ends\n{self._traceback(kind, error, trace)}")

    def _traceback(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
        """The text of an exception; empty where a hook of the user's prints it."""
        if self.previous_hook is sys.__excepthook__:
            return "".join(traceback.format_exception(kind, error, trace))
        self.previous_hook(kind, error, trace)
        return ""

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
        if os.getpid() != self.process or self.is_finalized() or self.survivor_ends:
            # Where the program has finalized MPI itself, no rank can wait for this one any more.
            return
        WATCH.ignore_notices()
        mourns = not self.ends_itself and not self.tolerates_deaths
        self.ends_itself = True
        if not WATCH.dead:
            if self.code and self.tolerates_deaths:
                self.end_process(self.code)
            if self.code:
                self._end(self.code, f"{self.place} exited with {self.code}, the job ends")
            if leave_together([one.mpi for one in list(_farewells.values())], self.place):
                # Whoever ends from now on has taken leave.
                WATCH.stop()
                return
        if mourns:
            time.sleep(TURN_SECONDS)
            self._print(f"{self.place} has come to its end without other ranks: {describe(WATCH.dead.values())}")
            self.code = self.code or 1
        self.end_process(self.code or 0)

    def on_death(self) -> None:
        """End this process if its own thread does not: it may be in a call of MPI that never returns.

        Called in a thread of our own.
        """
        time.sleep(DISCOVERY_SECONDS)
        if WATCH.was_raised:
            time.sleep(HANDLING_SECONDS)
        if not self.ends_itself and not self.tolerates_deaths:
            self.survivor_ends = True
            frames = sys._current_frames()  # noqa: SLF001 - documented; private only to say "for debuggers"
            stack = "".join(traceback.format_stack(frames.get(threading.main_thread().ident or 0)))
            self._print(f"{self.place} cannot go on: {describe(WATCH.dead.values())}\nThis rank was here:\n{stack}")
            end_later(EXIT_SECONDS)
            # The program's exit functions: the thread that should run them cannot.
            atexit._run_exitfuncs()  # noqa: SLF001 - there is no public way
            self.end_process(1)

    def end_process(self, code: int) -> None:
        """End this process without MPI_Finalize, which would wait for the dead for ever."""
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        time.sleep(FORWARD_SECONDS)
        os._exit(code)

    def _end(self, code: int, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if text:
            self._print(text)
            time.sleep(FORWARD_SECONDS)
        if not self.is_finalized():
            self.abort(code)

    def _print(self, text: str) -> None:
        # One system call, so that the lines of several ranks do not mix.
        os.write(2, f"mpidist: {text}".rstrip("\n").encode(errors="replace") + b"\n")


def end_later(seconds: float) -> None:
    """Local. End this process after a time, whatever it does: after a death an exit function may never return."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


class Farewell:
    """The promise of some ranks to leave the program together. It ends with this object, on all of them alike.

    Args:
        mpi: An MPI communicator that is used for no other collective operation.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        # By number, and not in a set: all ranks must go through the farewells in the order of their creation.
        _farewells[next(_numbers)] = self


_numbers = itertools.count()
_farewells: weakref.WeakValueDictionary[int, Farewell] = weakref.WeakValueDictionary()


def leave_together(communicators: Sequence[Any], place: str) -> bool:
    """Collective. Wait for the other ranks before MPI is finalized, without spinning; a long wait is explained.

    Args:
        communicators: MPI communicators that are used for no other collective operation.
        place: This rank, for messages.

    Returns:
        False if another rank has died instead.
    """
    # MPI_Finalize may wait for the other ranks, and MPI libraries spin there: this rank would take a core from them.
    begin = time.monotonic()
    explained = False
    pause = 1e-4
    died = None
    try:
        waiting = [communicator.Ibarrier() for communicator in communicators]
        while waiting := [request for request in waiting if not request.Test()]:
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
            now = time.monotonic()
            if WATCH.dead:
                # A rank whose farewell is complete may end before this rank sees that its own is.
                died = died or now
                if now - died > DISCOVERY_SECONDS:
                    return False
            if not explained and now - begin > EXPLAIN_SECONDS:
                explained = True
                os.write(
                    2,
                    f"mpidist: {place} has come to its end and still waits for other ranks. If they wait for this rank "
                    "in a collective call, the ranks have made different calls; `py-spy dump` shows where they "
                    "are\n".encode(),
                )
    except Exception as error:
        # Open MPI with fault tolerance reports a death where it is asked about messages.
        if WATCH.learn(error):
            return False
        raise
    return True


_installed: list[_Ending] = []


def is_switched_off() -> bool:
    """Local. Whether this rank's environment asks for no hooks."""
    return os.environ.get("MPIDIST_ABORT") == "0"


def install(
    rank: int,
    size: int,
    host: str,
    abort: Callable[[int], None],
    is_finalized: Callable[[], bool],
    ask_mpi: Callable[[BaseException], Sequence[str]],
) -> None:
    """Local. Hook into exceptions and exits of this process. Calls after the first one change nothing.

    Args:
        rank: This process's rank, for the texts.
        size: Number of ranks.
        host: Name of the host.
        abort: Ends all ranks: `MPI.COMM_WORLD.Abort`.
        is_finalized: Returns whether the program has finalized MPI itself.
        ask_mpi: Returns the names of ranks whose death an error of MPI reports.
    """
    if _installed:
        return
    ending = _Ending(rank, size, host, abort, is_finalized)
    _installed.append(ending)
    WATCH.start(ending.on_death, ask_mpi)
    sys.excepthook = ending.on_exception
    # `raise SystemExit(1)` does not pass through these: such a rank waits for the others in `at_exit`, and explains it.
    sys.exit = ending.exit  # type: ignore[assignment]  # typeshed: NoReturn; ours always raises
    for name in ("exit", "quit"):
        setattr(builtins, name, ending.exit)


def tolerate_deaths() -> None:
    """Local. Let this rank live when another one dies, and end alone when it fails: a rank that serves, or coordinates.

    The rank looks for deaths itself (`deaths.WATCH.lost`), and communicates only in groups whose ranks are alive.
    """
    for ending in _installed:
        ending.tolerates_deaths = True


def leave() -> None:
    """Collective. The end of the program; called by the exit function that `import mpidist` registers."""
    for ending in _installed:
        ending.at_exit()
