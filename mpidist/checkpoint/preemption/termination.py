"""The notices that a job is about to end: signals, a function of the user's, and the settings of what is done then."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.arguments import described, flag, number, whole
from mpidist.attributes import FixedAttributes
from mpidist.cluster.signals import SIGNALLED, Notice

# Seconds between two calls of a function of the user's.
WATCHER_SECONDS = 1.0
# The reasons of a notice besides signals; the largest one of all ranks counts.
WATCHED, TIME_IS_UP, GRACE_IS_OVER = 1, 1000, 2000


class TerminationConfig(FixedAttributes):
    """Local. Settings of `PreemptionCheckpointHandler`: the notices that the job is about to end, and the reaction.

    Under `ParameterServerStrategy` the functions are called on the chief alone.

    Args:
        termination_watcher_fn: A function that is called every second in a thread of its own, on each rank; it returns
            True when the job is about to end. It must not communicate. An exception of it is raised by the handler's
            next call.
        exit_fn: A function that is called on each rank after the last checkpoint; default: `sys.exit(exit_code)`. If it
            returns, training continues, and nothing is saved any more.
        grace_period: Seconds from a notice to the end of the job. A checkpoint is saved at once, training continues
            as long as six steps and a save fit, and then the last checkpoint is saved. With 0 there is one checkpoint.
        save_fn: A function that is called on each rank instead of saving, with the arguments of
            `save_checkpoint_if_preempted`.
        signals: The signals that are notices, on any rank.
        time_limit: Seconds from the construction of the handler to the end of the job; default: the time limit of the
            Slurm job, if there is one.
        exit_code: The code with which the program ends.
        save_factor: The time reserved for the last save, as a multiple of the duration of the previous save.
        save_seconds: The assumed duration of a save before the first one was measured.
        requeue: Whether rank 0 requeues the job by `scontrol requeue`; it does not if nothing new was saved.
        max_requeues: The largest number of requeues; None: no limit.

    Raises:
        TypeError, ValueError: An argument has a wrong type, or is out of range.
    """

    _fixed = frozenset({
        "exit_code", "exit_fn", "grace_period", "max_requeues", "requeue", "save_factor", "save_fn", "save_seconds",
        "signals", "termination_watcher_fn", "time_limit",
    })

    def __init__(  # noqa: PLR0913  # the first four are tf.distribute's
        self,
        termination_watcher_fn: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        time_limit: float | None = None,
        exit_code: int = 42,
        save_factor: float = 3.0,
        save_seconds: float = 30.0,
        requeue: bool = False,
        max_requeues: int | None = None,
    ) -> None:
        functions = {"termination_watcher_fn": termination_watcher_fn, "exit_fn": exit_fn, "save_fn": save_fn}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise TypeError(f"`{name}` must be a function, or None, got {described(function)}")
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn
        self.grace_period = 0.0 if grace_period is None else number("grace_period", grace_period, least=0)
        self.save_fn = save_fn
        self.signals = _signals(signals)
        self.time_limit = None if time_limit is None else number("time_limit", time_limit, least=0)
        self.exit_code = whole("exit_code", exit_code, least=0)
        if self.exit_code > 255:
            raise ValueError(f"`exit_code` must be between 0 and 255, got {exit_code!r}")
        self.save_factor = number("save_factor", save_factor, least=1)
        self.save_seconds = number("save_seconds", save_seconds, least=0)
        self.requeue = flag("requeue", requeue)
        self.max_requeues = None if max_requeues is None else whole("max_requeues", max_requeues, least=0)
        self._settle(TerminationConfig)


def _signals(given: Any) -> tuple[signal.Signals, ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"`signals` must be a list of signals, such as [signal.SIGTERM], got {described(given)}")
    found = []
    for one in given:
        try:
            found.append(signal.Signals(whole("signals", one, least=1)))
        except ValueError:
            raise ValueError(f"`signals` must be signals, such as signal.SIGTERM, got {one!r}") from None
        # SIGINT is an interrupt, which has rules of its own.
        if one in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
            raise ValueError(f"`signals` must be signals that announce the end of a job, got {found[-1].name}")
    return tuple(found)


def watch(function: Callable[[], Any], notice: Notice) -> None:
    """Local. Call a function of the user's every second, in a thread of its own that ends with the notice.

    Args:
        function: A function that returns whether the job is about to end.
        notice: The notice to set.
    """
    arguments = (function, weakref.ref(notice))
    threading.Thread(target=_work, args=arguments, name="mpidist-preemption", daemon=True).start()


def _work(function: Callable[[], Any], reference: weakref.ref[Notice]) -> None:
    pause = threading.Event()
    while (notice := reference()) is not None and not notice.reason and not notice.is_closed:
        try:
            if function():
                notice.note(WATCHED)
        except BaseException as error:
            notice.error = error
            return
        # The thread must not keep it alive.
        del notice
        pause.wait(WATCHER_SECONDS)


def describe(reason: int) -> str:
    """Local. A reason in words."""
    if reason >= TIME_IS_UP:
        return "the time is up" if reason == TIME_IS_UP else "the grace period is over"
    return "the watcher function returned True" if reason == WATCHED else signal.Signals(reason - SIGNALLED).name
