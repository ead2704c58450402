"""The exit code of the chief's program in a file beside its checkpoints: after a death the launcher's says nothing."""

from __future__ import annotations

import contextlib
import logging
import os

from mpidist.comm.group.solo import SoloCommunicator

logger = logging.getLogger("mpidist")

NAME = "exit-code"


class ExitCodeFile(SoloCommunicator):
    """The communicator of the chief's variables, which learns where they are saved first: the file is there."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""

    def share_directory(self, directory: str) -> None:
        """Local. Note the directory of a checkpoint. The file of an earlier job is removed."""
        if not self.path:
            self.path = os.path.join(directory, NAME)
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def write(self, code: int) -> None:
        """Local. Write the file, if a checkpoint was saved. A file that cannot be written is a warning.

        Args:
            code: The exit code of this process.
        """
        if not self.path:
            return
        try:
            with open(f"{self.path}.new", "w") as file:
                file.write(f"{code}\n")
            # A reader gets all of it, or none.
            os.replace(file.name, self.path)
        except OSError as error:
            logger.warning("the exit code %d cannot be written to %r: %s", code, self.path, error)
