"""The marks of a save in the background: small files beside the new one, by which ranks tell the first one without MPI.

A mark is a text in JSON with a checksum before it: the first rank may read it while it is being written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpidist.checkpoint.file.positional import write_at
from mpidist.checkpoint.transfer import Checksums

_SUFFIX = ".tmp"
_FIRST_SECONDS = 0.002
_LAST_SECONDS = 0.25


class Mark(NamedTuple):
    """The outcome of a rank's part of a save.

    Attributes:
        checksums: The checksums of what it has written and synced.
        error: The reason why it could not write, in words; empty where it could.
    """

    checksums: Checksums
    error: str = ""


def mark_of(path: str, rank: int) -> str:
    """Local. The name of a rank's mark.

    Args:
        path: The temporary name of the checkpoint.
        rank: The rank.
    """
    return f"{path.removesuffix(_SUFFIX)}.{rank}{_SUFFIX}"


def leave_mark(path: str, rank: int, mark: Mark) -> None:
    """Local. Leave the mark of this rank.

    Where it cannot be written, the file is deleted: that takes no room on a full disk, and the first rank sees it.

    Args:
        path: See `mark_of`.
        rank: See `mark_of`.
        mark: The mark.

    Raises:
        OSError: It cannot be written.
    """
    body = json.dumps([[*map(list, mark.checksums.items())], mark.error]).encode()
    try:
        descriptor = os.open(mark_of(path, rank), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            write_at(descriptor, b"%08x" % zlib.crc32(body) + body, 0)
        finally:
            # A network file system sends it to the server now.
            os.close(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def wait_for_marks(path: str, ranks: Sequence[int], wait: Callable[[float], None]) -> dict[int, Mark]:
    """Local. Wait for the marks of other ranks, or for the first one that reports an error.

    Args:
        path: See `mark_of`.
        ranks: The ranks.
        wait: A function that waits for a number of seconds; it raises where no mark can come any more.

    Returns:
        The marks by rank.

    Raises:
        FileNotFoundError: The directory is gone; or the file is, see `leave_mark`.
        OSError: It cannot be read.
    """
    names = {os.path.basename(mark_of(path, rank)): rank for rank in ranks}
    found: dict[int, Mark] = {}
    seconds = _FIRST_SECONDS
    while len(found) < len(ranks) and not any(mark.error for mark in found.values()):
        # By the directory: network file systems remember for a while that a single name was not there.
        directory = os.path.dirname(path) or os.curdir
        before = len(found)
        # Before the file is deleted there may be marks with errors.
        there = os.listdir(directory)
        for name in there:
            rank = names.get(name)
            mark = None if rank is None or rank in found else _read(os.path.join(directory, name))
            if rank is not None and mark is not None:
                found[rank] = mark
        if len(found) > before:
            seconds = _FIRST_SECONDS
        elif os.path.basename(path) not in there:
            raise FileNotFoundError(
                errno.ENOENT, f"{path!r} was deleted before all ranks had written: one could neither write nor say why"
            )
        else:
            wait(seconds)
            seconds = min(1.5 * seconds, _LAST_SECONDS)
    return found


def remove_marks(path: str, ranks: Sequence[int]) -> None:
    """Local. Delete the marks of these ranks; what cannot be deleted is deleted by the next save."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.unlink(mark_of(path, rank))


def _read(path: str) -> Mark | None:
    """A mark; None where it is not whole yet."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        checksum, body = file.read(8), file.read()
        if checksum == b"%08x" % zlib.crc32(body):
            content: list[Any] = json.loads(body)
            checksums = {(number, start): (value, count) for (number, start), (value, count) in content[0]}
            return Mark(checksums, content[1])
    return None
