"""The end of a job: one rank fails, some rank dies, or all ranks end together.

- A rank fails: its traceback is printed once and whole, and every rank stops. With MPI alone the others would hang.
- A rank dies, and the launcher does not end the others: they end with an error that names the dead rank, which one rank
  of each host prints in a job of more than eight. They make no further collective calls, MPI is not finalized, and the
  program's exit functions run before the process ends.
- All ranks end: they wait for each other, and MPI is finalized.

`MPIDIST_ABORT=0` in the environment of any rank switches all of this off on all ranks.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import inspect
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable
from types import TracebackType

from mpidist.errors import is_interrupt, is_shared
from mpidist.failures.deaths import DISCOVERY_SECONDS, WATCH, Process, describe
from mpidist.failures.exit_code import (
    INTERRUPTED,
    end_later,
    expect_code,
    forget,
    number_of,
    tell_dead,
    tell_end,
    was_left,
)
from mpidist.failures.exit_code import code as code_of_program
from mpidist.failures.farewell import BEFORE_ABORT, FAREWELLS, LAST, await_survivors, leave_together
from mpidist.failures.farewell import MpiFunctions as MpiFunctions
from mpidist.failures.interrupts import INTERRUPTS
from mpidist.failures.launcher_socket import LauncherSocket
from mpidist.failures.startup.names import Speaker
from mpidist.failures.watchdog import WATCHDOG
from mpidist.observe.output import flush, say
from mpidist.observe.trace import TRACE
from mpidist.recorder.time_limits import limit_seconds, warn_seconds

# Where all ranks raise the same error, rank 0 prints it and ends the job. After this time another rank does so.
GRACE_SECONDS = 5.0
# Pause after a rank's last line: MPICH's launcher Hydra was seen to drop output written just before an abort.
FORWARD_SECONDS = 0.3
# A mistake in the program often raises on every rank. Rank 0 prints first and ends the job; the other ranks wait one to
# two times this long, in the order of ranks, so that most of them print nothing.
TURN_SECONDS = 1.0
# Time for ranks to end themselves when they wait for a rank that has left a call in the middle, and ended.
LEFT_SECONDS = 5.0
LATER_SECONDS = 4.0  # for the first rank that ends to end the job, before another one does so
HANDLING_SECONDS = 60.0  # for the program to handle an error that reports a death
EXIT_SECONDS = 4.0  # for exit functions after a death


class _Exit(SystemExit):
    """The SystemExit that mpidist's `sys.exit` raises. Unlike SystemExit itself it can have a weak reference."""


