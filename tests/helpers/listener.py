"""What a job says on stderr, piece by piece: a test acts when it has said something, and reads on from there."""

from __future__ import annotations

import re
import subprocess

from tests.helpers.launching import read_until


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
            if not (more := read_until(self._process, "(?s:.)")):
                self._from = len(self.text)
                return self.text[begin:]
            self.text += more
        self._from = found.end()
        return self.text[begin : self._from]
