"""The summary writer: one per log directory, with an event file on the chief and none on the other ranks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpidist.arguments import number, whole
from mpidist.errors import UnavailableError
from mpidist.first_rank import is_chief
from mpidist.summary.step import Step, get_step, set_step

if TYPE_CHECKING:
    from mpidist.summary.event_file import EventFile

# The defaults of tf.summary: a writer keeps at most this number of summaries, for at most this time.
MAX_QUEUE = 10
FLUSH_MILLIS = 120_000

# The argument of `record_if`.
Condition = npt.ArrayLike | Callable[[], npt.ArrayLike]


class _Recording(threading.local):
    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.condition: Condition = True


_recording = _Recording()


class SummaryWriter:
    """Local. The destination of the summaries inside `with writer.as_default():`; `create_file_writer` makes it.

    Args:
        logdir: The log directory, for texts.
        file: The chief's event file; None on ranks that do not write.
        max_queue: Number of summaries that are kept in memory before they are written.
        flush_seconds: The longest time in seconds that a summary is kept in memory.
    """

    def __init__(self, logdir: str, file: EventFile | None, *, max_queue: int, flush_seconds: float) -> None:
        self.logdir = logdir
        self._file = file
        self._max_queue = max_queue
        self._flush_seconds = flush_seconds
        self._lock = threading.Lock()
        self._waiting = 0
        self._flushed = time.monotonic()
        self._is_open = True
        if file is not None:
            # A finalizer also runs at the end of the program, so summaries are written even without `close`.
            weakref.finalize(self, file.close)

    @contextmanager
    def as_default(self, step: Step | None = None) -> Iterator[SummaryWriter]:
        """Local. Send this thread's summaries to this writer until the end of the `with`, then flush it.

        Args:
            step: The default step inside the `with`.

        Raises:
            RuntimeError: The writer is closed.
        """
        self._require_open()
        before, step_before = _recording.writer, get_step()
        self.set_as_default(step)
        try:
            yield self
        finally:
            _recording.writer = before
            if step is not None:
                set_step(step_before)
            self.flush()

    def set_as_default(self, step: Step | None = None) -> None:
        """Local. Send this thread's summaries to this writer from now on.

        Args:
            step: The default step from now on.

        Raises:
            RuntimeError: The writer is closed.
        """
        self._require_open()
        _recording.writer = self
        if step is not None:
            set_step(step)

    @contextmanager
    def writing(self) -> Iterator[EventFile | None]:
        """Local. The file to write one summary to; None on ranks that do not write.

        Raises:
            RuntimeError: The writer is closed.
        """
        self._require_open()
        if self._file is None:
            yield None
            return
        with self._lock:
            yield self._file
            self._waiting += 1
            if self._waiting >= self._max_queue or time.monotonic() - self._flushed >= self._flush_seconds:
                self._flush(self._file)

    def flush(self) -> None:
        """Local. Write the summaries that are kept in memory, so that TensorBoard can read them."""
        if self._file is not None and self._is_open:
            with self._lock:
                self._flush(self._file)

    def close(self) -> None:
        """Local. Flush and close the file. A second call does nothing."""
        if self._file is not None and self._is_open:
            with self._lock:
                self._file.close()
        self._is_open = False

    def _flush(self, file: EventFile) -> None:
        file.flush()
        self._waiting, self._flushed = 0, time.monotonic()

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"the summary writer of {self.logdir!r} is closed; make another one with create_file_writer"
            )

    def __repr__(self) -> str:
        return f"<mpidist.summary.SummaryWriter {self.logdir!r}, {'writes' if self._file else 'does not write'} here>"


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
) -> SummaryWriter:
    """Local. Make a writer of TensorBoard event files. Call it on every rank; only the chief writes.

    The chief is the first rank of the strategy in whose scope the writer is made. Outside any scope it is the first
    rank of the job; where the cluster has evaluators, each of them is its own chief.

    Args:
        logdir: Directory for a new event file; a missing directory is created.
        max_queue: Number of summaries that are kept in memory before they are written; default 10.
        flush_millis: The longest time in milliseconds that a summary is kept in memory; default two minutes. It is
            checked at the next summary.
        filename_suffix: Last part of the file's name; default ".v2".
        name: Kept for code written for TensorFlow; it changes nothing.

    Returns:
        The writer.

    Raises:
        UnavailableError: tensorboardX is not installed; on every rank.
        ValueError: `max_queue` is not positive, or `flush_millis` is negative.
        OSError: The file cannot be created; on the chief.
    """
    del name  # an argument of TensorFlow
    queue = MAX_QUEUE if max_queue is None else whole("max_queue", max_queue)
    millis = FLUSH_MILLIS if flush_millis is None else number("flush_millis", flush_millis)
    if queue < 1 or millis < 0:
        raise ValueError(
            f"expected `max_queue` of at least 1 and `flush_millis` of at least 0, got {max_queue!r} and "
            f"{flush_millis!r}"
        )
    # Every rank checks for tensorboardX, so that all raise the same error; only the chief loads it.
    if importlib.util.find_spec("tensorboardX") is None:
        raise UnavailableError(
            "mpidist.summary writes TensorBoard event files with tensorboardX, which is not installed here. "
            "pip install 'mpidist[tensorboard]', or pip install tensorboardX"
        )
    directory = os.fspath(logdir)
    file: EventFile | None = None
    if is_chief():
        suffix = ".v2" if filename_suffix is None else filename_suffix
        file = importlib.import_module("mpidist.summary.event_file").EventFile(directory, suffix)
    return SummaryWriter(directory, file, max_queue=queue, flush_seconds=millis / 1000)


@contextmanager
def record_if(condition: Condition) -> Iterator[None]:
    """Local. Write this thread's summaries only if a condition holds; of nested conditions the innermost counts.

    Args:
        condition: True, False, a variable of dtype bool, or a function that is called for each summary, for example
            `lambda: optimizer.iterations % 100 == 0`. It must have the same value on every rank: where it holds, the
            ranks read `data`, which may be a collective call.

    Raises:
        TypeError: The condition has another type; or the function returns another type, which is raised when it is
            called.
    """
    if not callable(condition):
        _holds(condition)
    before, _recording.condition = _recording.condition, condition
    try:
        yield
    finally:
        _recording.condition = before


def should_record_summaries() -> bool:
    """Local. Whether a summary would be recorded now; the same on every rank.

    Returns:
        False without a default writer; else the condition of the innermost `record_if`; without one, True.

    Raises:
        TypeError: The function given to `record_if` does not return a bool.
    """
    return recording_writer() is not None


def recording_writer() -> SummaryWriter | None:
    """Local. The default writer of this thread; None if there is none or `record_if` forbids recording."""
    writer, condition = _recording.writer, _recording.condition
    if writer is None:
        return None
    return writer if _holds(condition() if callable(condition) else condition) else None


def flush(writer: SummaryWriter | None = None) -> None:
    """Local. Flush a writer, by default that of this thread; without one it does nothing.

    Raises:
        TypeError: `writer` is no writer.
    """
    chosen = _recording.writer if writer is None else writer
    if chosen is None:
        return
    if not isinstance(chosen, SummaryWriter):
        raise TypeError(
            f"`writer` must be a writer, as mpidist.summary.create_file_writer() makes it, or None, got {chosen!r} of "
            f"type {type(chosen).__name__}"
        )
    chosen.flush()


def _holds(value: npt.ArrayLike) -> bool:
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind != "b":
        raise TypeError(f"`record_if` expects True, False or a function that gives one of them, got {value!r}")
    return bool(array)
