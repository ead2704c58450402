"""What a job says on stderr, piece by piece: a test acts when it has said something, and reads on from there."""

from __future__ import annotations

import os
import re
import subprocess


class Listener:
    """Reads the stderr of a job. What it has read, `finish` does not give again.

    Args:
        process: The job.

    Attributes:
        text: All that was read.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._from = 0
        self.text = ""

    def until(self, pattern: str) -> str:
        """Read until a pattern has come after those of earlier calls, or until the job ends.

        Returns:
            What the job has said since the last pattern, to the end of this one; without it to the end.
        """
        begin = self._from
        while not (found := re.compile(pattern).search(self.text, begin)):
            # Not by the stream, which would read more and keep it.
            data = os.read(self._process.stderr.fileno(), 65536) if self._process.stderr else b""
            if not data:
                self._from = len(self.text)
                return self.text[begin:]
            self.text += data.decode(errors="replace")
        self._from = found.end()
        return self.text[begin : self._from]
