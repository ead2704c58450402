"""The exchange of notices: ranks tell each other what they know of the job's end while they compute."""

from __future__ import annotations

from collections.abc import Callable

from mpidist.comm.call_messages import BeginMax


class Exchange:
    """One search for the largest numbers of all ranks, which is under way during each step.

    Args:
        begin: Begins one.

    Attributes:
        count: Of those that this rank has begun.
    """

    def __init__(self, begin: BeginMax) -> None:
        self._begin = begin
        self._pending: Callable[[], list[int]] | None = None
        self.count = 0

    def hear(self) -> tuple[int, int]:
        """Collective. The end of the last search: the largest reason, and milliseconds; zeros before the first one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return 0, 0
        reason, milliseconds = pending()
        return reason, milliseconds

    def tell(self, reason: int, milliseconds: int) -> None:
        """Collective. Begin the next one.

        Args:
            reason: What this rank knows.
            milliseconds: Since when.
        """
        self._pending = self._begin([reason, milliseconds])
        self.count += 1

    def end(self, count: int) -> None:
        """Collective. End all searches, where ranks have begun different numbers of them.

        Args:
            count: The largest number.
        """
        while self.count < count:
            self.hear()
            self.tell(0, 0)
        self.hear()
