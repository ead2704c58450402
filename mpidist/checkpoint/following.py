"""Following a directory of checkpoints, for an evaluator beside the training: each new checkpoint once."""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

from mpidist.arguments import described, number
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.latest import latest_checkpoint
from mpidist.checkpoint.directory.state import as_path
from mpidist.comm.group.agreement import on_first_rank
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, DamagedCheckpointError
from mpidist.first_rank import training_has_ended

logger = logging.getLogger("mpidist")

# Seconds between two reads of the directory.
_LOOK_SECONDS = 0.5
_LEAST_SECONDS = 0.05


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], object] | None = None,
    *,
    restore: Checkpoint | None = None,
) -> Iterator[str]:
    """Local. Wait for the checkpoints of a directory, and yield each new one: `tf.train.checkpoints_iterator`.

    Only the latest checkpoint is yielded: those saved while the program was busy with another one are skipped. A
    checkpoint that is saved again under the same name is new.

    A yielded path may have been deleted when the program restores it: the training keeps `max_to_keep` checkpoints. So
    pass `restore`: each checkpoint is restored before its path is yielded, and a deleted one is skipped. Then the
    iterator is Collective over the ranks of these objects, and only rank 0 reads the directory.

    On the rank of an evaluator the iterator ends with the training: when the chief's program ends, the last
    checkpoint is yielded, if it is new, without regard to `min_interval_secs`. Elsewhere only `timeout` ends it.

    Args:
        checkpoint_dir: The directory to which `Checkpoint.save` or a `CheckpointManager` saves. It may be made later.
        min_interval_secs: Least time between two checkpoints, in seconds.
        timeout: Seconds to wait for a checkpoint; None waits without end.
        timeout_fn: A function that is called after `timeout`: the iterator ends if it returns a true value, else it
            waits again. Without it the iterator ends. With `restore` rank 0 calls it.
        restore: The objects to restore; None restores nothing.

    Returns:
        An iterator over the paths.

    Raises:
        TypeError: `checkpoint_dir` is no path, `timeout_fn` no function, `restore` no Checkpoint, or another argument
            no number.
        ValueError: A number is negative.
        CheckpointError: While iterating: the state file is no regular file; with `restore` also where
            `Checkpoint.restore` raises it for a file that still exists.
        NotADirectoryError: While iterating: `checkpoint_dir` is a file.

    Example:
        >>> for path in checkpoints_iterator("checkpoints", restore=checkpoint):    # doctest: +SKIP
        ...     print(path, evaluate(model))
    """
    directory = as_path("checkpoint_dir", checkpoint_dir)
    interval = number("min_interval_secs", min_interval_secs, least=0)
    limit = None if timeout is None else number("timeout", timeout, least=0)
    if timeout_fn is not None and not callable(timeout_fn):
        raise TypeError(f"`timeout_fn` must be a function, or None, got {described(timeout_fn)}")
    if restore is not None and not isinstance(restore, Checkpoint):
        raise TypeError(f"`restore` must be a mpidist.Checkpoint, or None, got {described(restore)}")
    return follow(directory, interval, limit, timeout_fn, restore=restore)


def follow(
    directory: str, interval: float, limit: float | None, timeout_fn: Callable[[], object] | None,
    clock: Callable[[], float] = time.monotonic, nap: Callable[[float], object] = time.sleep,
    restore: Checkpoint | None = None,
) -> Iterator[str]:
    """Local. See `checkpoints_iterator`, whose arguments are the first four; with `restore` Collective.

    Args:
        directory: See `checkpoint_dir`.
        interval: See `min_interval_secs`.
        limit: See `timeout`.
        timeout_fn: See `checkpoints_iterator`.
        clock: A monotonic clock in seconds.
        nap: A function that sleeps for a number of seconds.
        restore: See `checkpoints_iterator`.
    """
    group: Communicator = SoloCommunicator() if restore is None else restore.find_objects().group()
    step = f"looking for checkpoints in {directory!r}"

    def look() -> tuple[bool, float, str | None, object]:
        # Before the look: what is saved last is saved before the end.
        has_ended = training_has_ended()
        path, mark = _look(directory)
        return has_ended, clock(), path, mark

    # By rank 0's clock, as it is at the next look where there is no time.
    waiting_since: float | None = None
    not_before = -math.inf
    seen: object = None
    while True:
        # All that the ranks go by comes from here, so that all do the same.
        has_ended, now, path, mark = on_first_rank(group, step, look)
        waiting_since = now if waiting_since is None else waiting_since
        if path is not None and mark != seen and (has_ended or now >= not_before):
            seen = mark
            if restore is not None and not _is_restored(restore, group, path, mark):
                continue
            yield path
            waiting_since = None
            not_before = now + interval
            continue
        if has_ended:
            logger.info("%s: the training has ended", directory)
            return
        left = _LOOK_SECONDS if limit is None else max(waiting_since, not_before) + limit - now
        if left <= 0:
            logger.info("%s: no new checkpoint for %g s", directory, limit)
            if timeout_fn is None or on_first_rank(group, "asking `timeout_fn`", lambda: bool(timeout_fn())):
                return
            waiting_since = None
        nap(min(_LOOK_SECONDS, max(left, _LEAST_SECONDS)))


def _look(directory: str) -> tuple[str | None, object]:
    """The path of the latest checkpoint, None without one, and its difference from another one of that name."""
    try:
        path = latest_checkpoint(directory)
    except DamagedCheckpointError as error:
        # The next save writes the state file again.
        _warn_once(str(error))
        path = None
    if path is None and os.path.exists(directory) and not os.path.isdir(directory):
        raise NotADirectoryError(
            errno.ENOTDIR,
            "a file cannot receive new checkpoints: expected the directory to which they are saved, or its future "
            "path. To read one checkpoint use Checkpoint.restore", directory
        )
    if path is None:
        return None, None
    # None where it was just deleted; the state file is about to name the next one.
    mark = _mark(path)
    return (None, None) if mark is None else (path, mark)


def _mark(path: str) -> object:
    """Path, inode and time of a file, which differ from those of other files of its name; None without the file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return path, status.st_ino, status.st_mtime_ns


def _is_restored(checkpoint: Checkpoint, group: Communicator, path: str, mark: object) -> bool:
    """Collective. Restore a checkpoint; False if the training has deleted or replaced it in the meantime."""
    try:
        checkpoint.restore(path)
    except (FileNotFoundError, CheckpointError) as error:
        if on_first_rank(group, f"looking for {path!r}", lambda: _mark(path)) == mark:
            raise
        logger.info("%s was deleted, since the training has saved newer ones: %s", path, str(error))
        return False
    return True


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s. Waiting for the next checkpoint", text)
