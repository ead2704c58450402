"""A directory of checkpoints: the names in it, and the state file that names the latest one.

The state file is called `checkpoint`, as tf.train's is. It is a small JSON text with names relative to the directory.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple, overload

from mpidist.checkpoint.file.positional import sync_directory, write_at
from mpidist.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger("mpidist")

STATE_FILE = "checkpoint"
LOCK_FILE = "checkpoint.lock"
SUFFIX = ".h5"
_FALLBACK = (
    "`restore_or_initialize(fallback=True)`, or `mpidist.latest_checkpoint(directory, fallback=True)`, takes the "
    "latest intact checkpoint; to start from the beginning, name another directory"
)


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint of a directory.

    Attributes:
        name: The file's name, without the directory.
        timestamp: The time at which it was saved, in seconds since 1970.
        is_for_good: Whether it is never deleted, because of its step.
        waited: The number of saves for which it was kept only since its metric was not known.
        value: Its metric, where one decides which is the best; None where it was not evaluated. The state file does not
            have it.
    """

    name: str
    timestamp: float
    is_for_good: bool = False
    waited: int = 0
    value: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class DirectoryState:
    """The content of the state file.

    Attributes:
        entries: The checkpoints that a manager has saved and may delete one day, the latest last.
        last_preserved: The time at which the last checkpoint that is kept for good was saved, in seconds since 1970.
        latest: Name of the checkpoint that was saved last, by a manager or not; None if there is none.
    """

    entries: tuple[CheckpointEntry, ...] = ()
    last_preserved: float = 0.0
    latest: str | None = None


class DirectoryWork(NamedTuple):
    """The work of the rank that manages the directory, while a checkpoint is written.

    Attributes:
        before: Functions that are called one by one before the file is made.
        announce: A function that is called when all ranks have written, before the file gets its name.
        after: A function that is called when the file has its name, with the time of that in seconds since 1970.
        end: A function that is called at the end of a save in the background, also of one that has failed.
    """

    before: Sequence[Callable[[], object]] = ()
    announce: Callable[[], object] | None = None
    after: Callable[[float], object] | None = None
    end: Callable[[], object] | None = None


def as_path(argument: str, value: Any) -> str:
    """Local. A path as text.

    Raises:
        TypeError: `value` is no path. `argument` is the name of the caller's argument.
    """
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"`{argument}` must be a path (a string or a pathlib.Path), got {value!r}")
    return os.fsdecode(value)


def file_of(path: str | os.PathLike[str]) -> str:
    """Local. Make a checkpoint's file name: `path`, with `.h5` added where it is missing."""
    text = as_path("path", path)
    return text if text.endswith(SUFFIX) else text + SUFFIX


@overload
def read_state(directory: str, otherwise: None = None) -> DirectoryState | None: ...
@overload
def read_state(directory: str, otherwise: DirectoryState) -> DirectoryState: ...
def read_state(directory: str, otherwise: DirectoryState | None = None) -> DirectoryState | None:
    """Local. Read the state file.

    Args:
        directory: The directory of the state file.
        otherwise: The state if the file is lost, or damaged, which is then a warning.

    Returns:
        Its content, or `otherwise`: None by default, where there is no such file.

    Raises:
        DamagedCheckpointError: It is empty, has no valid content, or names files outside the directory, and there is no
            `otherwise`.
        CheckpointError: It is no regular file.
        OSError: It cannot be read.
    """
    path = os.path.join(directory, STATE_FILE)
    try:
        # A pipe would be waited for.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"expected {path!r} to be a checkpoint state file, got no regular file. Remove it")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return otherwise
    except UnicodeDecodeError:
        text = "not UTF-8"
    try:
        return _decode_state(text)
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        why = f"it is not a valid checkpoint state file: {error}" if text.strip() else "it is empty"
        damage = (
            f"Invalid checkpoint state loaded from {directory!r}: {path!r} does not name the latest checkpoint: {why}. "
            f"{_FALLBACK}"
        )
        if otherwise is None:
            raise DamagedCheckpointError(damage) from None
        logger.warning("%s", damage)
        return otherwise


