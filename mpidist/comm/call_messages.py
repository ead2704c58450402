"""The messages by which ranks on different nodes compare their calls."""

from __future__ import annotations

from collections.abc import Callable

# `begin(numbers)` is Collective, and returns a function that waits for the largest numbers of all ranks.
BeginMax = Callable[[list[int]], Callable[[], list[int]]]


class CallMessages:
    """Comparisons between nodes, one of which is under way at a time.

    Args:
        begin_max: Finds the largest numbers.
        gather: Collective. The texts of all ranks.

    Attributes:
        gather: As given.
    """

    def __init__(self, begin_max: BeginMax, gather: Callable[[str], list[str]]) -> None:
        self.gather = gather
        self._begin_max = begin_max
        self._pending: Callable[[], list[int]] | None = None

    def begin(self, checksum: int, *, is_asked: bool) -> None:
        """Collective. Begin to compare; the comparison before is complete.

        Args:
            checksum: Of this rank's call and all before it.
            is_asked: This rank was interrupted.
        """
        self._pending = self._begin_max([checksum, -checksum, int(is_asked)])

    def complete(self) -> tuple[bool, bool]:
        """Collective. End the comparison that is under way.

        Returns:
            Whether all ranks have made the same calls, and whether a rank was interrupted.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return True, False
        largest, smallest, is_interrupted = pending()
        return largest == -smallest, bool(is_interrupted)

    def forget(self) -> None:
        """Local. Take calls before this moment for equal: ranks know already that they differ."""
        pending = self._pending
        if pending is not None:
            self._pending = lambda: [0, 0, pending()[2]]
