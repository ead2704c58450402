"""`CSVLogger`: writes the values of epochs into a file."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from typing_extensions import override

from mpidist.checkpoint.directory.state import as_path
from mpidist.comm.group.agreement import on_first_rank
from mpidist.training.callbacks.callback import Callback, Logs


class CSVLogger(Callback):
    """Collective. Writes the values of each epoch into a CSV file, on the chief.

    A training that is resumed continues its file: lines of epochs that are trained again are replaced. An error of
    writing is raised on every rank.

    Args:
        filename: The file.
        separator: The text between the values of a line.
        append: Whether to keep the lines that the file has when a training begins.

    Raises:
        TypeError: `filename` is no path.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", *, append: bool = False) -> None:
        self.filename = as_path("filename", filename)
        self.separator = separator
        self.append = append
        self._names: list[str] = []

    @override
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Collective. See `Callback.on_train_begin`."""
        self._together("opening", self._begin)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Collective. See `Callback.on_epoch_end`."""
        self._together("writing", lambda: self._write(epoch, logs or {}))

    def _together(self, what: str, function: Any) -> None:
        trainer = self.trainer
        everyone = trainer.strategy.replicas.everyone
        on_first_rank(everyone, f"{what} {self.filename!r}", lambda: function() if trainer.is_writer else None)

    def _begin(self) -> None:
        path, epoch = Path(self.filename), self.trainer.position.epoch
        self._names = []
        rows: list[list[str]] = []
        if path.exists() and (self.append or epoch):
            with path.open(newline="") as file:
                rows = list(csv.reader(file, delimiter=self.separator))
        if rows and rows[0][:1] == ["epoch"]:
            self._names = rows[0][1:]
            if not self.append:
                # After the last save the program before may have written further lines.
                rows = [row for row in rows if row[0] == "epoch" or int(row[0]) < epoch]
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        with beside.open("w", newline="") as file:
            csv.writer(file, delimiter=self.separator).writerows(rows)
        beside.replace(path)

    def _write(self, epoch: int, logs: Logs) -> None:
        with Path(self.filename).open("a", newline="") as file:
            writer = csv.writer(file, delimiter=self.separator)
            if not self._names:
                self._names = sorted(logs)
                writer.writerow(["epoch", *self._names])
            writer.writerow([epoch, *(logs.get(name, "") for name in self._names)])
