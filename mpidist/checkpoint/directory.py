"""A directory of checkpoints: the names in it, and the state file that names the latest one.

The state file is called `checkpoint`, as tf.train's is. It is a small JSON text with names relative to the directory.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from mpidist.checkpoint.positional import sync_directory, write_at

logger = logging.getLogger("mpidist")

STATE_FILE = "checkpoint"
SUFFIX = ".h5"


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint of a directory.

    Attributes:
        name: The file's name, without the directory.
        timestamp: When it was saved, in seconds since 1970.
    """

    name: str
    timestamp: float


@dataclass(frozen=True)
class DirectoryState:
    """The content of the state file.

    Attributes:
        entries: The checkpoints that may be deleted one day, the latest last.
        last_preserved: When the last checkpoint that is kept for ever was saved, in seconds since 1970.
    """

    entries: tuple[CheckpointEntry, ...]
    last_preserved: float


class DirectoryWork(NamedTuple):
    """The work of the rank that looks after the directory, before and after a checkpoint is written.

    Attributes:
        before: Called before the file is made.
        after: Called when the file has its name, with the time of that in seconds since 1970.
    """

    before: Callable[[], object] | None = None
    after: Callable[[float], object] | None = None


def file_of(path: str | os.PathLike[str]) -> str:
    """Local. Make a checkpoint's file name: `path`, with `.h5` added where it is missing."""
    text = os.fsdecode(path)
    return text if text.endswith(SUFFIX) else text + SUFFIX


def read_state(directory: str) -> DirectoryState | None:
    """Local. Read the state file.

    Returns:
        Its content, or None where there is no such file, or where it makes no sense (with a warning).

    Raises:
        ValueError: It is empty.
        OSError: It cannot be read.
    """
    path = os.path.join(directory, STATE_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        text = "not UTF-8"
    if not text.strip():
        raise ValueError(f"Invalid checkpoint state loaded from {directory!r}: {path!r} is empty. Delete it")
    try:
        content = json.loads(text)
        names = content["all_model_checkpoint_paths"]
        times = content["all_model_checkpoint_timestamps"]
        entries = tuple(CheckpointEntry(str(name), float(time)) for name, time in zip(names, times, strict=True))
        return DirectoryState(entries, float(content["last_preserved_timestamp"]))
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s: ignored, since it cannot be understood as a checkpoint state file: %s", path, error)
        return None


def write_state(directory: str, state: DirectoryState) -> None:
    """Local. Replace the state file; the old one stays until the new one is whole.

    Raises:
        OSError: It cannot be written.
    """
    content = {
        "model_checkpoint_path": state.entries[-1].name if state.entries else "",
        "all_model_checkpoint_paths": list(map(attrgetter("name"), state.entries)),
        "all_model_checkpoint_timestamps": list(map(attrgetter("timestamp"), state.entries)),
        "last_preserved_timestamp": state.last_preserved,
    }
    path = os.path.join(directory, STATE_FILE)
    replace_file(path, json.dumps(content, indent=1).encode() + b"\n")


def make_latest(path: str, now: float) -> None:
    """Local. Name one checkpoint, saved at `now`, in its directory's state file, and no other.

    Raises:
        OSError: The state file cannot be written.
    """
    directory, name = os.path.split(path)
    write_state(directory, DirectoryState((CheckpointEntry(name, now),), now))


def replace_file(path: str, data: bytes) -> None:
    """Local. Give a small file new content, durably: readers see the old content or the new one, never a mixture.

    Raises:
        OSError: It cannot be written.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        write_at(descriptor, data, 0)
        # Before the rename: file systems may put a new name on the disk before the content behind it. After a crash
        # the name would then stand for an empty file, and the old content would be lost.
        os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    sync_directory(directory)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Local. Find the checkpoint that was saved last in a directory.

    Args:
        directory: The directory to which `Checkpoint.save` or a `CheckpointManager` saves.

    Returns:
        The path, or None where there is no checkpoint, or where the file named by the state file is gone.

    Raises:
        ValueError: The state file is empty.
    """
    directory = os.fsdecode(directory)
    state = read_state(directory)
    if state is None or not state.entries:
        return None
    path = os.path.join(directory, state.entries[-1].name)
    return path if os.path.isfile(path) else None


def require_file(path: str) -> None:
    """Local. Raise unless there is a file of that name.

    Raises:
        FileNotFoundError: Names the checkpoints that are there instead.
    """
    if os.path.isfile(path):
        return
    directory = os.path.dirname(path) or "."
    names = sorted(os.path.basename(name) for name in glob.glob(os.path.join(glob.escape(directory), f"*{SUFFIX}")))
    if names:
        there = f"the directory has {', '.join(names[-8:])}"
    else:
        there = "the directory has no checkpoint" if os.path.isdir(directory) else "its directory does not exist"
    raise FileNotFoundError(errno.ENOENT, f"no checkpoint {path!r}; {there}")


def remove_leftovers(directory: str, prefix: str) -> None:
    """Local. Delete the temporary files of saves that were killed.

    Args:
        directory: The directory of the checkpoints.
        prefix: Their name up to the number. Hold the directory's lock: a temporary file of a job that is saving looks
            just the same.
    """
    here = glob.escape(directory)
    for name in (f"{glob.escape(prefix)}-*{SUFFIX}", STATE_FILE):
        for path in glob.glob(os.path.join(here, f".{name}.*.tmp")):
            _delete(path)


def delete_checkpoints(directory: str, names: Sequence[str]) -> None:
    """Local. Delete checkpoints. One that cannot be deleted is only a warning, since the newer ones are safe."""
    for name in names:
        _delete(os.path.join(directory, name))


def retire(
    state: DirectoryState, max_to_keep: int | None, keep_every_seconds: float | None
) -> tuple[DirectoryState, list[str]]:
    """Local. Choose the checkpoints that a directory has too many of.

    Args:
        state: All checkpoints that may be deleted.
        max_to_keep: Number of checkpoints that stay, at least 1; None keeps all.
        keep_every_seconds: A checkpoint that would be deleted stays for ever if it was saved at least so many seconds
            after the last one that stays for ever.

    Returns:
        The state without the checkpoints that are deleted or stay for ever, and the names of those to delete.
    """
    if max_to_keep is None:
        return state, []
    entries, preserved, gone = list(state.entries), state.last_preserved, []
    while len(entries) > max_to_keep:
        oldest = entries.pop(0)
        if keep_every_seconds is not None and oldest.timestamp - keep_every_seconds >= preserved:
            preserved = oldest.timestamp
        else:
            gone.append(oldest.name)
    return DirectoryState(tuple(entries), preserved), gone


def _delete(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", path, error)
