"""Files of node memory that somebody has left behind."""

from __future__ import annotations

import time
from pathlib import Path

# Another job on this host may be making node memory right now: its files have a name for milliseconds only, so those
# that keep theirs for so long are left behind.
_SECONDS = 5.0


def files_left_behind() -> list[Path]:
    """Local. The files of the library that stay in /dev/shm."""
    folder = Path("/dev/shm")
    found = set(folder.glob("mpidist-*"))
    begin = time.monotonic()
    while found and time.monotonic() - begin < _SECONDS:
        time.sleep(0.05)
        found &= set(folder.glob("mpidist-*"))
    return sorted(found)
