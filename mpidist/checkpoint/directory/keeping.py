"""The checkpoints of a directory that are kept: the latest, the best, and some for good.

The metrics of a checkpoint `ckpt-3.h5` are in the small file `ckpt-3.h5.metrics` beside it, which any process may
write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpidist.arguments import described, number, whole
from mpidist.checkpoint.directory.state import CheckpointEntry, DirectoryState, replace_file, require_file, retire

logger = logging.getLogger("mpidist")

SECONDS_PER_HOUR = 3600.0
METRICS_SUFFIX = ".metrics"
MODES = ("min", "max")


@dataclass(frozen=True)
class KeepingRules:
    """The rules of one manager; see `CheckpointManager`.

    Attributes:
        max_to_keep: Number of checkpoints that stay; None keeps all.
        every_seconds: See `state.retire`.
        best: The name of the metric that decides which checkpoint is the best; None where none is kept as the best.
        mode: "min" or "max".
        every_steps: The number of steps of whose multiples checkpoints are kept for good.
    """

    max_to_keep: int | None
    every_seconds: float | None
    best: str | None
    mode: str
    every_steps: int | None

    def retire(self, state: DirectoryState) -> tuple[DirectoryState, list[str]]:
        """Local. Choose the checkpoints that a directory has too many of; see `state.retire`."""
        if self.best is None or self.max_to_keep is None:
            return retire(state, self.max_to_keep, self.every_seconds)
        # Those that are old, and have no value yet, wait for it while some more are saved.
        count = max(0, len(state.entries) - self.max_to_keep)
        old = [
            replace(entry, waited=entry.waited + 1) if entry.value is None else entry for entry in state.entries[:count]
        ]
        best = self.best_of(state.entries)
        spared = {entry.name for entry in old if entry.value is None and entry.waited <= self.max_to_keep}
        waiting = replace(state, entries=(*old, *state.entries[count:]))
        return retire(waiting, self.max_to_keep, self.every_seconds, spared | ({best.name} if best else set()))

    def best_of(self, entries: Iterable[CheckpointEntry]) -> CheckpointEntry | None:
        """Local. The checkpoint with the best value, of equal ones the first; None where no value is a number."""
        valued = [(entry.value, entry) for entry in entries if entry.value is not None and not math.isnan(entry.value)]
        if not valued:
            return None
        choose = min if self.mode == "min" else max
        return choose(valued, key=lambda pair: pair[0])[1]

    def with_values(self, directory: str, state: DirectoryState) -> DirectoryState:
        """Local. A state with the values of its checkpoints, as their files of metrics have them."""
        if self.best is None:
            return state
        entries = [
            replace(entry, value=read_metrics(os.path.join(directory, entry.name)).get(self.best))
            for entry in state.entries
        ]
        return replace(state, entries=tuple(entries))

    def value_in(self, metrics: Mapping[str, float] | None) -> float | None:
        """Local. The value that decides, among the metrics of a checkpoint; None where there is none."""
        return None if metrics is None or self.best is None else metrics.get(self.best)

    def warn_of(self, path: str, metrics: Mapping[str, float] | None) -> None:
        """Local. Warn of a new checkpoint whose metrics lack the value that decides, or have NaN."""
        value = self.value_in(metrics)
        if metrics is not None and self.best is not None and (value is None or math.isnan(value)):
            logger.warning(
                "checkpoint %r is not the best one, whatever others have: its metric %r is %s", path, self.best,
                "missing" if value is None else value,
            )

    def is_for_good(self, step: int | None) -> bool:
        """Local. Whether a checkpoint of this step is kept for good."""
        return self.every_steps is not None and step is not None and step % self.every_steps == 0


def keeping_rules(
    max_to_keep: int | None, every_hours: float | None, best: str | None, mode: str, every_steps: int | None
) -> KeepingRules:
    """Local. The rules of these arguments of a `CheckpointManager`.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument has a wrong type.
    """
    if max_to_keep is not None and whole("max_to_keep", max_to_keep) <= 0:
        raise ValueError(f"`max_to_keep` must be a positive integer, or None to keep all, got {max_to_keep!r}")
    seconds = None
    if every_hours is not None:
        seconds = number("keep_checkpoint_every_n_hours", every_hours, least=0) * SECONDS_PER_HOUR
    if best is not None and not isinstance(best, str):
        raise TypeError(f"`keep_best` must be the name of a metric, or None, got {described(best)}")
    if mode not in MODES:
        raise ValueError(f"`mode` must be 'min' or 'max', got {mode!r}")
    steps = None if every_steps is None else whole("keep_every_n_steps", every_steps, least=1)
    return KeepingRules(max_to_keep, seconds, best, mode, steps)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Local. Metrics as Python floats, None where there are none.

    Raises:
        TypeError: `metrics` is no dictionary of numbers by name.
    """
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a dictionary of numbers by name, got {described(metrics)}")
    checked = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"`metrics` must have strings as keys, got {name!r}")
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            checked[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"`metrics[{name!r}]` must be a number, got {described(value)}") from None
    return checked


def read_metrics(path: str) -> dict[str, float]:
    """Local. The metrics of a checkpoint; empty where it has none. A damaged file is a warning, and has none."""
    try:
        with open(path + METRICS_SUFFIX, encoding="utf-8") as file:
            content = json.loads(file.read())
        return {str(name): float(value) for name, value in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read: its checkpoint counts as not evaluated: %s", path + METRICS_SUFFIX, error)
        return {}


def write_metrics(path: str, metrics: Mapping[str, float]) -> None:
    """Local. Add metrics to those of an existing checkpoint.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        OSError: They cannot be written.
    """
    require_file(path)
    replace_file(path + METRICS_SUFFIX, json.dumps({**read_metrics(path), **metrics}).encode() + b"\n")


def forget_metrics(path: str) -> None:
    """Local. Delete the metrics of a checkpoint that is to be replaced."""
    if os.path.lexists(path + METRICS_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + METRICS_SUFFIX)


def require_directory(directory: str, state: DirectoryState) -> None:
    """Local. Raise unless the directory to which checkpoints were saved still exists.

    Args:
        directory: The directory.
        state: The known content of the directory.

    Raises:
        FileNotFoundError: It does not exist, or has none of these checkpoints: its file system was unmounted, for
            instance.
    """
    known = [name for name in (state.latest, *(entry.name for entry in state.entries)) if name]
    try:
        there = os.listdir(directory or os.curdir)
    except (FileNotFoundError, NotADirectoryError):
        there = None
    if known and not there:
        what = "is gone" if there is None else "is empty"
        raise FileNotFoundError(
            errno.ENOENT,
            f"nothing was saved: the directory {directory!r} {what}, and was expected to have {known[0]!r}. Its "
            "file system was unmounted, or it was deleted. Bring it back and save again; or make another "
            "CheckpointManager, which begins with an empty directory"
        )