def _decode_state(text: str) -> DirectoryState:
    content = json.loads(text)
    names, times = content["all_model_checkpoint_paths"], content["all_model_checkpoint_timestamps"]
    latest, preserved = content["model_checkpoint_path"], content["last_preserved_timestamp"]
    if not isinstance(names, list) or not isinstance(times, list):
        raise TypeError("expected lists of names and times")
    for name in [*names, latest or "none"]:
        # Old checkpoints are deleted by these names.
        is_name = isinstance(name, str) and os.path.basename(name) == name and "\0" not in name
        if not is_name or name in ("", os.curdir, os.pardir):
            raise ValueError(f"expected names of files in the same directory, got {repr(name)[:200]}")
    for seconds in [*times, preserved]:
        if type(seconds) not in (int, float) or not math.isfinite(seconds):
            raise ValueError(f"expected seconds since 1970, got {repr(seconds)[:200]}")
    # Earlier versions have no such lists.
    good, waited = content.get("for_good_model_checkpoint_paths", []), content.get("waiting_model_checkpoint_saves", {})
    if not isinstance(good, list) or not isinstance(waited, dict) or not {*map(type, waited.values())} <= {int}:
        raise TypeError("expected a list of names, and numbers by name")
    more = map(set(good).__contains__, names), map(waited.get, names, [0] * len(names))
    entries = tuple(starmap(CheckpointEntry, zip(names, map(float, times), *more, strict=True)))
    return DirectoryState(entries, float(preserved), latest or None)


def unnamed(directory: str, names: Iterable[str]) -> DamagedCheckpointError:
    """Local. The error for checkpoints of which no state file names the latest."""
    return DamagedCheckpointError(
        f"{os.path.join(directory, STATE_FILE)!r} was expected to name the latest of the existing checkpoints "
        f"({', '.join(list(names)[:8])}), got no such file, or one that names none of them: it was lost, or is "
        f"damaged. {_FALLBACK}"
    )


def write_state(directory: str, state: DirectoryState) -> None:
    """Local. Replace the state file; the old one stays until the new one is whole.

    Raises:
        OSError: It cannot be written.
    """
    content: dict[str, Any] = {
        "model_checkpoint_path": state.latest or "",
        "all_model_checkpoint_paths": list(map(attrgetter("name"), state.entries)),
        "all_model_checkpoint_timestamps": list(map(attrgetter("timestamp"), state.entries)),
        "last_preserved_timestamp": state.last_preserved,
    }
    good = list(map(attrgetter("name"), filter(attrgetter("is_for_good"), state.entries)))
    if good:
        content["for_good_model_checkpoint_paths"] = good
    waited = dict(map(attrgetter("name", "waited"), filter(attrgetter("waited"), state.entries)))
    if waited:
        content["waiting_model_checkpoint_saves"] = waited
    path = os.path.join(directory, STATE_FILE)
    replace_file(path, json.dumps(content, indent=1).encode() + b"\n")


def begin_state(directory: str) -> None:
    """Local. Make a state file that names no checkpoint where there is none: a missing one would count as lost.

    Raises:
        OSError: It cannot be written.
    """
    if not os.path.lexists(os.path.join(directory, STATE_FILE)):
        write_state(directory, DirectoryState(last_preserved=time.time()))


def make_latest(path: str, now: float) -> None:
    """Local. Name a checkpoint, saved at `now` by no manager, as its directory's latest; managers do not delete it.

    Raises:
        OSError: The state file cannot be written.
    """
    directory, name = os.path.split(path)
    state = read_state(directory, DirectoryState(last_preserved=now))
    entries = []
    for entry in state.entries:
        if entry.name != name:
            entries.append(entry)
    write_state(directory, replace(state, entries=tuple(entries), latest=name))


def replace_file(path: str, data: bytes) -> None:
    """Local. Give a small file new content, durably: readers see the old content or the new one, never a mixture.

    Raises:
        OSError: It cannot be written.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        write_at(descriptor, data, 0)
        # Before the rename: file systems may put a new name on the disk before its content. After a crash
        # the name would then be that of an empty file, and the old content would be lost.
        os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        # The directory may be deleted, or read-only since the failure.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    sync_directory(directory)


def candidates(directory: str, state: DirectoryState | None) -> list[str]:
    """Local. List the checkpoints of a directory: the latest first, then the state file's, then others by their age.

    Returns:
        Names of existing files.
    """
    named = [] if state is None else [state.latest, *(entry.name for entry in reversed(state.entries))]
    others = glob.glob(os.path.join(glob.escape(directory), f"*{SUFFIX}"))
    # By name where the times are equal: they may be a copy's. Number 10 is later than number 9.
    others.sort(key=lambda path: (_written_at(path), _parts_of(path)), reverse=True)
    names = dict.fromkeys([*filter(None, named), *map(os.path.basename, others)])
    return [name for name in names if os.path.isfile(os.path.join(directory, name))]


def _parts_of(path: str) -> list[str | int]:
    """The texts and the numbers of a name, in turn: names that differ in a number are ordered by it."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", path))]