class _Ending:
    """The hooks of one process; see `install`."""

    def __init__(self, rank: int, size: int, host: str, mpi: MpiFunctions) -> None:
        self.place = f"rank {rank} of {size} on {host}"
        self.rank, self.size = rank, size
        self.abort, self.is_finalized, self.finalize = mpi.abort, mpi.is_finalized, mpi.finalize
        # A forked child inherits the hooks but must not call MPI.
        self.process = os.getpid()
        self.launcher_socket = LauncherSocket()
        self.previous_hook = sys.excepthook
        self.code: int | None = None
        self.watched: weakref.ref[_Exit] | None = None
        self.tolerates_deaths = self.leads = self.is_agreed = self.launcher_lets_live = False
        # After a death: the program's own thread ends the process, or a background thread does.
        self.ends_itself = self.survivor_ends = False
        self.has_explained = self.has_failed = self.stands_apart = False
        self.speaker = Speaker("death", size)

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an uncaught exception and end the job; after a death, end this process alone."""
        if os.getpid() != self.process:
            self.code = INTERRUPTED if is_interrupt(error) else 1
            self.previous_hook(kind, error, trace)
            return
        if self.stands_apart and not is_interrupt(error) and not WATCH.learn(error):
            say(f"{self.place} failed; the training continues\n{self._traceback(kind, error, trace)}")
            self.code, self.has_failed = 1, True
            return
        if WATCH.learn(error) or self.tolerates_deaths:
            self.ends_itself = True
            mourned = self.mourned()
            if mourned:
                # If another rank has failed and printed its error, the launcher ends this one before it prints.
                time.sleep(TURN_SECONDS)
            if not mourned or self.speaker.is_here(WATCHDOG.page, WATCHDOG.peers()):
                end = "the job ends" if self.leads and not WATCH.dead else "and ends alone"
                why = f"cannot continue: {describe(mourned)}" if mourned else f"failed, {end}"
                say(f"{self.place} {why}\n{self._traceback(kind, error, trace)}")
            # `at_exit` ends the process, after the program's exit functions.
            self.code, self.has_failed = INTERRUPTED if is_interrupt(error) else 1, True
            end_later(HANDLING_SECONDS)
            return
        if is_interrupt(error):
            # The rank that ends the job reports this; rank 0 is first.
            time.sleep(TURN_SECONDS if self.rank else 0)
            self._end(INTERRUPTED, "interrupted", error)
            return  # MPICH's abort may return before its launcher ends this process
        if self.rank != 0:
            # Ranks proceed in their order; the first one ends the job.
            turn = TURN_SECONDS * (1 + self.rank / self.size)
            time.sleep(GRACE_SECONDS + turn if is_shared(error) else turn)
        self._end(1, f"{self.place} failed, the job ends\n{self._traceback(kind, error, trace)}", error)

    def mourned(self) -> list[str]:
        """The names of the dead that this rank cannot continue without."""
        dead = [name for one, name in WATCH.dead.copy().items() if not self.tolerates_deaths or one in WATCH.needed]
        tell_dead(dead)
        return dead

    def _traceback(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
        """The text of an exception; empty where a hook of the user's prints it."""
        if self.previous_hook is sys.__excepthook__:
            return "".join(traceback.format_exception(kind, error, trace))
        self.previous_hook(kind, error, trace)
        return ""

    def exit(self, code: object = None) -> None:
        """Replace `sys.exit`, and find out whether the exception ends the program or is caught."""
        # Made in another function: a local variable here would keep it alive, since its traceback holds this frame.
        raise self._watched_exit(code)

    def _watched_exit(self, code: object) -> _Exit:
        error = _Exit(code)
        # The parent of this process sees the code 256 as 0: such a rank ends in good order.
        self.watched = weakref.ref(error, functools.partial(self._on_exit_freed, number_of(code)))
        return error

    def _on_exit_freed(self, code: int, _: object) -> None:
        # CPython frees an uncaught SystemExit after the last frame is gone and before atexit runs. A caught one is
        # freed while the code that caught it still runs: that frame is then the caller of this one.
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            self.code = code

    def _take_kept_code(self) -> None:
        # An uncaught exit may stay alive: asyncio keeps it in the task that raised it.
        kept = None if self.watched is None else self.watched()
        if self.code is None and kept is not None and was_left():
            self.code = number_of(kept.code)

    def at_exit(self) -> None:
        """End together with the other ranks, or end the job if this rank ends with an exit code."""
        self._take_kept_code()
        if self.is_finalized() or self.survivor_ends:
            return  # after the program has finalized MPI itself, no rank can wait for this one
        if os.getpid() != self.process:
            self.end_process(self.code or 0)  # mpi4py would finalize the MPI of this child's parent
        WATCH.ignore_notices()
        mourns = not self.ends_itself and not self.tolerates_deaths
        self.ends_itself = True
        if not WATCH.dead:
            ends_alone = self.tolerates_deaths and not self.leads and not self.stands_apart
            if not self.is_agreed and self.code and ends_alone:
                self.end_process(self.code)
            # A code that all ranks have agreed on does not end the job: every rank ends by itself.
            if self.code and not self.is_agreed and not self.stands_apart:
                self._end(self.code, "" if self.has_failed else f"{self.place} exited with {self.code}, the job ends")
            INTERRUPTS.show_calls()
            if leave_together(list(FAREWELLS.values()), self.wait_at_end):
                for difference in INTERRUPTS.differences():
                    self._end(1, f"{self.place} has ended, but results are wrong: {difference}")
                # A rank that ends from now on has notified the others.
                WATCH.stop()
                for last in LAST:
                    last()
                # mpi4py would end MPI after the last exit function, where no thread runs that could detect a death.
                self.end_mpi()
                return
        if mourns:
            self._end_without_others()
        self.end_process(self.known_code())

    def _end_without_others(self) -> None:
        time.sleep(TURN_SECONDS)
        if self.speaker.is_here(WATCHDOG.page, WATCHDOG.peers()):
            say(f"{self.place} has ended without other ranks: {describe(WATCH.dead.values())}")
        self.code = self.code or 1

    def known_code(self) -> int:
        """The code with which this process ends."""
        return code_of_program() if self.code is None else number_of(self.code)

    def end_mpi(self) -> None:
        """End MPI, and this process alone if a rank dies meanwhile: MPI_Finalize would wait for it without end."""
        if WATCH.gone:
            self.end_process(self.known_code())
        if any(thread.daemon and not thread.name.startswith("mpidist") for thread in threading.enumerate()):
            # A daemon thread may call MPI until the interpreter has stopped it; mpi4py ends MPI after that.
            return
        done = threading.Event()
        threading.Thread(target=self._watch_end_of_mpi, args=(done,), name="mpidist-end", daemon=True).start()
        self.finalize()
        done.set()
        if self.is_finalized():
            self.launcher_socket.close(lets_live=self.launcher_lets_live)

    def _watch_end_of_mpi(self, done: threading.Event) -> None:
        while not done.wait(TURN_SECONDS):
            # The kernel has reported most ends; only of the other processes are files in `/proc` read.
            gone = [peer for peer in WATCHDOG.peers() if WATCH.may_have_ended(peer.key)]
            dead = [peer.name for peer in gone if peer.has_died_at_end()]
            # MPI may detect the death, and return.
            if dead and not done.wait(DISCOVERY_SECONDS):
                say(f"{self.place} leaves MPI_Finalize: {', '.join(dead)} died in it, after the end of the program")
                tell_dead(dead)
                self.end_process(1, leaves_dead=True)

    def wait_at_end(self, seconds: float) -> None:
        """Report once why this rank waits at its end, or end the job.

        Args:
            seconds: Seconds that this rank has waited.
        """
        limit, place = limit_seconds(), f"{self.place} has ended"
        if seconds > LEFT_SECONDS and (why := INTERRUPTS.why_awaited()):
            self._end(1, f"{place}, other ranks still wait for it, the job ends: {why}", hangs=True)
        if self.stands_apart:
            return
        # The lowest rank that waits reports and ends the job. Another rank does so if the job has not ended then.
        if limit and seconds > limit + (0 if WATCHDOG.is_first_to_end() else LATER_SECONDS):
            text = f"{place} and has waited {limit:g} s for other ranks, the job ends{WATCHDOG.tell_late()}"
            self._end(1, text, hangs=True)
        if not self.has_explained and seconds > warn_seconds() and WATCHDOG.is_first_to_end():
            self.has_explained = True
            say(
                f"{place} and still waits for other ranks. If they wait for this rank in a collective call, the ranks "
                f"have made different calls{WATCHDOG.tell_late()}"
            )

    def on_death(self) -> None:
        """End this process, in a background thread: its own one may be in a call of MPI that never returns."""
        time.sleep(DISCOVERY_SECONDS)
        if WATCH.was_raised:
            time.sleep(HANDLING_SECONDS)
        mourned = self.mourned()
        if mourned and not self.ends_itself and not self.survivor_ends:
            self.survivor_ends = True
            self.code = self.code or 1
            if self.speaker.is_here(WATCHDOG.page, WATCHDOG.peers()):
                frames = sys._current_frames()  # noqa: SLF001 - documented; private only to say "for debuggers"
                stack = "".join(traceback.format_stack(frames.get(threading.main_thread().ident or 0)))
                say(f"{self.place} cannot continue: {describe(mourned)}\nThis rank was here:\n{stack}")
            end_later(EXIT_SECONDS)
            # Run the program's exit functions here: the main thread, which should run them, is blocked.
            atexit._run_exitfuncs()  # noqa: SLF001 - there is no public way
            self.end_process(1)

    def end_process(self, code: int, *, leaves_dead: bool = False) -> None:
        """End this process without MPI_Finalize, which would wait without end for dead ranks."""
        logging.shutdown()
        flush()
        if not (mourned := self.mourned()) and not leaves_dead:
            tell_end(code)
        if (WATCH.gone or (WATCH.dead and self.tolerates_deaths)) and os.getpid() == self.process:
            # Several ranks may end now. None may mistake the launcher's signal for a death.
            self.launcher_socket.close(lets_live=True)
        if mourned and os.getpid() == self.process:
            await_survivors(WATCHDOG.page, WATCHDOG.peers())
        time.sleep(FORWARD_SECONDS)
        os._exit(code)

    def end_interrupted(self, aborts: bool, text: str) -> None:
        """End the job, since this rank was interrupted and its call does not return."""
        say(f"{self.place} {text}")
        tell_end(INTERRUPTED, text, ends_job=True)
        self.give_up(aborts, INTERRUPTED)

    def give_up(self, aborts: bool, code: int = 1) -> None:
        """End the job, since this rank can never continue. A background thread calls this after the report."""
        # Another thread may hold the lock of a stream without end.
        end_later(EXIT_SECONDS)
        tell_end(code, ends_job=True, hangs=True)
        flush()
        time.sleep(FORWARD_SECONDS)
        if aborts:
            self.abort(code)
        WATCHDOG.end_others()
        os._exit(code)

    def _end(self, code: int, text: str, error: BaseException | None = None, *, hangs: bool = False) -> None:
        flush()
        tell_end(code, text, error, ends_job=True, hangs=hangs)
        if text:
            say(text)
            time.sleep(FORWARD_SECONDS)
        for function in BEFORE_ABORT if error is not None else ():
            function()
        if not self.is_finalized():
            self.abort(code)


