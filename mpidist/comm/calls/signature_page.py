"""The page of a node: its ranks show each other their current call, and errors in it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from threading import Lock

# The size of a rank's part of the page: words and a text. No two ranks write to one cache line in a call.
PAGE_BYTES = 640
_WORDS = PAGE_BYTES // 8
# The words: two for calls, with even and with odd numbers; two for barriers; the call or barrier that the text is
# about, and the number of the call that it describes; whether the rank has left a call in the middle; whether a rank
# tells all others to leave their waits (a word of the first rank that all write); and whether this rank has left its
# wait. On further cache lines: the release of a barrier in a tree; SLEEPS words after the word of a barrier, the count
# until which the parent sleeps, and SLEEPS words after the release, the count until which the rank itself sleeps; and
# in words of the first rank that all write, whether any rank has left a call in the middle, and the words of
# `wide_page.py`.
_CALL_WORDS, _BARRIER_WORD, FLAGGED, _TEXT_WORD, _NUMBER_WORD, _BROKEN_WORD = 0, 2, 1, 4, 5, 6
_CALLED_WORD, _OUT_WORD, _RELEASE_WORD, SLEEPS, _ANY_BROKEN_WORD, WIDE_WORDS, _TEXT_BEGIN = 7, 8, 9, 8, 16, 18, 192
# A word is the number of a call, in 41 bits; a flag for an interrupt; and the checksum of this call and all before it.
# 22 bits are enough: if checksums of different calls happen to be equal, the next ones are not.
_HASH_BITS = 22
HASH = (1 << _HASH_BITS) - 1
FLAG = 1 << _HASH_BITS
NUMBER = 1 << _HASH_BITS + 1
# Added to the number of a barrier, so that no call has the sum: ranks may be in a barrier in calls of other numbers.
MEETINGS = 1 << 63
# Shown in place of the number of a call by a rank that still waits in it.
_WAITS = MEETINGS + MEETINGS - 1
# Seconds for which a difference must last in a rank that waits before it raises an error.
_DIFFERENCE_SECONDS = 0.5
# Seconds within which the texts of the other ranks arrive: these are in the same call, or about to enter it.
_TEXT_SECONDS = 2.0


def order_stores() -> None:
    """Local. Let all ranks see this rank's stores before it looks at any other word.

    x86 may move a load in front of an earlier store to another address (Intel SDM 3A, 9.2.3.4), but not in front of an
    atomic operation, such as taking a lock.
    """
    # A new lock: taking one that another thread holds, or that a signal handler has interrupted, could block.
    Lock().acquire()


class CallPage:
    """The memory in which the ranks of a node show their calls on one communicator.

    A rank has a word for calls with even numbers and one for calls with odd numbers: a fast rank may be in the next
    call while a slow one still reads the words of this one. The word for barriers is on the same cache line, which
    moves between the ranks' cores in each call anyway.

    Args:
        memory: Memory of `PAGE_BYTES` for each rank, zero at first.
        ranks: The ranks of the node, as the communicator numbers them.
        place: This rank's number among them.

    Attributes:
        memory: The constructor's argument.
        ranks: The constructor's argument.
        words: The memory as words of eight bytes, each of which is read and written atomically.
        own: Index of this rank's word, by the parity of a call's number.
        others: Indices of the other ranks' words, by the parity.
        looked_at: Indices, by the parity, of words that equal this rank's at the end of a call; if one differs, the
            calls are compared closely.
        own_barrier, others_barriers: Indices of this rank's and the others' words for barriers. FLAGGED words further
            is the count of the last barrier in which a rank has shown an interrupt.
        barriers, releases: Indices of all ranks' words for barriers and for releases.
        is_wide: Whether there are too many ranks for each to look at all others in each call.
    """

    is_wide = False

    def __init__(self, memory: memoryview, ranks: Sequence[int], place: int) -> None:
        self.memory = memory
        self.ranks = tuple(ranks)
        self.words = memory.cast("Q")
        even, self.own_barrier = place * _WORDS + _CALL_WORDS, place * _WORDS + _BARRIER_WORD
        self.own = (even, even + 1)
        others = [other * _WORDS for other in range(len(ranks)) if other != place]
        self.others = (tuple(one + _CALL_WORDS for one in others), tuple(one + _CALL_WORDS + 1 for one in others))
        self.looked_at = self.others
        self.others_barriers = tuple(one + _BARRIER_WORD for one in others)
        self.barriers = [one * _WORDS + _BARRIER_WORD for one in range(len(ranks))]
        self.releases = [one * _WORDS + _RELEASE_WORD for one in range(len(ranks))]
        self._place = place
        self._differs_since = math.inf

    def shown(self, number: int) -> int:
        """Local. This rank's word for calls of this parity, as last shown: `sign` may have changed the mark since."""
        return self.words[self.own[number & 1]]

    def differs(self, number: int, mark: int) -> bool:
        """Local. Whether another rank has shown a call of this number that differs from this rank's.

        Other ranks may not have reached this call, or may have left it already if ranks do not meet in it.
        """
        return any((mark ^ other) & HASH for other in self._marks(number))

    def tell(self, number: int) -> None:
        """Local. Do nothing where every rank looks at all others; see `WidePage.tell`."""

    def sees_difference(self, number: int, mark: int) -> bool:
        """Local. Whether calls differ, in a rank that waits: a difference that only this rank has seen counts, too."""
        return self.differs(number, mark)

    def settle(self, number: int) -> None:
        """Local. Clear the shown checksum: all ranks have detected that the calls of this number differ."""
        self.words[self.own[number & 1]] = number * NUMBER

    def differing_ranks(self, number: int) -> list[int]:
        """Local. The ranks that have shown a call of this number that differs from the one that this rank has shown."""
        own = self.shown(number)
        ranks = [rank for place, rank in enumerate(self.ranks) if place != self._place]
        shown = [self.words[place] for place in self.others[number & 1]]
        return [
            rank for rank, word in zip(ranks, shown, strict=True)
            if own // NUMBER == word // NUMBER == number and (own ^ word) & HASH
        ]

    def differs_for_long(self, number: int, mark: int) -> bool:
        """Local. Whether, for some time, `differs` was true or a rank had left a call in the middle.

        Such a rank may be about to raise an error that all ranks share; therefore a difference must last.
        """
        if not (self.sees_difference(number, mark) or self.broken_ranks()):
            self._differs_since = math.inf
            return False
        self._differs_since = min(self._differs_since, time.monotonic())
        return time.monotonic() > self._differs_since + _DIFFERENCE_SECONDS

    def is_flagged(self, number: int, mark: int) -> bool:
        """Local. Whether another rank has shown this call with an interrupt."""
        return (mark | FLAG) in self._marks(number)

    def _marks(self, number: int) -> list[int]:
        """The marks that other ranks have shown for the call of this number."""
        words = [self.words[place] for place in self.others[number & 1]]
        return [word % NUMBER for word in words if word // NUMBER == number]

    def has_written(self, about: int) -> bool:
        """Local. Whether this rank has shown a text about this; see `write`."""
        return self.words[self._place * _WORDS + _TEXT_WORD] == about

    def write(self, about: int, number: int, text: str) -> None:
        """Local. Show a text about this rank's last call.

        Args:
            about: The number of the call, or of the barrier: the same on all ranks that write and read.
            number: The number of the call.
            text: The text.
        """
        begin, content = self._place * PAGE_BYTES + _TEXT_BEGIN, text.encode()[: PAGE_BYTES - _TEXT_BEGIN - 1] + b"\0"
        self.memory[begin : begin + len(content)] = content
        self.words[self._place * _WORDS + _NUMBER_WORD] = number
        self.words[self._place * _WORDS + _TEXT_WORD] = about

    def write_for_others(self, number: int, text: str) -> None:
        """Local. Show a text about the call of this number, in which this rank waits and has seen no difference yet.

        Args:
            number: The number of the call.
            text: The text.
        """
        # Ranks that read it must not assume that this rank raises the same error.
        self.write(number, _WAITS, text)

    def texts(self, about: int, number: int) -> tuple[dict[int, str], bool]:
        """Local. The texts of all ranks by rank, without those that do not arrive in time.

        A rank that has left a call in the middle has shown a text about that, which counts, too.

        Args:
            about: See `write`.
            number: See `write`.

        Returns:
            The texts, and whether all of them describe calls of this number.
        """
        end = time.monotonic() + _TEXT_SECONDS
        texts: dict[int, str] = {}
        numbers: set[int] = set()
        for place, rank in enumerate(self.ranks):
            while not (is_there := self._has_text(place, about)) and time.monotonic() < end:
                # Many ranks that look often would delay the last ranks, which still have to write their texts.
                time.sleep(0.0005 * max(1, len(self.ranks) // 8))
            if is_there:
                numbers.add(self.words[place * _WORDS + _NUMBER_WORD])
                texts[rank] = self.text(rank)
        return texts, numbers == {number}

    def break_off(self, number: int, mark: int, why: str) -> None:
        """Local. Show that this rank has left the call of this number and mark in the middle; the first time counts."""
        if not self.words[self._place * _WORDS + _BROKEN_WORD]:
            self.write(number, number, why)
            self.words[self._place * _WORDS + _BROKEN_WORD] = 1
            self.words[_ANY_BROKEN_WORD] = 1
            # Ranks that wait for this one see that it is not in their call.
            self.words[self.own[number & 1]] = number * NUMBER + (mark ^ 1)

    @property
    def is_called_out(self) -> bool:
        """Local. Whether a rank has failed and makes no further call, so that all ranks must leave their waits."""
        return self.words[_CALLED_WORD] > 0

    def call_out(self) -> None:
        """Local. Tell all ranks to leave their waits, and show that this rank has left its wait."""
        self.words[self._place * _WORDS + _OUT_WORD] = 1
        self.words[_CALLED_WORD] = 1

    def are_out(self) -> bool:
        """Local. Whether all ranks have left their waits."""
        return all(self.words[place * _WORDS + _OUT_WORD] for place in range(len(self.ranks)))

    def end_call(self) -> None:
        """Local. Reset the flags that `call_out` has set, so that ranks wait again."""
        self.words[self._place * _WORDS + _OUT_WORD] = 0
        self.words[_CALLED_WORD] = 0

    def text(self, rank: int) -> str:
        """Local. The last text of a rank; empty if there is none."""
        place = self.ranks.index(rank)
        content = bytes(self.memory[place * PAGE_BYTES + _TEXT_BEGIN : (place + 1) * PAGE_BYTES])
        return content.split(b"\0")[0].decode(errors="replace")

    def text_about(self, rank: int, number: int) -> str:
        """Local. The text that a rank has shown about the call of this number; empty if there is none."""
        return self.text(rank) if self._has_text(self.ranks.index(rank), number) else ""

    def _has_text(self, place: int, about: int) -> bool:
        """Whether a rank has shown a text about this, or about a call that it has left in the middle."""
        words = self.words[place * _WORDS : (place + 1) * _WORDS]
        return words[_TEXT_WORD] == about or words[_BROKEN_WORD] > 0

    def broken_ranks(self) -> list[int]:
        """Local. The ranks that have left a call in the middle."""
        if not self.words[_ANY_BROKEN_WORD]:
            return []
        return [rank for place, rank in enumerate(self.ranks) if self.words[place * _WORDS + _BROKEN_WORD]]
