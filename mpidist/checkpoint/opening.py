"""The opening of a checkpoint file by all ranks: one reads its structure, and each opens the same file."""

from __future__ import annotations

import os
from typing import Any

from mpidist.checkpoint.background.save import wait_for_saves
from mpidist.checkpoint.directory.state import require_file
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.file.choice import EVERYTHING, Choice
from mpidist.checkpoint.file.layout import SAVE_COUNTER
from mpidist.checkpoint.file.metadata import decode_metadata
from mpidist.checkpoint.file.saved import SavedArray, SavedFile
from mpidist.comm.group.agreement import on_first_rank, together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, DamagedCheckpointError, MismatchError


def open_together(
    communicator: Communicator, name: str, choice: Choice = EVERYTHING
) -> tuple[SavedFile, int | None, dict[str, Any]]:
    """Collective. Open a checkpoint on every rank.

    Args:
        communicator: The ranks.
        name: The file's name.
        choice: The part of the file that is taken.

    Returns:
        The open file, its number of saves, None where it has none, and its metadata. None of them is compared with its
        checksum yet.

    Raises:
        FileNotFoundError, IsADirectoryError: There is no such file, or it is a directory.
        MismatchError: The ranks pass different names.
        DamagedCheckpointError: The file is no complete checkpoint.
        CheckpointError: Its number of saves is none, or the choice does not fit it.
        TypeError: The choice has arguments of wrong types.
    """
    contents = on_first_rank(communicator, f"reading checkpoint {name!r}", lambda: _look_into(name))
    return together(communicator, f"opening checkpoint {name!r}", lambda: open_contents(contents, name, choice))


def _look_into(path: str) -> hdf5.Contents:
    # It may be the file of one of them, which has not got its name yet.
    wait_for_saves(os.path.dirname(path))
    require_file(path)
    try:
        return hdf5.read_contents(path)
    except FileNotFoundError:
        # Deleted in between.
        require_file(path)
        raise


def open_contents(
    contents: hdf5.Contents, name: str, choice: Choice
) -> tuple[SavedFile, int | None, dict[str, Any]]:
    """Local. Open a file of known structure; see `open_together`."""
    if contents.path != name:
        raise MismatchError(
            f"the path of a checkpoint must be the same on all ranks, got {contents.path!r} on rank 0 and {name!r}. "
            "Pass the same path on all ranks"
        )
    file = SavedFile(contents, choice)
    counter = file.find(SAVE_COUNTER)
    is_number = isinstance(counter, SavedArray) and (counter.shape, counter.dtype.kind) == ((), "i")
    if counter is not None and not is_number:
        raise CheckpointError(
            f"{name!r}: expected {SAVE_COUNTER!r} to be one integer, got {counter!r}; the file was not written by "
            "`save`"
        )
    return file, None if counter is None else int(counter), _metadata(file)


def _metadata(file: SavedFile) -> dict[str, Any]:
    if file.metadata is None:
        return {}
    try:
        return decode_metadata(str(file.metadata))
    except (DamagedCheckpointError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{file.contents.path!r} is damaged: {error}. {hdf5.WAY_OUT}") from None