_installed: list[_Ending] = []


def is_switched_off() -> bool:
    """Local. Whether this rank's environment switches the hooks off."""
    return os.environ.get("MPIDIST_ABORT") == "0"


def install(rank: int, size: int, host: str, mpi: MpiFunctions, *, aborts_in_threads: bool) -> None:
    """Local. Hook into exceptions and exits of this process. Calls after the first one change nothing.

    Args:
        rank: This process's rank, for the texts.
        size: Number of ranks.
        host: Name of the host.
        mpi: Functions of MPI.
        aborts_in_threads: Whether a background thread may call `abort` while the main thread is in MPI.
    """
    if _installed:
        return
    ending = _Ending(rank, size, host, mpi)
    _installed.append(ending)
    WATCH.start(ending.on_death, mpi.find_dead)
    give_up = functools.partial(ending.give_up, aborts_in_threads)
    WATCHDOG.end_by(give_up, lambda: bool(WATCH.dead), WATCH.note, INTERRUPTS.differing)
    INTERRUPTS.share(functools.partial(ending.end_interrupted, aborts_in_threads))
    sys.excepthook = ending.on_exception
    # `raise SystemExit(1)` does not call these functions: such a rank waits for the others in `at_exit`, and reports
    # that. After a death its code is 1.
    sys.exit = ending.exit  # type: ignore[assignment]  # typeshed: NoReturn; ours always raises
    for name in ("exit", "quit"):
        setattr(builtins, name, ending.exit)


