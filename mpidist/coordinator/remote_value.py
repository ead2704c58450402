"""Values of closures, and of workers."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from mpidist.errors import CancelledError
from mpidist.parameter_server.protocol.references import load
from mpidist.parameter_server.queue.work import ClosureEnd, End

# Every result that names a variable has these bytes in it, and few others.
_VARIABLE = b"variable"


class RemoteValue:
    """Local. The result of a scheduled function, which may not exist yet.

    Args:
        number: The number of the closure.
        wait: A function that returns when the function of a number has ended.
        find: A function that returns the object of a handle in the result.
        look: Runs waiting functions, in a job of one process.
        note_told: A function that is called with the end of a scheduled function, once its error was raised in the
            program.
    """

    def __init__(
        self, number: int, wait: Callable[[int], None], find: Callable[[tuple[Any, ...]], Any],
        look: Callable[[], None], note_told: Callable[[ClosureEnd], None],
    ) -> None:
        self.number = number
        self._note_told = note_told
        self._wait = wait
        self._find = find
        self._look = look
        self._end: ClosureEnd | None = None
        self._kept: object = None

    @property
    def is_done(self) -> bool:
        """Local. Whether the function has ended. In a job of one process this call runs waiting functions."""
        if self._end is None:
            self._look()
        return self._end is not None

    @property
    def is_at_end(self) -> bool:
        """Local. Whether the function has ended without a value, since the data of the workers had ended."""
        return self._end is not None and self._end.end is End.AT_END

    def set(self, end: ClosureEnd) -> None:
        """Local. Note how the function has ended."""
        self._end = end
        if end.end is End.RESULT and _VARIABLE in end.payload:
            # The memory of a variable is freed when the program drops it: one in a result is kept. `get` reports
            # one that was dropped before.
            with contextlib.suppress(Exception):
                self._kept = load(end.payload, self._find)

    def get(self) -> Any:
        """Local. The result; waits for it.

        Raises:
            Exception: The error that the function raised.
            CancelledError: It was cancelled, since another function had failed.
            EndOfDataError: There is no result; see `is_at_end`.
        """
        if self._end is None:
            self._wait(self.number)
        if self._end is not None and self._end.end is End.ERROR:
            self._note_told(self._end)
        if self._end is None or self._end.end is End.CANCELLED:
            raise CancelledError("The corresponding function is cancelled. Please reschedule the function.")
        if self._end.end is not End.RESULT:
            raise error_of(self._end)
        return load(self._end.payload, self._find)

    fetch = get

    def __repr__(self) -> str:
        state = "in progress" if self._end is None else self._end.end.value
        return f"<mpidist.coordinator.RemoteValue, {state}>"


def error_of(end: ClosureEnd) -> BaseException:
    """Local. The error of a closure, with the worker's traceback."""
    try:
        error: BaseException = pickle.loads(end.payload)
    except Exception as reason:  # its class may be on the worker only
        error = RuntimeError(f"a function has raised an error that cannot be unpickled here: {reason!r}")
    if hasattr(error, "add_note") and end.traceback:
        error.add_note(f"Raised on a worker:\n{end.traceback}")
    return error


class PerWorkerValues:
    """Local. A value or a dataset of each worker's own. A scheduled function gets that of the worker that runs it.

    Args:
        number: The number of the resource.
        iterate: A function that makes the result of `iter`; None if these are no datasets.
    """

    def __init__(
        self, number: int, iterate: Callable[[PerWorkerValues], PerWorkerValues] | None = None
    ) -> None:
        self.number = number
        self._iterate = iterate

    @property
    def is_iterator(self) -> bool:
        """Local. Whether each worker has an iterator over its own dataset."""
        return isinstance(self, PerWorkerIterator)

    @property
    def is_at_end(self) -> bool:
        """Local. Whether all workers have reached the end of their data, and a function has asked for more.

        Raises:
            TypeError: These are no iterators.
        """
        raise TypeError("only an iterator has an end: `iter` of a dataset of workers gives iterators")

    def __iter__(self) -> PerWorkerValues:
        if self._iterate is None:
            raise TypeError("these values of workers are not a dataset: pass them to `schedule`")
        return self._iterate(self)

    def __next__(self) -> Any:
        raise NotImplementedError(
            "the elements of a worker's dataset exist on the worker only: pass the iterator to `schedule`, and call "
            "`next` in the function"
        )

    def __repr__(self) -> str:
        return f"<mpidist.coordinator.PerWorkerValues {self.number}>"


class PerWorkerIterator(PerWorkerValues):
    """The iterators of workers over their own datasets, which a `Checkpoint` may hold.

    Args:
        number: The number of the resource.
        at_end: Whether iterators have ended on all workers, by their number.
        state: A function that returns what a checkpoint saves, by their number.
        load_state: A function that takes it back, by their number.
    """

    def __init__(
        self, number: int, at_end: Callable[[int], bool], state: Callable[[int], dict[str, Any]],
        load_state: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        super().__init__(number)
        self._at_end = at_end
        self._state = state
        self._load_state = load_state

    @property
    def is_at_end(self) -> bool:
        """Local. Whether all workers have reached the end of their data, and a function has asked for more."""
        return self._at_end(self.number)

    def state(self) -> dict[str, Any]:
        """Local. The state for a checkpoint: how far each worker has come, in the functions that count.

        Waits until each worker has begun.

        Raises:
            CheckpointError: A dataset is not one of `mpidist.data`, or could not be made.
        """
        return self._state(self.number)

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Let workers continue where others were, also if there are more of them or fewer.

        Raises:
            CheckpointError: The saved state is not that of workers' iterators.
            RuntimeError: Functions that take these iterators have not ended.
        """
        self._load_state(self.number, saved)
