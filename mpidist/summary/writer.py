"""The summary writer: one per log directory, an event file on the chief and nothing on the other ranks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from mpidist import context, launch
from mpidist.errors import UnavailableError
from mpidist.summary.step import Step, get_step, set_step

if TYPE_CHECKING:
    from mpidist.summary.event_file import EventFile

# Of tf.summary: a writer keeps at most so many summaries, for at most so long.
MAX_QUEUE = 10
FLUSH_MILLIS = 120_000


Condition = npt.ArrayLike | Callable[[], npt.ArrayLike]


class _Ranked(Protocol):
    rank: int


class _Strategy(Protocol):
    communicator: _Ranked


class _State(threading.local):
    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.condition: Condition = True


_state = _State()


class SummaryWriter:
    """What `create_file_writer` gives: where the summaries of `with writer.as_default():` go.

    Args:
        logdir: For people.
        file: Where summaries go; None on ranks that do not write.
        max_queue: How many summaries are kept before they are written out.
        flush_seconds: How long one is kept.
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
            # Also at the end of the program: what is kept is written out by a writer that nobody closes.
            weakref.finalize(self, file.close)

    @contextmanager
    def as_default(self, step: Step | None = None) -> Iterator[SummaryWriter]:
        """Local. Summaries of this thread go here until the end of the `with`; they are flushed then.

        Args:
            step: Default step meanwhile.

        Raises:
            RuntimeError: The writer is closed.
        """
        self._require_open()
        before, step_before = _state.writer, get_step()
        self.set_as_default(step)
        try:
            yield self
        finally:
            _state.writer = before
            if step is not None:
                set_step(step_before)
            self.flush()

    def set_as_default(self, step: Step | None = None) -> None:
        """Local. Summaries of this thread go here from now on.

        Args:
            step: Default step from now on.

        Raises:
            RuntimeError: The writer is closed.
        """
        self._require_open()
        _state.writer = self
        if step is not None:
            set_step(step)

    @contextmanager
    def writing(self) -> Iterator[EventFile | None]:
        """Local. The file for one summary, None on ranks that do not write.

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
        """Local. Write out what is kept, so that TensorBoard sees it."""
        if self._file is not None and self._is_open:
            with self._lock:
                self._flush(self._file)

    def close(self) -> None:
        """Local. Flush, and end the file; a second time does nothing."""
        if self._file is not None and self._is_open:
            with self._lock:
                self._file.close()
        self._is_open = False

    def _flush(self, file: EventFile) -> None:
        file.flush()
        self._waiting, self._flushed = 0, time.monotonic()

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError(f"the summary writer of {self.logdir!r} is closed; make another one")

    def __repr__(self) -> str:
        return f"<mpidist.summary.SummaryWriter {self.logdir!r}, {'writes' if self._file else 'does not write'} here>"


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
) -> SummaryWriter:
    """Local. A writer of TensorBoard event files; call it on every rank, the chief alone writes.

    The chief is the first rank of the strategy in whose scope the writer is made, and outside any scope that of the
    whole job.

    Args:
        logdir: Directory for a new event file; made if it is not there.
        max_queue: How many summaries are kept before they are written out; default 10.
        flush_millis: How long one is kept, looked at when the next one comes; default two minutes.
        filename_suffix: Of the file's name; default ".v2".
        name: Kept for code written for TensorFlow.

    Returns:
        The writer.

    Raises:
        UnavailableError: tensorboardX is not installed; on every rank.
        ValueError: A negative or zero `max_queue`, a negative `flush_millis`.
        OSError: The file cannot be made; on the chief.
    """
    queue = MAX_QUEUE if max_queue is None else max_queue
    millis = FLUSH_MILLIS if flush_millis is None else flush_millis
    if queue < 1 or millis < 0:
        raise ValueError(
            f"expected `max_queue` of at least 1 and `flush_millis` of at least 0, got {max_queue!r} and "
            f"{flush_millis!r}"
        )
    # Looked for on every rank, so that all raise the same; loaded by the one that needs it.
    if importlib.util.find_spec("tensorboardX") is None:
        raise UnavailableError(
            "mpidist.summary writes TensorBoard event files with tensorboardX, which is not installed here. "
            "pip install 'mpidist[tensorboard]', or pip install tensorboardX"
        )
    directory = os.fspath(logdir)
    file: EventFile | None = None
    if _is_chief():
        suffix = ".v2" if filename_suffix is None else filename_suffix
        file = importlib.import_module("mpidist.summary.event_file").EventFile(directory, suffix)
    return SummaryWriter(directory, file, max_queue=queue, flush_seconds=millis / 1000)


@contextmanager
def record_if(condition: Condition) -> Iterator[None]:
    """Local. Inside, this thread's summaries are written only if a condition holds; the innermost one counts.

    Args:
        condition: True, False, a variable of dtype bool, or a function that is asked whenever a summary is written,
            for instance `lambda: optimizer.iterations % 100 == 0`. It must say the same on every rank.

    Raises:
        TypeError: The condition is nothing of that; for a function when it is asked.
    """
    if not callable(condition):
        _holds(condition)
    before, _state.condition = _state.condition, condition
    try:
        yield
    finally:
        _state.condition = before


def should_record_summaries() -> bool:
    """Local. Whether a summary that is written now goes to a writer; the same on every rank.

    Returns:
        False without a default writer, else what the innermost `record_if` says, else True.

    Raises:
        TypeError: The function given to `record_if` gives something else.
    """
    return recording_writer() is not None


def recording_writer() -> SummaryWriter | None:
    """Local. The writer of this thread's innermost `as_default`, if there is one and summaries are to be recorded."""
    writer, condition = _state.writer, _state.condition
    if writer is None:
        return None
    return writer if _holds(condition() if callable(condition) else condition) else None


def flush(writer: SummaryWriter | None = None) -> None:
    """Local. Flush a writer, by default this thread's; nothing without one."""
    chosen = _state.writer if writer is None else writer
    if chosen is not None:
        chosen.flush()


def _holds(value: npt.ArrayLike) -> bool:
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind != "b":
        raise TypeError(f"`record_if` expects True, False or a function that gives one of them, got {value!r}")
    return bool(array)


def _is_chief() -> bool:
    entry = context.innermost()
    if entry is None:
        return launch.world_rank() == 0
    return cast(_Strategy, entry.strategy).communicator.rank == 0
