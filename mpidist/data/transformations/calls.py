"""`num_parallel_calls` and `deterministic`: the arguments of tf.data for calls that run at the same time."""

from __future__ import annotations

from mpidist.arguments import flag
from mpidist.data.dataset_base import check_count
from mpidist.data.reading.workers import ReaderThreads, automatic_count

AUTOTUNE = -1


def workers_of(subject: str, num_parallel_calls: int | None, deterministic: bool | None) -> ReaderThreads | None:
    """Local. The threads that two arguments ask for; None where one call at a time is asked for.

    Args:
        subject: The transformation, for errors.
        num_parallel_calls: Number of threads; AUTOTUNE chooses, None and 1 mean no threads.
        deterministic: An argument that is only checked. Elements keep their order even where it is False: ranks rely on
            that.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The number is 0 or less, and not AUTOTUNE.
    """
    if deterministic is not None:
        flag("deterministic", deterministic, owner=f"{subject}: ")
    if num_parallel_calls is None:
        return None
    number = check_count(f"{subject}: `num_parallel_calls`", num_parallel_calls, AUTOTUNE)
    if number == 0:
        raise ValueError(f"{subject}: `num_parallel_calls` must be None, AUTOTUNE or at least 1, got 0")
    chosen = automatic_count() if number == AUTOTUNE else number
    return ReaderThreads(chosen) if chosen > 1 else None