def tolerate_deaths(needed: Iterable[Process] | None = (), *, leads: bool = False) -> None:
    """Local. Let this rank survive the deaths of others, and end alone when it fails: a server, or the coordinator.

    The rank checks for deaths itself (`deaths.WATCH.lost`), and communicates only in groups whose ranks are alive.

    Args:
        needed: The processes whose deaths end this rank in any case; they replace those of the last call. None: all.
        leads: Whether an exit code of this rank ends the job and becomes the job's, as long as no rank has died.
    """
    WATCH.needed, WATCH.is_over = frozenset(needed or ()), False
    for ending in _installed:
        ending.tolerates_deaths, ending.leads = needed is not None, leads
    # The launcher's notices do not name the dead rank, and finding it would take a second.
    WATCH.ignore_notices(at_end=False)


def note_survival() -> None:
    """Local. Note that the launcher does not end this rank when another one dies: not every host shows that."""
    for ending in _installed:
        ending.launcher_lets_live = True


def agree_on_exit() -> None:
    """Local. Note that all ranks end with the same exit code from now on: they end together.

    All ranks call this at the same point of the program.
    """
    expect_code()
    for ending in _installed:
        ending.is_agreed = True


def stand_apart() -> None:
    """Local. Let this rank, an evaluator, end no others from now on: after an error or exit code it waits for them."""
    expect_code()
    for ending in _installed:
        ending.stands_apart = True


def exit_code() -> int:
    """Local. The code with which this process ends: 0 until it has failed. `exit_code.watch_code` comes before."""
    return _installed[0].known_code() if _installed else code_of_program()


def leave() -> None:
    """Collective. The end of the program; called by the exit function that `import mpidist` registers."""
    WATCHDOG.note_end()
    TRACE.write()
    for ending in _installed:
        ending.at_exit()
        WATCH.refuse_calls()
    WATCHDOG.stop()
    TRACE.finish()
    forget()
