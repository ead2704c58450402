"""Deaths: processes of ranks that have terminated without notice while other ranks still needed them.

One thread waits on the process descriptors of all ranks on this host (`man 2 pidfd_open`), which the kernel makes
readable when a process terminates for any reason; another thread polls processes without descriptor (`lives.py`).
Neither needs MPI: after a death a call of MPI may never return. A rank that ends in good order notifies the others
before (`ending.py`); one that terminates without this is dead. Deaths on other hosts are reported by MPI (Open MPI with
fault tolerance), by the launcher (Hydra, by SIGUSR1), or by files in a job directory (`failures/job_directory.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import NamedTuple

from mpidist.errors import DeadRankError
from mpidist.failures.job_directory import deaths_seen
from mpidist.failures.lives import Lives, how_ended
from mpidist.failures.looks import FEW
from mpidist.failures.waits import FORKED, LEFT
from mpidist.failures.watchdog import WATCHDOG
from mpidist.launch import is_under_hydra as _is_under_hydra

_NEWS_SECONDS = 1.0  # MPI may raise an error before this process is notified of the death that caused it
_UNKNOWN = "a rank on another host"
SOME_RANK = "a rank"  # MPI may report a death without the number of the rank
_APART = "this process"  # the key in `dead` when this process itself must make no more calls with others
# After a death the program's own thread has this time to notice it and to raise an error, which the program can catch.
# Then a background thread ends the process: the program's thread may be in a call of MPI that never returns.
DISCOVERY_SECONDS = 3.0
# The end of the name of a lost rank whose process may be alive.
IS_SILENT = ", which does not respond"


class Process(NamedTuple):
    """The process of a rank.

    Attributes:
        host: Name of its host.
        number: Its process number there.
        namespace: Where that number is valid: containers on one host have name spaces of their own.
    """

    host: str
    number: int
    namespace: str


def this_process(host: str) -> Process:
    """Local. This process.

    Args:
        host: The name of this host.
    """
    namespace = ""  # without a name space a process is not watched: another process may have its number elsewhere
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return Process(host, os.getpid(), namespace)


class DeathWatch:
    """The detected deaths of processes. There is one object per process, `WATCH`.

    Attributes:
        dead: The names of dead ranks, such as "rank 2 of 4 (process 77 on n3)"; empty while all are alive.
        needed: The processes whose deaths are reported even if they are not the first.
        spared: Processes without which the others continue, as an evaluator; for each a function, called at its death.
        gone: The names of dead processes of `spared`, which are not in `dead`.
        was_raised: Whether an error has reported a death in the program's own thread.
        is_over: Whether the program has ended, after which processes end one after another.
    """

    def __init__(self) -> None:
        self.dead: dict[Process | str, str] = {}
        self.needed: frozenset[Process] = frozenset()
        self.spared: dict[Process, Callable[[str], None]] = {}
        self.gone: dict[Process, str] = {}
        self.was_raised = self.is_over = False
        self._on_death: Callable[[], None] | None = None
        self._ask_mpi: Callable[[BaseException], Sequence[str]] = lambda _: ()
        self._watched: dict[int, tuple[Process, str]] = {}
        # Descriptors of dead processes. They stay open: the kernel returns the exit status by them. -1: there is none.
        self._ended: dict[Process | str, int] = {}
        self._lives = Lives()
        self._known: set[Process] = set()
        self._poll: select.epoll | None = None
        self._handler: Callable[[int, FrameType | None], None] | None = None
        self._take_other: Callable[[bool], None] | None = None
        self._is_taking = self._has_hook = False
        self._bell = -1
        self._heard: dict[int, list[Callable[[], None]]] = {}

    def note_raised(self) -> None:
        """Local. Note that an error is about to report a death in this thread; only the program's own thread counts."""
        self.was_raised = self.was_raised or threading.current_thread() is threading.main_thread()

    def note_end(self) -> None:
        """Local. Note that the program has ended: processes end one after another, and deaths are expected."""
        self.needed, self.is_over = frozenset(), True

    def start(self, on_death: Callable[[], None], ask_mpi: Callable[[BaseException], Sequence[str]]) -> None:
        """Local. Begin to watch.

        Args:
            on_death: The function for the first death, and for each death of a process of `needed`; in a new thread.
            ask_mpi: The function that returns the names of ranks whose death an error of MPI reports, or none.
        """
        self._on_death = on_death
        self._ask_mpi = ask_mpi

    def stop(self) -> None:
        """Local. Stop watching: a rank that ends from now on has notified the others."""
        self._on_death = None

    def refuse_calls(self) -> None:
        """Local. Refuse all further calls with other ranks: the program has ended on all ranks."""
        self.dead.setdefault(_APART, LEFT)

    def refuse_children(self) -> None:
        """Local. Let no process that is forked from this one make collective calls; later calls change nothing."""
        if not self._has_hook:
            self._has_hook = True
            os.register_at_fork(after_in_child=self._be_child)

    def _be_child(self) -> None:
        self._on_death = None
        self.dead = {_APART: FORKED}
        self._be_deaf()
        if self._handler is not None and signal.getsignal(signal.SIGUSR1) is self._handler:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def _be_deaf(self) -> None:
        # The child inherits the pipe: without this its signals would be handled in the parent.
        if self._bell != -1:
            signal.set_wakeup_fd(-1)

    def watch(self, processes: Sequence[Process], rank: int) -> None:
        """Local. Watch the processes of a group that are on this host; each is watched once.

        Args:
            processes: The processes of all ranks.
            rank: This rank.
        """
        if self._on_death is None:
            return
        here = processes[rank]
        for other, process in enumerate(processes):
            same_space = (process.host, process.namespace) == (here.host, here.namespace)
            if process in self._known or process == here or not same_space or not here.namespace:
                continue
            self._known.add(process)
            name = f"rank {other} of {len(processes)} (process {process.number} on {process.host})"
            try:
                poll = self._open_poll()
                descriptor = os.pidfd_open(process.number)
            except ProcessLookupError:
                # It was alive when the group was created, and has terminated since.
                self._note(process, name)
                continue
            except OSError:
                # The kernel has no `pidfd_open`, or no descriptor is free.
                self._lives.add(process.number, functools.partial(self._note, process, name))
                continue
            self._watched[descriptor] = (process, name)  # before `register`: the thread reads it, maybe at once
            poll.register(descriptor, select.EPOLLIN)

    def watches(self, process: Process) -> bool:
        """Local. Whether this process watches another process."""
        return self._on_death is not None and process in self._known

    def end(self, process: Process) -> None:
        """Local. Kill a process if it is watched and has not ended."""
        for descriptor, (watched, _) in self._watched.copy().items():
            if watched == process:
                # By the descriptor, since the number may belong to a new process by now.
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def how_ended(self, process: Process) -> str:
        """Local. The way in which a process of this host ended, see `lives.how_ended`; empty where it is unknown."""
        return "" if (descriptor := self._ended.get(process, -1)) < 0 else how_ended(descriptor)

    def may_have_ended(self, process: tuple[str, int, str]) -> bool:
        """Local. Whether a process has ended, or this process would not detect its end."""
        return Process(*process) in self._ended or Process(*process) not in self._known

    def lost(self, processes: Iterable[Process]) -> list[str]:
        """Local. Names of the dead among some processes, this one included, and of dead ranks of unknown process."""
        if not self.dead:
            return []
        chosen = set(processes)
        if len(chosen) < 2:
            return []
        # Background threads add deaths at any time, and a dictionary must not change during iteration.
        dead = self.dead.copy()
        return [name for process, name in dead.items() if process in chosen or isinstance(process, str)]

    def require_alive(self, processes: Iterable[Process], what: str) -> None:
        """Local. Raise DeadRankError if one of these processes is dead.

        Args:
            processes: The processes of the ranks that take part.
            what: The operation, for the text of the error.

        Raises:
            RuntimeError: This process is no rank any more: it was forked from one, or its program has ended.
        """
        lost = self.lost(processes)
        if lost and _APART in self.dead:
            raise RuntimeError(f"{what} cannot be done: {self.dead[_APART]}")
        if lost:
            self.was_raised = True
            raise DeadRankError(f"{what} cannot be done: {describe(lost)}")

    def learn(self, error: BaseException) -> bool:
        """Local. Whether any rank is dead, also according to an error of MPI, which may report a death."""
        for name in self._ask_mpi(error):
            # Wait for the process first: a death without one would count in every group.
            if not self._wait_for_news("" if name == SOME_RANK else name):
                self._note(name, name)
        return bool(self.dead)

    def take_notices(self, *, has_other_hosts: bool) -> None:
        """Local. Handle Hydra's notices: it sends SIGUSR1 to the remaining ranks when a rank dies.

        A handler of the program's stays. Python does not say which process has sent a signal: without a death on this
        host it is taken for Hydra's notice of a death on another host if there are other hosts, else for the user's.

        Args:
            has_other_hosts: Whether there are ranks on other hosts.
        """
        if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL or not _is_under_hydra():
            return

        def take(number: int, _: FrameType | None) -> None:
            # One call answers all signals that arrive during it: nested handlers would use up the stack.
            if not self._is_taking:
                self._is_taking = True
                try:
                    decide(number)
                finally:
                    self._is_taking = False

        def decide(number: int) -> None:
            if has_other_hosts:
                self._take_notice()
            elif not self._wait_for_news():
                if self._take_other is not None:
                    self._take_other(False)
                    return
                signal.signal(number, signal.SIG_DFL)  # the user's signal has its usual effect
                os.kill(os.getpid(), number)

        # Python sets handlers in the main thread only; in another one the notice ends the process, as without mpidist.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGUSR1, take)
            self._handler = take
            if has_other_hosts:
                # In a new thread, see `hear`: the thread of this object reports the deaths that the notice waits for.
                self.hear(signal.SIGUSR1, self._take_notice)

    def give_notices(self, function: Callable[[bool], None] | None) -> bool:
        """Local. Call a function at a SIGUSR1 without a known death: it may be the user's or Slurm's, and not Hydra's.

        Args:
            function: Gets whether the signal may still report a death on another host. None: the signal counts as a
                death, or ends the process, as before.

        Returns:
            Whether this object handles the signal; if not, the caller needs a handler of its own.
        """
        self._take_other = function
        return self._handler is not None and signal.getsignal(signal.SIGUSR1) is self._handler

    def hear(self, number: int, function: Callable[[], None]) -> None:
        """Local. Call a function at each signal, also while the main thread is in a call of MPI and runs no handlers.

        Args:
            number: The number of a signal that has a handler.
            function: A function that is called in a new thread, in addition to the functions of earlier calls.
        """
        self._heard.setdefault(number, []).append(function)
        if self._bell == -1:
            self._open_bell()

    def _open_bell(self) -> None:
        """Let signals wake this object's thread; if no descriptor is free, only signals outside calls of MPI count."""
        with contextlib.suppress(OSError):
            poll = self._open_poll()
            bell, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            # A full pipe loses only repetitions of signals that the thread has not read yet.
            previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            if previous == -1:
                self._bell = bell
                os.register_at_fork(after_in_child=self._be_deaf)
                poll.register(bell, select.EPOLLIN)
            else:
                # Another library uses the only such descriptor, asyncio for instance.
                signal.set_wakeup_fd(previous)
                os.close(bell)
                os.close(writer)

    def _take_notice(self) -> None:
        if signal.getsignal(signal.SIGUSR1) is not self._handler or self._wait_for_news():
            return
        if self._take_other is None:
            self._note(_UNKNOWN, _UNKNOWN)
        else:
            self._take_other(True)

    def suspect(self) -> None:
        """Local. Count a signal without a known death as the death of a rank on another host."""
        self._note(_UNKNOWN, _UNKNOWN)

    def note(self, process: tuple[str, int, str], name: str) -> None:
        """Local. Note a death that another process has detected; `name`: "rank 2 of 4 (process 77 on n3)"."""
        if Process(*process) not in self.dead:
            self._note(Process(*process), name)

    def _wait_for_news(self, rank: str = "") -> bool:
        """Poll until the death of a rank is known, by default of any rank: errors may be faster than its report."""
        end, again, pause = time.monotonic() + _NEWS_SECONDS, 0.0, 0.01
        while not (is_known := self._knows(rank)) and (now := time.monotonic()) < end:
            if now >= again:  # opens files of other hosts, in a job of many ranks at growing intervals
                again, pause = now + pause, 2 * pause if len(WATCHDOG.peers()) >= FEW else 0.0
                for key, name in deaths_seen(WATCHDOG.peers(), WATCHDOG.death_notes):
                    self.note(key, name)
            time.sleep(0.01)
        return is_known

    def _knows(self, rank: str) -> bool:
        names = [*self.dead.copy().values(), *self.gone.copy().values()]
        return any(not rank or f"{name} ".startswith(f"{rank} ") for name in names)

    def ignore_notices(self, *, at_end: bool = True) -> None:
        """Local. Ignore Hydra's notices, which it also sends while ranks end in good order, from now on.

        Python restores the default action of signals when it ends, and SIGUSR1 would then end the process; an ignored
        signal stays ignored.

        Args:
            at_end: Whether the program has ended, so that its own handler is replaced, too; else that one stays.
        """
        if (at_end or signal.getsignal(signal.SIGUSR1) is self._handler) and _is_under_hydra():
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _open_poll(self) -> select.epoll:
        if self._poll is None:
            self._poll = select.epoll()
            threading.Thread(target=self._work, args=(self._poll,), name="mpidist-deaths", daemon=True).start()
        return self._poll

    def _work(self, poll: select.epoll) -> None:
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._bell:
                    for number in os.read(descriptor, 4096):
                        for function in self._heard.get(number, []):
                            threading.Thread(target=function, name="mpidist-notice", daemon=True).start()
                    continue
                process, name = self._watched.pop(descriptor)
                poll.unregister(descriptor)
                self._ended[process] = descriptor  # before `_note`, which calls functions that read it
                self._note(process, name)

    def _note(self, process: Process | str, name: str) -> None:
        is_spared = process in self.spared
        self._ended.setdefault(process, -1)
        is_told = not self.dead or process in self.needed or is_spared
        if self._on_death is None or process in self.gone:
            return
        (self.gone if is_spared else self.dead)[process] = name  # type: ignore[index]  # the spared are processes
        # Before `on_death`, which may end this process: other hosts must still be notified.
        if is_told and isinstance(process, Process) and WATCHDOG.death_notes is not None:
            WATCHDOG.death_notes.add(process, name)
        if is_spared:
            self.spared[process](name)  # type: ignore[index]
        elif is_told:
            threading.Thread(target=self._on_death, name="mpidist-survivor", daemon=True).start()


WATCH = DeathWatch()


def describe(names: Iterable[str]) -> str:
    """Local. A sentence about dead ranks, and the advice to restart the job."""
    listed = sorted(names)
    ended = ", ".join(name for name in listed if not name.endswith(IS_SILENT))
    silent = ", ".join(name.removesuffix(IS_SILENT) for name in listed if name.endswith(IS_SILENT))
    told = [f"{ended} terminated unexpectedly, for instance by a kill or `os._exit`"] * bool(ended)
    told += [f"{silent} cannot be reached: the host does not respond, as after a network failure"] * bool(silent)
    return f"{'; '.join(told)}. Start the job again: a program that saves checkpoints resumes from the last one"
