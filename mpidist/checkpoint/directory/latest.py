"""The latest checkpoint of a directory, or the latest one that is whole."""

from __future__ import annotations

import logging
import os
import re

from mpidist.arguments import flag
from mpidist.checkpoint.directory.state import SUFFIX, DirectoryState, as_path, candidates, read_state, unnamed
from mpidist.checkpoint.file.hdf5 import read_contents
from mpidist.checkpoint.file.saved import SavedFile
from mpidist.checkpoint.transfer import verify
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger("mpidist")

# The number of files without a state file that are opened.
_LOOKS = 4


def latest_checkpoint(directory: str | os.PathLike[str], fallback: bool = False) -> str | None:
    """Local. Find the checkpoint that was saved last in a directory.

    Args:
        directory: The directory to which `Checkpoint.save` or a `CheckpointManager` saves.
        fallback: Read the whole file, and where it is damaged or gone, or the state file is damaged or lost, find the
            latest checkpoint that is whole, with a warning that names the others. Where many ranks restore,
            `CheckpointManager.restore_or_initialize(fallback=True)` reads each file once and not on every rank.

    Returns:
        The path, or None where there is no checkpoint, or, without `fallback`, where the file named by the state file
        is gone.

    Raises:
        DamagedCheckpointError: The state file is damaged, or is missing though there are checkpoints; with `fallback`:
            all checkpoints are damaged.
        CheckpointError: The state file is no regular file.
        TypeError: `directory` is no path.
    """
    directory = as_path("directory", directory)
    fallback = flag("fallback", fallback)
    if not fallback:
        state = read_state(directory)
        if state is None and (lost := _numbered(directory)):
            raise unnamed(directory, lost)
        path = None if state is None or state.latest is None else os.path.join(directory, state.latest)
        return path if path is not None and os.path.isfile(path) else None
    state = read_state(directory, DirectoryState())
    names = candidates(directory, state)
    if names and state.latest != names[0]:
        logger.warning("%s: the latest checkpoint is missing or not named; continuing with %s", directory, names[0])
    for name in names:
        path = os.path.join(directory, name)
        try:
            file = SavedFile(read_contents(path))
            verify(SoloCommunicator(), file, file.arrays)
        except DamagedCheckpointError as error:
            if name == names[-1]:
                raise
            logger.warning("%s. Continuing with the previous checkpoint", str(error))
        except FileNotFoundError:
            # A job that continues has deleted it, and has saved newer ones.
            return latest_checkpoint(directory, fallback=True)
        else:
            return path
    return None


def _numbered(directory: str) -> list[str]:
    """The checkpoints of a directory that have a number, found by opening only a few of them.

    Others were made by `Checkpoint.write`, which needs no state file, or are no checkpoints: data may be in HDF5, too.
    """
    names = [name for name in candidates(directory, None) if re.search(rf"-[0-9]+{re.escape(SUFFIX)}$", name)]
    return [name for name in names[:_LOOKS] if _is_checkpoint(os.path.join(directory, name))]


def _is_checkpoint(path: str) -> bool:
    try:
        read_contents(path)
    except (CheckpointError, OSError):
        return False
    return True
