"""Preemption: a job that is about to end saves a checkpoint, at the same step on all ranks, and ends by itself."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from mpidist import launch
from mpidist.arguments import described
from mpidist.attributes import FixedAttributes
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.lock import require_savable
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.preemption.deadline import Deadline
from mpidist.checkpoint.preemption.exchange import Exchange
from mpidist.checkpoint.preemption.requeueing import Requeueing, StepCounts
from mpidist.checkpoint.preemption.rescue import PATIENCE_SECONDS, PATIENCE_STEPS, Rescue
from mpidist.checkpoint.preemption.termination import TIME_IS_UP, TerminationConfig, describe, watch
from mpidist.checkpoint.walk.found import Found
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.roles.groups import tell_evaluators_of_signals
from mpidist.cluster.signals import SIGNALS, Notice
from mpidist.cluster.slurm import job
from mpidist.comm.group.agreement import on_first_rank
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import RankError
from mpidist.failures.ending import agree_on_exit
from mpidist.failures.exit_code import leave_later, number_of
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.protocol.signal_relay import Others

# The purpose of the communicator on which ranks exchange notices.
PURPOSE = "preemption"
# The time for a program's exit functions after the last save.
EXIT_SECONDS = 20.0

logger = logging.getLogger("mpidist")
T = TypeVar("T")


class PreemptionCheckpointHandler(FixedAttributes):
    """Collective. Saves a checkpoint on all ranks at the same step when the job is about to end, and ends the program.

    The constructor restores the latest checkpoint. A notice of the end on any rank counts on all ranks: a signal
    (SIGTERM, SIGUSR1), the result of a user's function, or the time limit of the job by rank 0's clock. Ranks exchange
    notices while they compute: each call of `run` completes the exchange that the previous call began. So after a
    notice exactly one more step runs, and the call of `run` after it saves the checkpoint.

    Under `ParameterServerStrategy` only the chief makes a handler. Workers and servers then report these signals to the
    chief; a worker does so when its function has ended. Before a save the chief joins all functions that were
    scheduled. All ranks end with the chief's exit code.

    An evaluator ignores these signals from its first call of `checkpoints_iterator` after the handler was made, and
    ends with the job. A signal to the evaluator alone is no notice.

    Args:
        cluster_resolver: An argument of tf.distribute, which changes nothing; may be None. The ranks that share the
            variables take part.
        checkpoint_or_checkpoint_manager: The objects to save. With several ranks all variables must exist already.
        checkpoint_dir: The directory, for a `Checkpoint`; its latest checkpoint is kept.
        termination_config: The settings; default: `TerminationConfig()`.
        clock: A monotonic clock in seconds; tests pass their own.

    Raises:
        TypeError, ValueError: An argument has a wrong type; a `Checkpoint` has no directory, or a manager has a second
            one; a checkpoint has no variables; or the caller is not the main thread.
        LauncherError: `SLURM_JOB_END_TIME` of rank 0 is no number; on every rank.
        DamagedCheckpointError: On every rank: all checkpoints are damaged.
        CheckpointError: On every rank: the checkpoint does not fit the objects; or another running job saves to the
            directory (not checked with a `save_fn`).
        OSError: On every rank: no checkpoint can be saved to the directory (not checked with a `save_fn`).
    """

    _is_settled = True

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise TypeError(f"`cluster_resolver` must be a ClusterResolver or None, got {described(cluster_resolver)}")
        config = TerminationConfig() if termination_config is None else termination_config
        if not isinstance(config, TerminationConfig):
            raise TypeError(f"`termination_config` must be a TerminationConfig or None, got {described(config)}")
        self._config = config
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._has_own_manager = self._manager is not checkpoint_or_checkpoint_manager
        checkpoint = self._manager.checkpoint
        found = checkpoint.find_objects()
        if not found.leaves and launch.world_size() > 1:
            raise ValueError(
                "the checkpoint of a PreemptionCheckpointHandler must hold variables, which determine its ranks, got "
                "none. Create the variables first"
            )
        self._group: Communicator = found.group()
        self._others = _others(found)
        runs = vars(checkpoint).get("checkpointed_runs")
        if not isinstance(runs, StepCounts):
            runs = StepCounts()
            checkpoint.checkpointed_runs = runs
        self._runs = runs
        self._manager.restore_or_initialize(fallback=True)
        self._requeueing = Requeueing(self._manager, config.max_requeues, lambda: runs.count > runs.restored)
        if config.save_fn is None:
            self._look_at_directory(found.is_written_here(self._group))
        self._clock = clock
        self._notice = Notice(clock)
        # Apart from the group's own searches: ranks that came here differently often would meet those.
        sibling = self._group.open_sibling(PURPOSE)
        self._notices = Exchange(sibling.open_max())
        self._rescue = Rescue(checkpoint, self._group, sibling, self._notice, self._notices, self)
        self._sent_at = 0.0
        self._deadline = Deadline(on_first_rank(self._group, "reading when the job ends", self._end_of_job))
        self._is_done = False
        # On servers a function may take its time.
        self._rescue.begin(runs.count, watches=self._others is None)
        SIGNALS.tell(self._notice, config.signals)
        tell_evaluators_of_signals()
        if self._others is not None:
            self._others.listen()
        if config.termination_watcher_fn is not None:
            watch(config.termination_watcher_fn, self._notice)

    def _look_at_directory(self, is_written_here: bool) -> None:
        """Collective. Check now that checkpoints can be saved there: when the job is about to end it is too late."""
        directory = self._manager.directory
        on_first_rank(
            self._group, "looking at the directory", lambda: require_savable(directory) if is_written_here else None
        )
        if self._others is None:
            # A rank that has failed finds out whether the others wait for it in the save.
            self._group.share_directory(os.path.abspath(directory))

    @property
    def total_run_calls(self) -> int:
        """Local. The number of steps, in this program and before the checkpoint that it has restored.

        It counts the calls of `run`, or those of `save_checkpoint_if_preempted`.
        """
        return self._runs.count

    def run(self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Collective. Run a step, unless the job is about to end: then save and end the program instead.

        Args:
            distributed_train_function: The step; every rank calls it.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The result of the function.

        Raises:
            TypeError: `distributed_train_function` is no function.
            SystemExit: The checkpoint is saved; on every rank.
            OSError, CheckpointError: It could not be saved; on every rank. The next call tries again.
        """
        if not callable(distributed_train_function):
            raise TypeError(
                f"`distributed_train_function` must be a function, got {described(distributed_train_function)}"
            )
        self._rescue.is_between = self._rescue.is_inside = False
        self._look((), {})
        self._rescue.is_inside = True
        try:
            result = distributed_train_function(*args, **kwargs)
        except Exception as error:
            self._rescue.after(error, waits=False)
            raise
        self._runs.count += 1
        self._rescue.note_step(self._runs.count)
        self._rescue.is_between, self._rescue.is_inside = True, False
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Collective. Save a checkpoint and end the program, if the job is about to end; else do nothing.

        It is for programs that do not call `run`: every rank calls it once a step. Where that is before the step,
        `total_run_calls` of the checkpoint is the number of steps in it; after the step it is one less.

        Args:
            *args: Arguments of the settings' `save_fn`; without one, of `CheckpointManager.save`.
            **kwargs: Keyword arguments of the same function.

        Raises:
            SystemExit, OSError, CheckpointError: See `run`.
        """
        self._rescue.note_step(self._runs.count)
        self._look(args, kwargs)
        self._runs.count += 1

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collective. Save and end the program if the job is about to end; else nothing."""
        if self._is_done:
            return
        if self._notice.error is not None:
            raise self._notice.error
        self._rescue.look()
        try:
            reason, milliseconds, sent_at = self._exchange()
        except RankError as error:
            self._rescue.after(error, waits=False)
            raise
        if not reason or (self._deadline.in_grace and reason < TIME_IS_UP):
            return
        if self._others is not None:
            # Scheduled functions count: the next program continues after them.
            try:
                self._others.join()
            except Exception as error:
                self._rescue.after(error, waits=False)
                raise
        if self._config.grace_period and reason < TIME_IS_UP:
            # Rank 0's clock decides when the grace period ends.
            self._deadline.begin_grace(sent_at - milliseconds / 1e3, self._config.grace_period)
            self._save(reason, args, kwargs)
            return
        # Where it fails the next call tries again: an operator may have made room.
        self._end(reason, args, kwargs)

    def _end(self, reason: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        saved = self._save(reason, args, kwargs)
        self._is_done = True
        self._requeue(saved)
        self._exit()

    def close(self) -> None:
        """Local. Stop watching for notices: signals have again the effect that they had before.

        Where it was given a `Checkpoint`, another job may save to the directory from now on.
        """
        self._notice.is_closed = True
        self._rescue.close()
        SIGNALS.silence(self._notice)
        tell_evaluators_of_signals()
        if self._others is not None:
            self._others.silence()
        self._is_done = True
        if self._has_own_manager:
            self._manager.close()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._rescue.after(error, waits=True)
        finally:
            self.close()

    def _exchange(self) -> tuple[int, int, float]:
        """Collective. Send this rank's notices to all ranks, and receive what they sent in the last call.

        Returns:
            The largest reason of all ranks, the milliseconds since it was known, and the time at which that was sent.
        """
        self._deadline.note_call(self._clock())
        order = self._group.order
        with order.enter("looking for preemption", None, None, meets=False) as call:
            call.surround().is_under_way = True
            reason, milliseconds = self._notices.hear()
            sent_at, self._sent_at = self._sent_at, self._clock()
            own = self._own_reason()
            self._notices.tell(own, self._notice.passed_milliseconds(), has_failed=self._rescue.has_failed)
            # In the last two steps: a rank with the notice may learn at once that another rank will not arrive.
            may_wait = own > 0 and self._group.size > 1 and not self._config.grace_period
            is_last = may_wait and self._notices.shows_failure(self._rescue.look)
        if is_last:
            self.end_after(self._rescue.complete, own)
        return reason, milliseconds, sent_at

    def look_again(self, steps: int) -> None:
        """Collective. Check for a notice as a step does, `steps` steps after the last counted one; for `rescue`."""
        self._runs.count += steps
        self._look((), {})

    def patience_seconds(self) -> float:
        """Local. The seconds that a step, and the work after it, may take after a notice; for `rescue`."""
        return max(PATIENCE_SECONDS, PATIENCE_STEPS * self._deadline.longest_step, self._config.grace_period)

    def end_after(self, steps: int, reason: int) -> None:
        """Collective. Save the state after `steps` steps, and end the program; for `rescue`."""
        self._rescue.go_back(steps)
        self._runs.count = steps
        if self._others is not None:
            # Where one function has failed others have ended, and some were never begun.
            with contextlib.suppress(Exception):
                self._others.join()
        self._end(reason, (), {})

    def _own_reason(self) -> int:
        # Rank 0's clock decides when the time limit is reached.
        if self._group.rank == 0:
            now = self._clock()
            join = 0.0 if self._others is None else self._others.join_seconds(now)
            reason = self._deadline.reason(now, self._config.save_factor * (self._save_seconds() + join))
            if reason:
                return reason
        return self._notice.reason

    def _save_seconds(self) -> float:
        measured = self._manager.checkpoint.save_seconds
        return self._config.save_seconds if measured is None else measured

    def _save(self, reason: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Collective. Save, and say why; the path, or what the user's function returned."""
        begin = time.monotonic()
        self._rescue.meet()
        if self._config.save_fn is not None:
            saved = self._config.save_fn(*args, **kwargs)
        else:
            due = {} if len(args) > 1 else {"check_interval": False}
            saved = self._manager.save(*args, **{**due, **kwargs})
        # One in the background may be under way; the program is about to end.
        self._manager.sync()
        if self._group.rank == 0:
            logger.warning(
                "the job is about to end (%s): saved %s in %.1f s, after %d steps",
                describe(reason), saved if isinstance(saved, str) else "a checkpoint", time.monotonic() - begin,
                self._runs.count,
            )
        return saved

    def _requeue(self, saved: object) -> None:
        """Collective. Let the job be requeued, if that is wanted; where it is not, rank 0 warns with the reason."""
        if not self._config.requeue:
            return
        on_first_rank(self._group, "requeueing the job", lambda: self._requeueing.requeue(saved))

    def _exit(self) -> None:
        """Collective. End the program with the same code on all ranks, or let the user's function do it."""
        try:
            if self._config.exit_fn is None:
                sys.exit(self._config.exit_code)
            self._config.exit_fn()
        except SystemExit as error:
            SIGNALS.ignore()
            # The exit function of a Pool whose worker the signal has ended never returns.
            leave_later(EXIT_SECONDS, number_of(error.code))
            if self._others is not None:
                self._others.end_together()
            elif self._group.size > 1:
                agree_on_exit()
            raise
        # It has returned: the program continues, and may be ended from outside.
        self.close()

    def _end_of_job(self) -> float | None:
        """The end of the job by rank 0's monotonic clock: the other clock is set at times."""
        left = self._config.time_limit
        if left is None and (ends_at := job.end_time()) is not None:
            left = ends_at - time.time()
        factor, save = self._config.save_factor, self._save_seconds()
        if left is not None and left <= factor * save:
            # With `requeue` a job would be restarted again and again, for a step or two each time.
            logger.warning(
                "the job ends in %.0f s, and %.0f s are reserved for saving (`save_factor` %g times %.1f s): it saves "
                "and ends after its first steps. Give the job more time; or, if a save takes less, set "
                "`TerminationConfig(save_seconds=...)`",
                max(left, 0.0), factor * save, factor, save,
            )
        return None if left is None else self._clock() + left


def _others(found: Found) -> Others | None:
    """The other processes of a job with parameter servers, of which this one is the chief."""
    home = found.servers()
    return home.others if isinstance(home, Chief) else None


def _manager(given: Any, directory: Any) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        if directory is not None:
            raise ValueError(
                f"`checkpoint_dir` is for a Checkpoint, got {directory!r} with a CheckpointManager, which has one"
            )
        return given
    if not isinstance(given, Checkpoint):
        raise TypeError(
            "`checkpoint_or_checkpoint_manager` must be a mpidist.Checkpoint or CheckpointManager, got "
            f"{described(given)}"
        )
    if directory is None:
        raise TypeError("a Checkpoint needs `checkpoint_dir`, the directory to which it is saved, got None")
    return CheckpointManager(given, directory, max_to_keep=1)
