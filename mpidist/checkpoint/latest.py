"""The latest checkpoint of a directory, or the latest one that is whole."""

from __future__ import annotations

import logging
import os

from mpidist.arguments import flag
from mpidist.checkpoint.directory import as_path, candidates, read_state
from mpidist.checkpoint.hdf5 import read_contents
from mpidist.checkpoint.saved import SavedFile
from mpidist.checkpoint.transfer import verify
from mpidist.comm.communicator import SoloCommunicator
from mpidist.errors import DamagedCheckpointError

logger = logging.getLogger("mpidist")


def latest_checkpoint(directory: str | os.PathLike[str], fallback: bool = False) -> str | None:
    """Local. Find the checkpoint that was saved last in a directory.

    Args:
        directory: The directory to which `Checkpoint.save` or a `CheckpointManager` saves.
        fallback: Read the whole file, and where it is damaged or gone, or the state file is lost, find the latest
            checkpoint that is whole, with a warning that names the others. Where many ranks restore,
            `CheckpointManager.restore_or_initialize(fallback=True)` reads each file once and not on every rank.

    Returns:
        The path, or None where there is no checkpoint, or, without `fallback`, where the file named by the state file
        is gone.

    Raises:
        ValueError: The state file is empty.
        CheckpointError: The state file names files outside the directory.
        DamagedCheckpointError: With `fallback`: all checkpoints are damaged.
        TypeError: `directory` is no path.
    """
    directory = as_path("directory", directory)
    fallback = flag("fallback", fallback)
    state = read_state(directory)
    if not fallback:
        path = None if state is None or state.latest is None else os.path.join(directory, state.latest)
        return path if path is not None and os.path.isfile(path) else None
    names = candidates(directory, state)
    if names and (state is None or state.latest != names[0]):
        logger.warning("%s: the latest checkpoint is gone or not named; going on with %s", directory, names[0])
    for name in names:
        path = os.path.join(directory, name)
        try:
            file = SavedFile(read_contents(path))
            verify(SoloCommunicator(), file, file.arrays)
        except DamagedCheckpointError as error:
            if name == names[-1]:
                raise
            logger.warning("%s. Going on with the one before", str(error))
        except FileNotFoundError:
            # A job that goes on has deleted it, and has saved newer ones.
            return latest_checkpoint(directory, fallback=True)
        else:
            return path
    return None
