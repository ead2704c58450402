"""Files to delete: old checkpoints, and temporary files of saves and writes that were killed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Sequence

from mpidist.checkpoint.directory.state import LOCK_FILE, STATE_FILE, SUFFIX

logger = logging.getLogger("mpidist")

# In the name of a temporary file: `secrets.token_hex(4)`.
_TOKEN = "[0-9a-f]{8}"
# Of a rank's mark in a save in the background.
_RANK = r"(\.\d+)?"


def remove_temporaries(path: str) -> None:
    """Local. Delete the temporary files of a checkpoint: of writes to `path` that were killed."""
    directory, name = os.path.split(path)
    form = re.compile(rf"\.{re.escape(name)}\.{_TOKEN}{_RANK}\.tmp")
    with contextlib.suppress(FileNotFoundError):
        for other in filter(form.fullmatch, os.listdir(directory or os.curdir)):
            _delete(os.path.join(directory, other))


def remove_leftovers(directory: str, prefix: str) -> None:
    """Local. Delete the temporary files of saves that were killed.

    Args:
        directory: The directory of the checkpoints. Hold its lock: a temporary file of a job that is saving looks just
            the same.
        prefix: Their name up to the number.
    """
    # Not those of `Checkpoint.write`, which needs no lock, and may be writing: the next one deletes them.
    form = re.compile(
        rf"\.({re.escape(prefix)}-\d+{re.escape(SUFFIX)}(\.metrics)?|{STATE_FILE})\.{_TOKEN}{_RANK}\.tmp"
        rf"|\.?{re.escape(LOCK_FILE)}.*\.{_TOKEN}\.tmp"
    )
    for name in filter(form.fullmatch, os.listdir(directory or os.curdir)):
        _delete(os.path.join(directory, name))


def delete_checkpoints(directory: str, names: Sequence[str]) -> None:
    """Local. Delete checkpoints. One that cannot be deleted is only a warning, since the newer ones are safe."""
    for name in names:
        _delete(os.path.join(directory, name))
        _delete(os.path.join(directory, f"{name}.metrics"))


def _delete(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", path, error)
