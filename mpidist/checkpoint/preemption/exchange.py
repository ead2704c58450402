"""The exchange of notices: ranks send each other notices of the job's end while they compute."""

from __future__ import annotations

from collections.abc import Callable

from mpidist.comm.calls.messages import BeginMax, LargestNumbers


class Exchange:
    """One search for the largest numbers of all ranks, which is pending during each step.

    Args:
        begin: A function that begins a search.

    Attributes:
        count: The number of searches that this rank has begun.
    """

    def __init__(self, begin: BeginMax) -> None:
        self._begin = begin
        self._pending: LargestNumbers | None = None
        self.count = 0

    def hear(self) -> tuple[int, int]:
        """Collective. End the last search; return the largest reason, and milliseconds; zeros before the first one."""
        reason, milliseconds, _, _ = self._wait()
        self._pending = None
        return reason, milliseconds

    def tell(self, reason: int, milliseconds: int, *, has_failed: bool = False) -> None:
        """Collective. Begin the next search.

        Args:
            reason: The reason of which this rank has a notice.
            milliseconds: The time since that notice.
            has_failed: Whether this rank makes no further step.
        """
        self._pending = self._begin([reason, milliseconds, int(has_failed), -reason])
        self.count += 1

    def shows_failure(self, look: Callable[[], None]) -> bool:
        """Collective over the ranks that know a reason. Wait for the search that has just begun.

        It shows whether a rank has failed.

        Args:
            look: A function that is called during the wait, since a rank that has failed in its step begins no search.
                It may raise.

        Returns:
            Whether a rank has failed, and all ranks know a reason, so that all of them wait here.
        """
        _, _, has_failed, least = self._wait(look)
        return has_failed > 0 and -least > 0

    def _wait(self, look: Callable[[], None] | None = None) -> list[int]:
        pending = self._pending
        numbers = [0, 0, 0, 0] if pending is None else pending(look)
        if pending is not None:
            self._pending = lambda _=None: numbers
        return numbers

    def end(self, count: int) -> None:
        """Collective. End all searches, where ranks have begun different numbers of them.

        Args:
            count: The largest number.
        """
        while self.count < count:
            self.hear()
            self.tell(0, 0)
        self.hear()
