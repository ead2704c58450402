"""The place of the copies in memory of one run: a directory of each node that `mpidist run` names.

A run has a folder for its files (`failures/restart/notes.py`), by a name that no other run has. The directory has the
same name, and a file `run` in it says where that folder is: who finds the directory of a dead run removes it
(`cli/run/sweep.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from mpidist.comm.group.shared_file import directory
from mpidist.failures.restart.notes import VARIABLE

# As in `cli/run/sweep.py`, which is a program of its own.
PREFIX = "mpidist-copies-"
RUN_PREFIX = ".mpidist-run-"
# A file in the folder of the run: there are copies, on some node.
MARK = "has-copies"


@dataclass(frozen=True)
class CopyPlace:
    """The place of the copies of one manager.

    Attributes:
        folder: The folder of the run.
        start: The number of this start of the job.
        name: A name for the manager's directory and its checkpoints' name.
    """

    folder: Path
    start: int
    name: str

    @property
    def home(self) -> Path:
        """Local. The directory of the run on this node."""
        return directory() / f"{PREFIX}{self.folder.name.removeprefix(RUN_PREFIX)}"

    @property
    def shown(self) -> Path:
        """Local. The directory of the manager in `home`, by a path that is the same on every node."""
        return self.home / self.name

    @property
    def path(self) -> Path:
        """Local. The directory of this host in `shown`: hosts may share a directory in memory."""
        return self.shown / socket.gethostname()

    def make(self) -> None:
        """Local. Make the directories on this node.

        Raises:
            OSError: They cannot be made, or are another user's.
        """
        self.home.mkdir(mode=0o700, exist_ok=True)
        if self.home.lstat().st_uid != os.getuid():
            raise PermissionError(f"{str(self.home)!r} is another user's")
        note = self.home / "run"
        if not note.exists():
            namespace = ""
            with contextlib.suppress(OSError):
                namespace = os.readlink("/proc/self/ns/pid")
            content = {"folder": str(self.folder), "host": socket.gethostname(), "namespace": namespace}
            beside = self.home / f"run-{os.getpid()}"
            beside.write_text(json.dumps(content))
            beside.rename(note)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def identity(self) -> tuple[str, int, int]:
        """Local. The identity of the directory on this node: the boot of its host, device and inode."""
        status, boot = self.path.stat(), ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, status.st_dev, status.st_ino

    def mark(self) -> None:
        """Local. Note for the run, and for the next start, that there are copies."""
        with contextlib.suppress(OSError):
            (self.folder / MARK).touch()

    @property
    def is_marked(self) -> bool:
        """Local. Whether an earlier start has made copies."""
        return (self.folder / MARK).exists()


def place_of_run(files: str, name: str) -> CopyPlace | None:
    """Local. The place for the copies of a manager; None where `mpidist run` has not started this job.

    Args:
        files: The directory of the manager.
        name: The first part of its files' names.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    start = Path(folder)
    number = int(start.name) if start.name.isdecimal() else 0
    return CopyPlace(start.parent, number, f"{zlib.crc32(f'{os.path.abspath(files)}|{name}'.encode()):08x}")


def arguments() -> int:
    """Local. A checksum of the program's words: another program of the same run has copies of its own."""
    return zlib.crc32("\0".join(sys.argv).encode("utf-8", "surrogateescape"))
