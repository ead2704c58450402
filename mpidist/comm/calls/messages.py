"""The messages by which ranks on different nodes compare their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LargestNumbers(Protocol):
    """Waits for the largest numbers of all ranks."""

    def __call__(self, look: Callable[[], None] | None = None, /) -> list[int]:
        """Collective. The numbers; after an error of `look` it can be called again.

        Args:
            look: Called again and again meanwhile, and may raise.
        """
        ...


# `begin(numbers)` is Collective, and returns a function that waits for the largest numbers of all ranks.
BeginMax = Callable[[list[int]], LargestNumbers]


class CallMessages:
    """Comparisons between nodes, one of which is under way at a time.

    Args:
        begin_max: Finds the largest numbers.
        gather: Collective. The texts of all ranks.

    Attributes:
        gather: The constructor's argument.
        look: Called while this rank waits, and may raise; None: nothing.
        count: The number of the comparisons that this rank has begun.
    """

    def __init__(self, begin_max: BeginMax, gather: Callable[[str], list[str]]) -> None:
        self.gather = gather
        self._begin_max = begin_max
        self.look: Callable[[], None] | None = None
        self.count = 0
        self._pending: LargestNumbers | None = None

    def begin(self, checksum: int, *, is_asked: bool) -> None:
        """Collective. Begin to compare; the comparison before is complete.

        Args:
            checksum: The checksum of this rank's call and all before it.
            is_asked: This rank was interrupted.
        """
        self.count += 1
        self._pending = self._begin_max([checksum, -checksum, int(is_asked)])

    def complete(self) -> tuple[bool, bool]:
        """Collective. End the comparison that is under way.

        Returns:
            Whether all ranks have made the same calls, and whether a rank was interrupted.
        """
        pending = self._pending
        if pending is None:
            return True, False
        # Where `look` raises, it is under way still.
        largest, smallest, is_interrupted = pending(self.look)
        self._pending = None
        return largest == -smallest, bool(is_interrupted)

    def forget(self) -> None:
        """Local. Take calls before this moment for equal: ranks know already that they differ."""
        pending = self._pending
        if pending is not None:
            self._pending = lambda look=None: [0, 0, pending(look)[2]]

    def catch_up(self, count: int) -> None:
        """Collective. End all comparisons, where ranks have begun different numbers of them; nothing is compared.

        Args:
            count: The largest number.
        """
        self.look, look = None, self.look
        while self.count < count:
            self.complete()
            self.begin(0, is_asked=False)
        self.complete()
        self.look = look