def _written_at(path: str) -> float:
    try:
        return os.path.getmtime(path)
    except OSError:
        # Another job has just deleted it, or it is a link without a target.
        return 0.0


def numbers_of(names: Iterable[str], prefix: str) -> dict[str, int]:
    """Local. The numbers of the checkpoints `prefix-N.h5` among `names`, by name."""
    # No file has a longer name, and Python makes no integer of any length.
    form = re.compile(rf"{re.escape(prefix)}-(\d{{1,255}}){re.escape(SUFFIX)}")
    return {name: int(match[1]) for name in names if (match := form.fullmatch(name))}


def require_file(path: str) -> None:
    """Local. Raise unless there is a file of that name.

    Raises:
        FileNotFoundError: There is no such file; the text names the existing checkpoints.
        IsADirectoryError: It is the name of a directory.
    """
    if os.path.isfile(path):
        return
    for name in (path.removesuffix(SUFFIX), path):
        if os.path.isdir(name):
            raise IsADirectoryError(
                errno.EISDIR, f"expected the path of a checkpoint, got the directory {name!r}; its latest checkpoint "
                f"is mpidist.latest_checkpoint({name!r})"
            )
    directory = os.path.dirname(path) or "."
    names = sorted(os.path.basename(name) for name in glob.glob(os.path.join(glob.escape(directory), f"*{SUFFIX}")))
    if names:
        there = f"the directory has {', '.join(names[-8:])}"
    else:
        there = "the directory has no checkpoint" if os.path.isdir(directory) else "its directory does not exist"
    raise FileNotFoundError(errno.ENOENT, f"no checkpoint {path!r}; {there}")


def require_writable(directory: str) -> None:
    """Local. Make a directory where it is missing, and a file in it, of which nothing stays.

    Raises:
        OSError: No checkpoint can be saved there.
    """
    try:
        os.makedirs(directory or ".", exist_ok=True)
        with tempfile.TemporaryFile(dir=directory or "."):
            return
    except OSError as error:
        raise OSError(
            error.errno,
            f"no checkpoint can be saved to {directory!r}: {error.strerror}. Name a directory in which this user can "
            "create files",
        ) from None


def retire(
    state: DirectoryState, max_to_keep: int | None, keep_every_seconds: float | None, spared: Set[str] = frozenset()
) -> tuple[DirectoryState, list[str]]:
    """Local. Choose the checkpoints that a directory has too many of.

    Args:
        state: All checkpoints that may be deleted.
        max_to_keep: Number of checkpoints that stay, at least 1; None keeps all.
        keep_every_seconds: A checkpoint due to be deleted is kept for good if it was saved at least this many seconds
            after the last one that is kept for good, or, by a clock that was set back, before it.
        spared: The names of those that stay beside the number.

    Returns:
        The state without the checkpoints that are deleted or are kept for good, and the names of those to delete.
    """
    if max_to_keep is None:
        return state, []
    entries, preserved, gone = list(state.entries), state.last_preserved, []
    stay: list[CheckpointEntry] = []
    while len(entries) > max_to_keep:
        oldest = entries.pop(0)
        if oldest.name in spared:
            stay.append(oldest)
            continue
        if oldest.is_for_good:
            continue
        # Saved before the last one that is kept: the clock was set back, and the true difference is unknown.
        was_set_back = oldest.timestamp < preserved
        if keep_every_seconds is not None and (
            was_set_back or oldest.timestamp - keep_every_seconds >= preserved
        ):
            preserved = oldest.timestamp
        else:
            gone.append(oldest.name)
    return replace(state, entries=(*stay, *entries), last_preserved=preserved), gone
