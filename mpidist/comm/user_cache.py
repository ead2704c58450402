"""The user's cache: a folder for answers and measurements that later jobs use again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Local. The folder `mpidist` in the user's cache, which need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mpidist"


def write_whole(path: Path, text: str) -> None:
    """Local. Write a file, and its folder if there is none, so that readers never see a part of it.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    # Atomic: another job may read the file now.
    unfinished.replace(path)
