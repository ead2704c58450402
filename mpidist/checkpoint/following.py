"""Following a directory of checkpoints, for an evaluator beside the training: each new checkpoint once."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator

from mpidist.arguments import described, number
from mpidist.checkpoint.directory import as_path
from mpidist.checkpoint.latest import latest_checkpoint
from mpidist.chief import training_has_ended
from mpidist.errors import DamagedCheckpointError

logger = logging.getLogger("mpidist")

# Between two looks into the directory.
_LOOK_SECONDS = 0.5
_LEAST_SECONDS = 0.05


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], object] | None = None,
) -> Iterator[str]:
    """Local. Wait for the checkpoints of a directory, and yield each new one: `tf.train.checkpoints_iterator`.

    The latest one counts: those that were saved while the program was busy with another one are left out. A checkpoint
    that is saved again under the same name is new.

    On the rank of an evaluator the iterator ends with the training: when the chief's program comes to its end, the last
    checkpoint is yielded, if it is new, without regard to `min_interval_secs`. Elsewhere only `timeout` ends it.

    Args:
        checkpoint_dir: The directory to which `Checkpoint.save` or a `CheckpointManager` saves. It may be made later.
        min_interval_secs: Seconds that pass at least between two checkpoints.
        timeout: Seconds to wait for a checkpoint; None waits for ever.
        timeout_fn: Called after `timeout`: the iterator ends if it returns a true value, else it waits again. Without
            it the iterator ends.

    Returns:
        An iterator over the paths.

    Raises:
        TypeError: `checkpoint_dir` is no path, `timeout_fn` no function, or another argument no number.
        ValueError: A number is negative.
        CheckpointError: While iterating: the state file is no regular file.
        NotADirectoryError: While iterating: `checkpoint_dir` is a file.

    Example:
        >>> for path in checkpoints_iterator("checkpoints"):    # doctest: +SKIP
        ...     checkpoint.restore(path)
        ...     print(path, evaluate(model))
    """
    directory = as_path("checkpoint_dir", checkpoint_dir)
    interval = number("min_interval_secs", min_interval_secs, least=0)
    limit = None if timeout is None else number("timeout", timeout, least=0)
    if timeout_fn is not None and not callable(timeout_fn):
        raise TypeError(f"`timeout_fn` must be a function, or None, got {described(timeout_fn)}")
    return follow(directory, interval, limit, timeout_fn)


def follow(
    directory: str, interval: float, limit: float | None, timeout_fn: Callable[[], object] | None,
    clock: Callable[[], float] = time.monotonic, nap: Callable[[float], object] = time.sleep,
) -> Iterator[str]:
    """Local. See `checkpoints_iterator`, whose arguments are the first four.

    Args:
        directory: As `checkpoint_dir`.
        interval: As `min_interval_secs`.
        limit: As `timeout`.
        timeout_fn: As there.
        clock: Tells the seconds, and is never set.
        nap: Lets so many of them pass.
    """
    seen: object = None
    waiting_since = clock()
    not_before = waiting_since
    while True:
        # Before the look: what is saved last is saved before the end.
        has_ended = training_has_ended()
        path, mark = _look(directory)
        now = clock()
        if path is not None and mark != seen and (has_ended or now >= not_before):
            seen = mark
            yield path
            waiting_since = clock()
            not_before = now + interval
            continue
        if has_ended:
            logger.info("%s: the training has ended", directory)
            return
        left = _LOOK_SECONDS if limit is None else max(waiting_since, not_before) + limit - now
        if left <= 0:
            logger.info("%s: no new checkpoint for %g s", directory, limit)
            if timeout_fn is None or timeout_fn():
                return
            waiting_since = clock()
        nap(min(_LOOK_SECONDS, max(left, _LEAST_SECONDS)))


def _look(directory: str) -> tuple[str | None, object]:
    """The path of the latest checkpoint, None if there is none, and what tells it from another one of that name."""
    try:
        path = latest_checkpoint(directory)
    except DamagedCheckpointError as error:
        # The next save writes the state file anew.
        _warn_once(str(error))
        path = None
    if path is None and os.path.exists(directory) and not os.path.isdir(directory):
        raise NotADirectoryError(
            errno.ENOTDIR, "no checkpoint can come to a file: expected the directory to which they are saved, or where "
            "it will be made; one checkpoint is read by Checkpoint.restore", directory
        )
    if path is None:
        return None, None
    try:
        status = os.stat(path)
    except FileNotFoundError:
        # Deleted a moment ago; the next one is about to be named.
        return None, None
    return path, (path, status.st_ino, status.st_mtime_ns)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s. Waiting for the next checkpoint", text)
