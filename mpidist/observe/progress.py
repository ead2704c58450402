"""Progress on the chief: a bar on a terminal, plain lines in a log file; nothing on other ranks."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from mpidist import launch
from mpidist.arguments import number, whole
from mpidist.first_rank import is_chief


class Progress:
    """Local. Shows the progress of a loop. Every rank may use it, and only the chief prints.

    The chief is the first rank of the strategy in whose scope the object is made. Outside any scope it is the first
    rank of the job; where the cluster has evaluators, each of them is its own chief.

    Args:
        total: Number of steps, None where unknown.
        description: Text in front of the bar or line.
        initial: Number of steps done before, for example by an earlier run.
        interval_seconds: In a log file, the least time between two lines. The last step always gives a line.
        stream: The output; default: stderr.

    Raises:
        TypeError: A number of steps is no integer, or the interval no number.
        ValueError: One of them is negative.

    Example:
        >>> with Progress(2, description="epoch 1", stream=sys.stdout) as progress:
        ...     progress.update(loss=0.5)
        ...     progress.update(loss=0.25)
        epoch 1: 2/2 loss=0.25
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        description: str = "",
        initial: int = 0,
        interval_seconds: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total = None if total is None else whole("total", total, least=0)
        self.description = description
        self.done = whole("initial", initial, least=0)
        self.interval_seconds = number("interval_seconds", interval_seconds, least=0)
        if stream is not None and not (hasattr(stream, "write") and hasattr(stream, "isatty")):
            raise TypeError(
                f"`stream` must be a text file, for instance sys.stdout, or None, got {stream!r} of type "
                f"{type(stream).__name__}"
            )
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_chief()
        self._values: dict[str, Any] = {}
        self._last_line = time.monotonic()
        self._last_shown = initial
        self._bar: Any = None
        columns = _columns(stream) if self._is_shown else None
        if columns is not None:
            self._bar = tqdm(
                total=total, initial=initial, desc=description, file=self._stream, ncols=columns, leave=False
            )

    def update(self, steps: int = 1, **values: Any) -> None:
        """Local. Add to the number of steps that are done.

        Args:
            steps: Number of steps since the last call.
            values: Values to show after the number; floats are rounded.
        """
        self.done += whole("steps", steps)
        if not self._is_shown:
            return
        self._values.update(values)
        if self._bar is not None:
            self._bar.set_postfix_str(self._format_values(), refresh=False)
            self._bar.update(steps)
            if self.done == self.total:
                # tqdm limits the rate of draws, and after the last step there is no other one.
                self._bar.refresh()
        elif self.done == self.total or time.monotonic() - self._last_line >= self.interval_seconds:
            self._show_line()

    def write(self, text: str) -> None:
        """Root only: the chief. Print a line above the bar, or into the log; other ranks do nothing."""
        if not self._is_shown:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Local. Remove the bar; in a log file, print a last line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._is_shown and self.done > self._last_shown:
            self._show_line()

    def _show_line(self) -> None:
        self._last_line = time.monotonic()
        self._last_shown = self.done
        place = f"{self.done}/{self.total}" if self.total is not None else str(self.done)
        before = f"{self.description}: " if self.description else ""
        print(f"{before}{place} {self._format_values()}".rstrip(), file=self._stream, flush=True)

    def _format_values(self) -> str:
        return " ".join(
            f"{name}={value:.4g}" if isinstance(value, (float, np.floating)) else f"{name}={value}"
            for name, value in self._values.items()
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


def _columns(stream: TextIO | None) -> int | None:
    """The width of the terminal that gets the output, None where the output is not a terminal."""
    if stream is not None:
        return shutil.get_terminal_size().columns if stream.isatty() else None
    path = launch.terminal()
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return shutil.get_terminal_size().columns
    try:
        return os.get_terminal_size(descriptor).columns or shutil.get_terminal_size().columns
    finally:
        os.close(descriptor)
