"""The files in which ranks and `mpidist run` meet: one folder for each start of a job.

- `word`: how the job ended. `run` makes it with all its blocks, so that a disk that fills up later does not hide how a
  job has ended. Without a word the job has died.
- `rank-0` and so on: each rank makes its own when it imports mpidist, and adds a line when it leaves. A child of a rank
  finds the file of its parent, and so knows that it is no rank.
- `events`: what was restored, saved, or seen to die, a line each.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# The variable in which `mpidist run` names the folder.
VARIABLE = "MPIDIST_RUN"
FINISHED, FAILED, PREEMPTED, INTERRUPTED = "finished", "failed", "preempted", "interrupted"
_BYTES = 16384
_BODY = 64
_HEAD = struct.Struct("<8sII")
_MARK = b"mpidist\n"


class Word(NamedTuple):
    """The end of a job, as its ranks report it.

    Attributes:
        kind: `FINISHED`, `FAILED`, `PREEMPTED` or `INTERRUPTED`.
        code: The exit code of the program.
        rank: The rank that left the word.
        text: The error, for people; empty if there is none.
        time: The time, in seconds since 1970.
    """

    kind: str
    code: int
    rank: int
    text: str
    time: float


def make_folder(folder: Path) -> None:
    """Local. Make the folder of one start, with room for the word.

    Args:
        folder: The folder, which does not exist yet.

    Raises:
        OSError: It cannot be made, or the file system has no room for the word.
    """
    folder.mkdir()
    descriptor = os.open(folder / "word", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Not by `posix_fallocate` alone: some file systems of clusters have none, and others keep no promise.
        os.pwrite(descriptor, bytes(_BYTES), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_word(folder: Path, word: Word) -> None:
    """Local. Leave a word. The first one counts, but that of a rank that has finished gives way to any other.

    Args:
        folder: The folder of this start.
        word: The word; its text is cut where it is too long.

    Raises:
        OSError: It cannot be written.
    """
    descriptor = os.open(folder / "word", os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # Another rank leaves its word now.
        except OSError:
            pass  # A file system without locks.
        left = _parse(os.pread(descriptor, _BYTES, 0))
        if left is not None and (left.kind != FINISHED or word.kind == FINISHED):
            return
        body = _body(word)
        # The mark comes last: a kill in between leaves no word.
        os.pwrite(descriptor, bytes(_HEAD.size), 0)
        os.pwrite(descriptor, body, _BODY)
        os.pwrite(descriptor, _HEAD.pack(_MARK, len(body), zlib.crc32(body)), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _body(word: Word) -> bytes:
    text = word.text
    # What a character becomes in JSON has at most 12 bytes.
    while len(body := json.dumps(word._replace(text=text)).encode()) > _BYTES - _BODY:
        text = text[-(len(text) // 2) :]
    return body


def read_word(folder: Path) -> Word | None:
    """Local. The word that the job has left; None if it has left none.

    Args:
        folder: The folder of this start.

    Raises:
        OSError: The file cannot be read.
    """
    return _parse((folder / "word").read_bytes())


def _parse(data: bytes) -> Word | None:
    if len(data) < _BODY:
        return None
    mark, length, checksum = _HEAD.unpack_from(data)
    body = data[_BODY : _BODY + length]
    if mark != _MARK or zlib.crc32(body) != checksum:
        return None
    return Word(*json.loads(body))


def add_line(path: Path, content: dict[str, Any]) -> None:
    """Local. Add a line to a file; a full disk is no error.

    Args:
        path: The file, made if it is missing.
        content: The content of the line.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(content).encode() + b"\n")
        finally:
            os.close(descriptor)


def read_lines(path: Path, begin: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Local. The whole lines of a file from a position on, and the position after them.

    Args:
        path: The file; one that does not exist has no lines.
        begin: The position, in bytes.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read()
    except OSError:
        return [], begin
    whole = data[: data.rfind(b"\n") + 1]
    return [*_parsed(whole)], begin + len(whole)


def _parsed(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                yield content


def note(event: str, **facts: Any) -> None:
    """Local. Note an event of the job for `mpidist run`; nothing where it has not started this job.

    Args:
        event: "opened", "restored", "saved" or "died".
        **facts: Facts about the event.
    """
    folder = os.environ.get(VARIABLE)
    if folder:
        add_line(Path(folder, "events"), {"event": event, "time": time.time(), **facts})
