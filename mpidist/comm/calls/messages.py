"""The messages by which ranks on different nodes compare their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LargestNumbers(Protocol):
    """A pending operation that finds the largest numbers of all ranks."""

    def __call__(self, look: Callable[[], None] | None = None, /) -> list[int]:
        """Collective. Wait for the numbers; after an error of `look` this can be called again.

        Args:
            look: A function that is called repeatedly meanwhile, and may raise.
        """
        ...


# `begin(numbers)` is Collective, and returns a function that waits for the largest numbers of all ranks.
BeginMax = Callable[[list[int]], LargestNumbers]


class CallMessages:
    """Comparisons between nodes, of which at most one is pending.

    Args:
        begin_max: A function that finds the largest numbers of all ranks.
        gather: A function that is Collective and returns the texts of all ranks.

    Attributes:
        gather: The constructor's argument.
        look: A function that is called while this rank waits, and may raise; None: no function.
        count: Number of comparisons that this rank has begun.
    """

    def __init__(self, begin_max: BeginMax, gather: Callable[[str], list[str]]) -> None:
        self.gather = gather
        self._begin_max = begin_max
        self.look: Callable[[], None] | None = None
        self.count = 0
        self._pending: LargestNumbers | None = None

    def begin(self, checksum: int, *, is_asked: bool) -> None:
        """Collective. Begin to compare; the previous comparison must be complete.

        Args:
            checksum: The checksum of this rank's call and all before it.
            is_asked: Whether this rank was interrupted.
        """
        self.count += 1
        self._pending = self._begin_max([checksum, -checksum, int(is_asked)])

    def complete(self) -> tuple[bool, bool]:
        """Collective. Complete the pending comparison.

        Returns:
            Whether all ranks have made the same calls, and whether a rank was interrupted.
        """
        pending = self._pending
        if pending is None:
            return True, False
        # If `look` raises, the comparison is still pending.
        largest, smallest, is_interrupted = pending(self.look)
        self._pending = None
        return largest == -smallest, bool(is_interrupted)

    def forget(self) -> None:
        """Local. Treat all earlier calls as equal: the ranks have already detected that these differ."""
        pending = self._pending
        if pending is not None:
            self._pending = lambda look=None: [0, 0, pending(look)[2]]

    def catch_up(self, count: int) -> None:
        """Collective. End all comparisons without comparing, when ranks have begun different numbers of them.

        Args:
            count: The largest of these numbers.
        """
        self.look, look = None, self.look
        while self.count < count:
            self.complete()
            self.begin(0, is_asked=False)
        self.complete()
        self.look = look
